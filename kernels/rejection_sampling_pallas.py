"""The TPU kernel of ``rejection_sample``: one slot after the other, its rows in sublanes.

A slot's turn has two phases over blocks of the vocabulary. First the target's logits are
taken in; with the last block their distributions are found and the drafts judged. From
that step on the draft's logits pass by, for the overlap and for what a rejection leaves of
the one row that the next token is drawn from. With one block both phases are one step.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels.rejection_scalars import (
    CUT,
    DEAD,
    GREEDY,
    INTS,
    PLAIN,
    TRUNCATED,
    prefetched_scalars,
)
from tpuspec.kernels.row_draw import RowDraw
from tpuspec.kernels.row_weights import (
    RowOptions,
    Weights,
    of_row,
    pick,
    probability,
    warp_rows,
)
from tpuspec.kernels.sampling_blocks import (
    VmemUse,
    check_logits,
    row_bytes,
    tpu_info,
)
from tpuspec.kernels.sampling_reference import WarpedRows
from tpuspec.kernels.vocabulary_tiles import (
    LANES,
    SUBLANES,
    first_largest,
    join_largest,
    logit_tiles,
    pad_lanes,
    rows_above,
    tiles_of,
)

_MAX_ROWS = 16


def rejection_sample_pallas(drafts_Bγ, draft_logits_BγV, draft_rows_Bγ, target_logits_BGV, options,
                            limit_B, active_B, accept_uniforms_Bγ, next_uniforms_BG, *,
                            vocabulary_size, blocks, interpret):
    B, G, _ = target_logits_BGV.shape
    γ = G - 1
    if not 1 < G <= _MAX_ROWS:
        raise NotImplementedError(f"the kernel takes 1 to {_MAX_ROWS - 1} drafts, got {γ}")
    for logits in (target_logits_BGV, draft_logits_BγV):
        check_logits(logits, vocabulary_size)
    target_logits_BGV, draft_logits_BγV = map(pad_lanes, (target_logits_BGV, draft_logits_BγV))
    vmem = rejection_vmem(G, vocabulary_size)
    blocks = blocks or vmem.blocks(tpu_info(interpret), vocabulary_size)
    count = blocks.count(vocabulary_size)
    ints, floats = prefetched_scalars(drafts_Bγ, draft_rows_Bγ, options, limit_B, active_B,
                                      accept_uniforms_Bγ, next_uniforms_BG)

    def logits_spec(rows, fetch, least, first_step):
        def index(slot, step, ints, _):
            at = slot * (INTS + γ)
            needed = jnp.where(ints[at + 2] >= least, step - first_step, count - 1)
            return ints[at + fetch], 0, jnp.clip(needed, 0, count - 1)

        return pl.BlockSpec((1, rows, blocks.tiles * LANES), index)

    # No operand without a use: compilers have been known to take them badly.
    ahead = count > 1
    kernel = _kernel if ahead else _kernel_without_copies
    figures = pl.BlockSpec((1, 1, LANES), lambda slot, *_: (slot, 0, 0))
    decided, overlap = pl.pallas_call(
        functools.partial(kernel, G=G, vocabulary_size=vocabulary_size, blocks=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, 2 * count - 1),
            in_specs=[logits_spec(G, 0, GREEDY, 0), logits_spec(γ, 1, PLAIN, count - 1),
                      *[pl.BlockSpec(memory_space=pl.ANY)] * ahead],
            out_specs=[figures, figures],
            scratch_shapes=[
                pltpu.VMEM(Weights.scratch_shape(G, vocabulary_size), jnp.float32),
                pltpu.VMEM(Weights.scratch_shape(γ, blocks.tiles * LANES), jnp.float32),
                *RowDraw.scratch(vocabulary_size),
                pltpu.VMEM((3, G, LANES), jnp.float32),
                pltpu.VMEM((γ, LANES), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                *[pltpu.VMEM((γ, γ, LANES), jnp.float32), pltpu.SemaphoreType.DMA] * ahead,
            ]),
        out_shape=[jax.ShapeDtypeStruct((B, 1, LANES), jnp.int32),
                   jax.ShapeDtypeStruct((B, 1, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True,
            vmem_limit_bytes=vmem.limit(blocks)),
        interpret=interpret,
        name="rejection_sample",
    )(ints, floats, target_logits_BGV, *[draft_logits_BγV] * (1 + ahead))
    decided = decided[:, 0]
    return decided[:, 0], decided[:, 1], overlap[:, 0, :γ], decided[:, 2] > 0


def rejection_vmem(G: int, vocabulary_size: int) -> VmemUse:
    """Kept are the target's rows, the one that is drawn from, twice, and some registers; of
    a block there are both operands' two buffers and the draft's weights."""
    tiles = rows_above(tiles_of(vocabulary_size))
    return VmemUse(
        kept=tiles * (row_bytes(G) + 2 * row_bytes(1) // SUBLANES) + (5 + G) * row_bytes(G),
        per_tile=2 * row_bytes(G) + 3 * row_bytes(G - 1))


def _kernel_without_copies(*refs, **parameters):
    """Where a block is the whole vocabulary, the draft's logits are all there."""
    all_refs = [*refs[:4], None, *refs[4:], None, None]
    _kernel(*all_refs, **parameters)


def _kernel(
    # Prefetched scalars, slot after slot.
    ints_ref,  # fetch of target, of draft, mode, top_k, limit, drafts [γ]
    floats_ref,  # temperature, top_p, min_p, next [G], accept [γ], top, threshold, total [γ]
    # Inputs.
    target_ref,  # [1, G, a block of V]
    draft_ref,  # [1, γ, a block of U]
    draft_hbm,  # [B, γ, U]
    # Outputs.
    decided_ref,  # [1, 1, 128]: accepted, next token, sound
    overlap_ref,  # [1, 1, 128]: by draft
    # Scratch.
    target_e_ref,  # see Weights
    draft_e_ref,  # of a block
    p_ref,  # see RowDraw
    residual_ref,
    rows_ref,  # [3, G, 128]: top, threshold, total of the target; greedy: top, its id
    least_ref,  # [γ, 128]: sum of min(p, q) so far, times the total of p
    accepted_ref,  # SMEM [1]
    drafted_ref,  # [γ, γ, 128]: the tile with draft i, of all rows
    semaphore,
    # Parameters.
    *,
    G,
    vocabulary_size,
    blocks,
):
    γ, count = G - 1, blocks.count(vocabulary_size)
    slot, step = pl.program_id(0), pl.program_id(1)

    def int_of(i):
        return ints_ref[slot * (INTS + γ) + i]

    def float_of(i):
        return floats_ref[slot * (3 + G + 4 * γ) + i]

    mode, limit = int_of(2), int_of(4)
    drafts = [int_of(INTS + i) for i in range(γ)]
    row = lax.broadcasted_iota(jnp.int32, (G, LANES), 0)
    lane = lax.broadcasted_iota(jnp.int32, (G, LANES), 1)
    target = Weights(target_e_ref, G, vocabulary_size)

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

    # The tiles with the drafts decide before the last of the draft's blocks comes by. They
    # are copied ahead, unless they are here: a copy would queue behind the next slot's.
    tiles = [pl.ds(pl.multiple_of(lax.div(at, LANES) * LANES, LANES), LANES) for at in drafts]
    copies = [pltpu.make_async_copy(draft_hbm.at[slot, :, tile], drafted_ref.at[i], semaphore)
              for i, tile in enumerate(tiles) if draft_hbm is not None]

    @pl.when((mode == DEAD) & (step == 0))
    def _():
        decided_ref[0] = jnp.where(lane[:1] == 2, 1, 0)
        overlap_ref[0] = jnp.zeros((1, LANES), jnp.float32)

    @pl.when((mode >= PLAIN) & (step == 0))
    def _():
        for copy in copies:
            copy.start()

    def logits_of(ref, first, tiles):
        return logit_tiles(ref.at[0], blocks.ids(first, tiles, vocabulary_size))

    def find_largest(first, tiles):
        top, ids = first_largest(logits_of(target_ref, first, tiles), tiles, (G, LANES))
        join_largest(rows_ref, step == 0, first, top, ids)

    def take_in(first, tiles):
        top = target.take_in(logits_of(target_ref, first, tiles), first, tiles)
        rows_ref[0] = jnp.where(step == 0, top, jnp.maximum(rows_ref[0], top))

    @pl.when(mode == GREEDY)
    def _():
        blocks.each(step, vocabulary_size, find_largest)

    @pl.when(mode >= PLAIN)
    def _():
        blocks.each(step, vocabulary_size, take_in)

    judges = step == count - 1

    @pl.when((mode == GREEDY) & judges)
    def _():
        top, ids = rows_ref[0], rows_ref[1]
        equal = ids[:γ] == by_row(drafts).astype(jnp.float32)
        accepted, n = accept(equal)
        put(accepted, of_row(ids, n), top, jnp.where(equal, 1.0, 0.0))

    temperature = float_of(0)

    def q_rows():
        return WarpedRows(*(by_row([float_of(3 + G + γ * k + i) for i in range(γ)])
                            for k in (1, 2, 3)))

    @pl.when((mode >= PLAIN) & judges)
    def _():
        options = RowOptions(*(jnp.full((G, LANES), x, jnp.float32) for x in (
            temperature, int_of(3).astype(jnp.float32), float_of(1), float_of(2))))
        p_rows = warp_rows(target, rows_ref[0], options, mode == TRUNCATED, mode >= CUT)
        for copy in copies:
            copy.wait()
        logits = pick([drafted_ref[i] if copies else draft_ref[0, :, tile]
                       for i, tile in enumerate(tiles)], drafts, (γ, LANES))
        q = q_rows()
        q_at = probability(jnp.exp((logits - q.top) / temperature), q)
        coins = by_row([float_of(3 + G + i) for i in range(γ)])
        _, n = accept(coins * q_at < target.probabilities(drafts, p_rows)[:γ])
        accepted_ref[0] = n
        for i, figure in enumerate(p_rows):
            rows_ref[i] = figure
        least_ref[...] = jnp.zeros((γ, LANES), jnp.float32)

    def compare(first, tiles):
        n, p, q = accepted_ref[0], WarpedRows(*(rows_ref[i] for i in range(3))), q_rows()
        draft = Weights(draft_e_ref, γ, tiles * LANES)
        logits = logits_of(draft_ref, first, tiles)
        ratio = p.total[:γ] / q.total

        def least(tile, e):
            q_e = jnp.where(e >= q.threshold, e, 0.0) * ratio
            p_e = target[tile.after(first)][:γ]
            return jnp.minimum(jnp.where(p_e >= p.threshold[:γ], p_e, 0.0), q_e)

        least_ref[...] += draft.fill(
            lambda tile: jnp.exp((logits(tile) - q.top) / temperature), least)
        row_draw = RowDraw(p_ref, residual_ref)
        row_draw.take_in(target, draft, p, q, n, n < limit, first)

        @pl.when(step == 2 * count - 2)
        def _():
            token = row_draw.draw(float_of(3 + n))
            put(jnp.full((1, LANES), n).astype(jnp.float32), token, p.top,
                least_ref[...] / p.total[:γ])

    @pl.when(mode >= PLAIN)
    def _():
        blocks.each(step - (count - 1), vocabulary_size, compare)
