"""One token per row from its logits: a draft's, or that of plain decoding."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from tpuspec.kernels.bisection import first_above
from tpuspec.kernels.implementation import Implementation, dispatch
from tpuspec.kernels.row_weights import RowOptions, Weights, warp_rows
from tpuspec.kernels.sampling_reference import WarpedRows, WarpOptions, draw, warp
from tpuspec.kernels.vocabulary_tiles import (
    LANES,
    SUBLANES,
    check_logits,
    check_vmem,
    first_largest,
    logit_tiles,
    pad_lanes,
    sweep,
    tiles_of,
)


class SampledTokens(NamedTuple):
    """One token of each slot.

    Attributes:
      token_B: drawn; the argmax in greedy slots.
      rows_B: what ``rejection_sample`` needs to know of the distribution.
      sound_B: no NaN, and no infinite largest logit. Without it, the other figures
        mean nothing.
    """

    token_B: Int[Array, " B"]
    rows_B: WarpedRows
    sound_B: Bool[Array, " B"]


def sample_tokens(
        logits_BV: Float[Array, "B V"], options: WarpOptions, uniform_B: Float[Array, " B"], *,
        vocabulary_size: int, implementation: Implementation | None = None,
        interpret: Any = False) -> SampledTokens:
    """Draws one token per slot from its warped logits (inverse CDF).

    The TPU kernel takes eight slots at once, reads their logits once and writes no
    probabilities to HBM.

    Args:
      uniform_B: in [0, 1).
      vocabulary_size: ids from here on do not exist.
      implementation: "xla" is plain jnp, "pallas" the TPU kernel; None is the kernel
        on TPU, for the shapes that it takes, and else plain jnp.
      interpret: runs the kernel on the CPU; as in ``pl.pallas_call``.

    Raises:
      NotImplementedError: "pallas" does not take these shapes: logits that are not
        float32, or rows that do not fit in VMEM.
    """
    def xla() -> SampledTokens:
        probabilities, rows, sound = warp(logits_BV[:, None], options, vocabulary_size)
        rows = WarpedRows(*(x[:, 0] for x in rows))
        return SampledTokens(draw(probabilities[:, 0], uniform_B), rows, sound[:, 0])

    return dispatch(
        implementation, xla=xla,
        pallas=lambda: _pallas(logits_BV, options, uniform_B, vocabulary_size, interpret))


def _pallas(logits_BV, options, uniform_B, vocabulary_size, interpret):
    check_logits(logits_BV, vocabulary_size)
    logits_BV = pad_lanes(logits_BV)
    B, V = logits_BV.shape
    rows = min(B, SUBLANES)
    weights = Weights.scratch_shape(rows, vocabulary_size)
    check_vmem([(rows, V)], [weights], interpret)

    flags, options = row_options(options, uniform_B, rows)
    blocks = -(-B // rows)
    figures = pl.pallas_call(
        functools.partial(_kernel, rows=rows, vocabulary_size=vocabulary_size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(blocks,),
            in_specs=[pl.BlockSpec((rows, options.shape[1]), lambda i, _: (i, 0)),
                      pl.BlockSpec((rows, V), lambda i, _: (i, 0))],
            out_specs=pl.BlockSpec((rows, LANES), lambda i, _: (i, 0)),
            scratch_shapes=[pltpu.VMEM(weights, jnp.float32)]),
        out_shape=jax.ShapeDtypeStruct((blocks * rows, LANES), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True),
        interpret=interpret,
        name="sample_tokens",
    )(flags, options, logits_BV)
    token_B, top_B, threshold_B, total_B = figures[:B, :4].T
    return SampledTokens(token_B.astype(jnp.int32), WarpedRows(top_B, threshold_B, total_B),
                         jnp.isfinite(top_B))


def row_options(options: WarpOptions, uniform_B: jax.Array, rows: int,
                ) -> tuple[jax.Array, jax.Array]:
    """What the kernel prefetches for each block of rows, and [rows of all blocks, 6]."""
    # Rows that fill up the last block, and greedy ones, have nothing to truncate.
    greedy_B = options.temperature_B == 0
    columns = [(greedy_B, 1), (jnp.where(greedy_B, 1.0, options.temperature_B), 1),
               (jnp.where(greedy_B, 0, options.top_k_B), 0),
               (jnp.where(greedy_B, 1.0, options.top_p_B), 1),
               (jnp.where(greedy_B, 0.0, options.min_p_B), 0), (uniform_B, 0)]
    fill = (0, -len(greedy_B) % rows)
    table = jnp.stack([jnp.pad(x.astype(jnp.float32), fill, constant_values=value)
                       for x, value in columns], axis=1)
    greedy, _, top_k, top_p, min_p, _ = table.T
    truncated = (top_k > 0) | (top_p < 1)
    flags = jnp.stack([greedy > 0, greedy == 0, truncated, truncated | (min_p > 0)], axis=1)
    return jnp.any(flags.reshape(-1, rows, 4), axis=1).astype(jnp.int32).reshape(-1), table


def _kernel(
    # Prefetched scalars.
    flags_ref,  # by block: any row greedy, any not, any truncated, any cut
    # Inputs.
    options_ref,  # [R, 6]: greedy, temperature, top_k, top_p, min_p, uniform
    logits_ref,  # [R, V]
    # Outputs.
    figures_ref,  # [R, 128]: token, top, threshold, total
    # Scratch.
    e_ref,  # see Weights
    # Parameters.
    *,
    rows,
    vocabulary_size,
):
    any_greedy, any_sampled, truncated, cut = (
        flags_ref[pl.program_id(0) * 4 + i] > 0 for i in range(4))
    shape = (rows, LANES)
    greedy, *options, uniform = (
        jnp.broadcast_to(options_ref[:, i:i + 1], shape) for i in range(6))
    logits = logit_tiles(logits_ref, vocabulary_size)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)

    def put(these, *values):
        """Writes the figures of these rows."""
        figures = jnp.zeros(shape, jnp.float32)
        for i, value in enumerate(values):
            figures = jnp.where(lane == i, value, figures)
        figures_ref[...] = jnp.where(these, figures, figures_ref[...])

    @pl.when(any_greedy)
    def _():
        top, ids = first_largest(logits, tiles_of(vocabulary_size), shape)
        put(greedy > 0, ids, top, 1.0, 1.0)

    @pl.when(any_sampled)
    def _():
        weights = Weights(e_ref, rows, vocabulary_size)
        warped = warp_rows(weights, logits, RowOptions(*options), truncated, cut)
        put(greedy == 0, _draw(weights, warped.threshold, uniform), *warped)


def _draw(weights: Weights, threshold: jax.Array, uniform: jax.Array) -> jax.Array:
    """The id drawn in each row, as float32 rows: first its tile, then its lane."""
    shape = (weights.rows, -(-weights.tiles // LANES) * LANES)
    tile_ids = lax.broadcasted_iota(jnp.int32, shape, 1)

    def live(e):
        return jnp.where(e >= threshold, e, 0.0)

    def put_sum(tile, sums):
        here = tile_ids == tile.first + tile.place
        return jnp.where(here, jnp.sum(live(weights[tile]), axis=1, keepdims=True), sums)

    def whole(tile):
        return jnp.broadcast_to(jnp.sum(tile, axis=1, keepdims=True), tile.shape)

    sums = sweep(weights.tiles, put_sum, jnp.zeros(shape, jnp.float32))
    goal = uniform[:, :1] * whole(sums)
    tile = first_above(sums, tile_ids, goal, weights.tiles, whole)
    before = whole(jnp.where(tile_ids < tile, sums, 0.0))

    row = lax.broadcasted_iota(jnp.int32, weights.shape, 0)
    lane = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    chosen = jnp.zeros(weights.shape, jnp.float32)
    for i in range(weights.rows):
        chosen = jnp.where(row == i, live(weights.at(tile[i, 0])), chosen)
    at = first_above(chosen, lane, (goal - before)[:, :LANES], LANES, whole)
    return (tile[:, :LANES] * LANES + at).astype(jnp.float32)
