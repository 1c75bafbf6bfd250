"""The TPU kernel of ``rejection_sample``: one slot per turn, its rows in sublanes."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels.bisection import first_above
from tpuspec.kernels.row_weights import RowOptions, Weights, warp_rows
from tpuspec.kernels.sampling_reference import WarpedRows
from tpuspec.kernels.vocabulary_tiles import (
    LANES,
    SUBLANES,
    check_logits,
    check_vmem,
    first_largest,
    logit_tiles,
    pad_lanes,
    row_sum,
    rows_above,
    tiles_of,
)

# What a slot needs done; each includes the ones before it but GREEDY.
_DEAD, _GREEDY, _PLAIN, _CUT, _TRUNCATED = range(5)
_MAX_ROWS = 16


def rejection_sample_pallas(drafts_Bγ, draft_logits_BγV, draft_rows_Bγ, target_logits_BGV, options,
                            limit_B, active_B, accept_uniforms_Bγ, next_uniforms_BG, *,
                            vocabulary_size, interpret):
    B, G, _ = target_logits_BGV.shape
    if not 1 < G <= _MAX_ROWS:
        raise NotImplementedError(f"the kernel takes 1 to {_MAX_ROWS - 1} drafts, got {G - 1}")
    for logits in (target_logits_BGV, draft_logits_BγV):
        check_logits(logits, vocabulary_size)
    target_logits_BGV, draft_logits_BγV = map(pad_lanes, (target_logits_BGV, draft_logits_BγV))
    scratch = [Weights.scratch_shape(rows, vocabulary_size) for rows in (G, G - 1)]
    scratch += [(rows_above(tiles_of(vocabulary_size)), LANES)] * 2
    blocks = [(1, *x.shape[1:]) for x in (target_logits_BGV, draft_logits_BγV)]
    check_vmem(blocks, scratch, interpret)

    ints, floats = prefetched_scalars(drafts_Bγ, draft_rows_Bγ, options, limit_B, active_B,
                                      accept_uniforms_Bγ, next_uniforms_BG)

    def logits_block(which, shape):
        return pl.BlockSpec(shape, lambda b, ints, _: (ints[b * (5 + G - 1) + which], 0, 0))

    figures = pl.BlockSpec((1, 1, LANES), lambda b, *_: (b, 0, 0))
    decided, overlap = pl.pallas_call(
        functools.partial(_kernel, G=G, vocabulary_size=vocabulary_size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B,),
            in_specs=[logits_block(i, shape) for i, shape in enumerate(blocks)],
            out_specs=[figures, figures],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch]),
        out_shape=[jax.ShapeDtypeStruct((B, 1, LANES), jnp.int32),
                   jax.ShapeDtypeStruct((B, 1, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True),
        interpret=interpret,
        name="rejection_sample",
    )(ints, floats, target_logits_BGV, draft_logits_BγV)
    decided = decided[:, 0]
    return decided[:, 0], decided[:, 1], overlap[:, 0, :G - 1], decided[:, 2] > 0


def prefetched_scalars(drafts_Bγ, draft_rows_Bγ, options, limit_B, active_B, accept_uniforms_Bγ,
                       next_uniforms_BG):
    """What steers the kernel, slot after slot: integers and floats, in flat arrays."""
    temperature_B, top_k_B, top_p_B, min_p_B = options
    mode_B = jnp.where((top_k_B > 0) | (top_p_B < 1), _TRUNCATED,
                       jnp.where(min_p_B > 0, _CUT, _PLAIN))
    mode_B = jnp.where(active_B, jnp.where(temperature_B == 0, _GREEDY, mode_B), _DEAD)
    # A slot that does not need its block names the one before, which is not fetched again.
    slot_B = jnp.arange(len(mode_B))
    before_BB = slot_B[:, None] >= slot_B[None, :]
    fetch = [jnp.max(jnp.where(before_BB & (mode_B >= least)[None, :], slot_B[None, :], 0), axis=1)
             for least in (_GREEDY, _PLAIN)]
    column = [x[:, None] for x in (*fetch, mode_B, top_k_B, limit_B)]
    ints = jnp.concatenate([*column, drafts_Bγ], axis=1).astype(jnp.int32)
    column = [x[:, None] for x in (temperature_B, top_p_B, min_p_B)]
    floats = jnp.concatenate(
        [*column, next_uniforms_BG, accept_uniforms_Bγ, *draft_rows_Bγ], axis=1)

    return ints.reshape(-1), floats.astype(jnp.float32).reshape(-1)


def _kernel(
    # Prefetched scalars, slot after slot.
    ints_ref,  # fetch of target, of draft, mode, top_k, limit, drafts [γ]
    floats_ref,  # temperature, top_p, min_p, next [G], accept [γ], top, threshold, total [γ]
    # Inputs.
    target_ref,  # [1, G, V]
    draft_ref,  # [1, γ, U]
    # Outputs.
    decided_ref,  # [1, 1, 128]: accepted, next token, sound
    overlap_ref,  # [1, 1, 128]: by draft
    # Scratch.
    target_e_ref,  # see Weights
    draft_e_ref,
    p_ref,  # [V / 128, 128]: one row's probabilities, see _row_difference
    residual_ref,
    # Parameters.
    *,
    G,
    vocabulary_size,
):
    γ = G - 1
    slot = pl.program_id(0)

    def int_of(i):
        return ints_ref[slot * (5 + γ) + i]

    def float_of(i):
        return floats_ref[slot * (3 + G + 4 * γ) + i]

    mode, limit = int_of(2), int_of(4)
    drafts = [int_of(5 + i) for i in range(γ)]
    row = lax.broadcasted_iota(jnp.int32, (G, LANES), 0)
    lane = lax.broadcasted_iota(jnp.int32, (G, LANES), 1)

    def by_row(values):
        """[γ, 128] with one scalar in each row."""
        column = jnp.full((γ, LANES), values[0])
        for i, value in enumerate(values[1:], 1):
            column = jnp.where(row[:γ] == i, value, column)
        return column

    def accept(kept):
        """Number of leading drafts kept, [1, 128] and scalar."""
        stop = jnp.where(kept & (row[:γ] < limit), γ, row[:γ]).astype(jnp.float32)
        accepted = jnp.min(stop, axis=0, keepdims=True)
        return accepted, accepted[0, 0].astype(jnp.int32)

    def put(accepted, token, top, overlap):
        sound = jnp.where((jnp.abs(top) < jnp.inf) | (row.astype(jnp.float32) > accepted), 1.0, 0.0)
        sound = jnp.min(sound, axis=0, keepdims=True)
        figures = jnp.where(lane[:1] == 0, accepted, jnp.where(lane[:1] == 1, token, sound))
        decided_ref[0] = figures.astype(jnp.int32)
        overlap_ref[0] = jnp.sum(jnp.where(lane[:γ] == row[:γ], overlap, 0.0), 0, keepdims=True)

    @pl.when(mode == _DEAD)
    def _():
        decided_ref[0] = jnp.where(lane[:1] == 2, 1, 0)
        overlap_ref[0] = jnp.zeros((1, LANES), jnp.float32)

    target_logits = logit_tiles(target_ref.at[0], vocabulary_size)

    @pl.when(mode == _GREEDY)
    def _():
        top, ids = first_largest(target_logits, tiles_of(vocabulary_size), (G, LANES))
        equal = ids[:γ] == by_row(drafts).astype(jnp.float32)
        accepted, n = accept(equal)
        put(accepted, _of_row(ids, n), top, jnp.where(equal, 1.0, 0.0))

    @pl.when(mode >= _PLAIN)
    def _():
        temperature = float_of(0)
        options = RowOptions(*(jnp.full((G, LANES), x, jnp.float32) for x in (
            temperature, int_of(3).astype(jnp.float32), float_of(1), float_of(2))))
        target = Weights(target_e_ref, G, vocabulary_size)
        draft = Weights(draft_e_ref, γ, vocabulary_size)
        p_rows = warp_rows(target, target_logits, options, mode == _TRUNCATED, mode >= _CUT)
        q_rows = WarpedRows(*(by_row([float_of(3 + G + γ * k + i) for i in range(γ)])
                              for k in (1, 2, 3)))
        overlap = _overlap(target, draft, logit_tiles(draft_ref.at[0], vocabulary_size), p_rows,
                           q_rows, options)

        p_at, q_at = (weights.probabilities(drafts, rows)
                      for weights, rows in ((target, p_rows), (draft, q_rows)))
        coins = by_row([float_of(3 + G + i) for i in range(γ)])
        accepted, n = accept(coins * q_at < p_at[:γ])
        _row_difference(target, draft, p_rows, q_rows, n, n < limit, p_ref, residual_ref)
        token = _draw(p_ref, residual_ref, float_of(3 + n))
        put(accepted, token, p_rows.top, overlap)


def _of_row(rows, i):
    """[1, 128] one row, whatever the others hold."""
    row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.sum(jnp.where(row == i, rows, 0.0), axis=0, keepdims=True)


def _overlap(target, draft, draft_logits, p_rows, q_rows, options):
    """Σ min(p, q) of each draft's row; fills the draft's weights on the way."""
    γ = draft.rows
    ratio = p_rows.total[:γ] / q_rows.total

    def e(tile):
        return jnp.exp((draft_logits(tile) - q_rows.top) / options.temperature[:γ])

    def least(tile, e):
        q = jnp.where(e >= q_rows.threshold, e, 0.0) * ratio
        e = target[tile][:γ]
        return jnp.minimum(jnp.where(e >= p_rows.threshold[:γ], e, 0.0), q)

    return draft.fill(e, least) / p_rows.total[:γ]


def _row_difference(target, draft, p_rows, q_rows, n, rejected, p_ref, residual_ref):
    """Row n of p and of max(0, p - q), or of p twice if no draft was rejected.

    Eight tiles of the one row make a register: i-th of T is rows i * 8 to i * 8 + 7,
    its sublane s holding tile s * T + i.
    """
    registers = p_ref.shape[0] // SUBLANES
    at_draft = jnp.minimum(n, draft.rows - 1)

    def everywhere(rows, i):
        return jnp.broadcast_to(_of_row(rows, i), (SUBLANES, LANES))

    p_row = WarpedRows(*(everywhere(x, n) for x in p_rows))
    q_row = WarpedRows(*(everywhere(x, at_draft) for x in q_rows))
    for i in range(registers):
        e = target.eight_tiles(n, i, registers)
        p = jnp.where(e >= p_row.threshold, e, 0.0) / p_row.total
        e = draft.eight_tiles(at_draft, i, registers)
        q = jnp.where(e >= q_row.threshold, e, 0.0) / q_row.total
        at = pl.ds(i * SUBLANES, SUBLANES)
        p_ref[at, :] = p
        residual_ref[at, :] = jnp.where(rejected, jnp.maximum(p - q, 0.0), p)


def _draw(p_ref, residual_ref, uniform):
    """[1, 128] the id drawn from the residual, or from p if rounding left nothing of it."""
    registers = p_ref.shape[0] // SUBLANES
    shape = (SUBLANES, -(-registers // LANES) * LANES)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    at = [pl.ds(i * SUBLANES, SUBLANES) for i in range(registers)]

    def whole(tile):
        down = jnp.sum(jnp.sum(tile, axis=1, keepdims=True), axis=0, keepdims=True)
        return jnp.broadcast_to(down, tile.shape)

    most = functools.reduce(jnp.maximum, [residual_ref[i, :] for i in at])
    empty = jnp.max(most, axis=(0, 1), keepdims=True) == 0
    sums = jnp.zeros(shape, jnp.float32)
    for i in range(registers):
        weights = jnp.where(empty, p_ref[at[i], :], residual_ref[at[i], :])
        residual_ref[at[i], :] = weights
        sums = jnp.where(lane == i, jnp.sum(weights, axis=1, keepdims=True), sums)
    ids = lax.broadcasted_iota(jnp.int32, shape, 0) * registers + lane
    ids = jnp.where(lane < registers, ids, 0)
    goal = uniform * whole(sums)
    tile = first_above(sums, ids, goal, p_ref.shape[0], whole)
    before = whole(jnp.where(ids < tile, sums, 0.0))

    at_tile = tile[0, 0]
    start = lax.rem(at_tile, registers) * SUBLANES + lax.div(at_tile, registers)
    weights = residual_ref[pl.ds(start, 1), :]
    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    at_lane = first_above(weights, lane, (goal - before)[:1, :LANES], LANES, row_sum)
    return (tile[:1, :LANES] * LANES + at_lane).astype(jnp.float32)
