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
from tpuspec.kernels.sampling_blocks import (
    SamplingBlocks,
    VmemUse,
    check_logits,
    row_bytes,
    tpu_info,
)
from tpuspec.kernels.sampling_reference import WarpedRows, WarpOptions, draw, warp
from tpuspec.kernels.slot_sharding import by_slots
from tpuspec.kernels.vocabulary_tiles import (
    LANES,
    SUBLANES,
    first_largest,
    join_largest,
    logit_tiles,
    pad_lanes,
    sweep,
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
        blocks: SamplingBlocks | None = None, interpret: Any = False) -> SampledTokens:
    """Draws one token per slot from its warped logits (inverse CDF).

    The TPU kernel takes eight slots at once, reads their logits once and writes no
    probabilities to HBM.

    Args:
      uniform_B: in [0, 1).
      vocabulary_size: ids from here on do not exist.
      implementation: "xla" is plain jnp, "pallas" the TPU kernel; None is the kernel
        on TPU, for the shapes that it takes, and else plain jnp.
      blocks: how the kernel cuts the vocabulary, by default by TPU generation.
      interpret: runs the kernel on the CPU; as in ``pl.pallas_call``.

    Raises:
      NotImplementedError: "pallas" does not take these shapes: logits that are not
        float32, or eight rows that do not fit in VMEM; on v4, which has the least,
        420,000 ids do.
    """
    def xla() -> SampledTokens:
        probabilities, rows, sound = warp(logits_BV[:, None], options, vocabulary_size)
        rows = WarpedRows(*(x[:, 0] for x in rows))
        return SampledTokens(draw(probabilities[:, 0], uniform_B), rows, sound[:, 0])

    return dispatch(
        implementation, xla=xla,
        pallas=lambda: _pallas(logits_BV, options, uniform_B, vocabulary_size, blocks, interpret))


def sharded_sample_tokens(
        mesh: jax.sharding.Mesh, *, slots: str | tuple[str, ...], **options: Any) -> Any:
    """``sample_tokens`` with slots split over axes of a mesh; takes its array arguments.

    As in ``sharded_rejection_sample``, an axis that splits the vocabulary is one of them:
    of M devices along it, each receives (M - 1) / M² * B * V * 4 bytes.

    Args:
      mesh: the devices.
      slots: axes that split B. Missing slots are made up by greedy ones.
      options: keyword arguments of ``sample_tokens``.
    """
    return by_slots(functools.partial(sample_tokens, **options), mesh, slots)


def _pallas(logits_BV, options, uniform_B, vocabulary_size, blocks, interpret):
    check_logits(logits_BV, vocabulary_size)
    logits_BV = pad_lanes(logits_BV)
    rows = min(len(logits_BV), SUBLANES)
    weights = Weights.scratch_shape(rows, vocabulary_size)
    # Of a block there are two buffers: while one is taken in, the next is on its way.
    vmem = VmemUse(kept=(weights[0] // SUBLANES + 8) * row_bytes(rows),
                   per_tile=2 * row_bytes(rows))
    blocks = blocks or vmem.blocks(tpu_info(interpret), vocabulary_size)

    flags, options = row_options(options, uniform_B, rows)
    figures = pl.pallas_call(
        functools.partial(_kernel, rows=rows, vocabulary_size=vocabulary_size, blocks=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(options) // rows, blocks.count(vocabulary_size)),
            in_specs=[pl.BlockSpec((rows, options.shape[1]), lambda i, *_: (i, 0)),
                      pl.BlockSpec((rows, blocks.tiles * LANES), lambda i, block, _: (i, block))],
            out_specs=pl.BlockSpec((rows, LANES), lambda i, *_: (i, 0)),
            scratch_shapes=[pltpu.VMEM(weights, jnp.float32),
                            pltpu.VMEM((rows, LANES), jnp.float32),
                            pltpu.VMEM((2, rows, LANES), jnp.float32)]),
        out_shape=jax.ShapeDtypeStruct((len(options), LANES), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True,
            vmem_limit_bytes=vmem.limit(blocks)),
        interpret=interpret,
        name="sample_tokens",
    )(flags, options, logits_BV)
    token_B, top_B, threshold_B, total_B = figures[:len(logits_BV), :4].T
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
    logits_ref,  # [R, a block of V]
    # Outputs.
    figures_ref,  # [R, 128]: token, top, threshold, total
    # Scratch.
    e_ref,  # see Weights
    top_ref,  # [R, 128] largest logits so far
    largest_ref,  # [2, R, 128] the same for greedy rows, and their ids
    # Parameters.
    *,
    rows,
    vocabulary_size,
    blocks,
):
    any_greedy, any_sampled, truncated, cut = (
        flags_ref[pl.program_id(0) * 4 + i] > 0 for i in range(4))
    shape = (rows, LANES)
    greedy, *options, uniform = (
        jnp.broadcast_to(options_ref[:, i:i + 1], shape) for i in range(6))
    weights = Weights(e_ref, rows, vocabulary_size)
    block = pl.program_id(1)
    is_last = block == blocks.count(vocabulary_size) - 1
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)

    def put(these, *values):
        """Writes the figures of these rows."""
        figures = jnp.zeros(shape, jnp.float32)
        for i, value in enumerate(values):
            figures = jnp.where(lane == i, value, figures)
        figures_ref[...] = jnp.where(these, figures, figures_ref[...])

    def logits_of(first, tiles):
        return logit_tiles(logits_ref, blocks.ids(first, tiles, vocabulary_size))

    def find_largest(first, tiles):
        top, ids = first_largest(logits_of(first, tiles), tiles, shape)
        join_largest(largest_ref, block == 0, first, top, ids)

    def take_in(first, tiles):
        top = weights.take_in(logits_of(first, tiles), first, tiles)
        top_ref[...] = jnp.where(block == 0, top, jnp.maximum(top_ref[...], top))

    @pl.when(any_greedy)
    def _():
        blocks.each(block, vocabulary_size, find_largest)

    @pl.when(any_sampled)
    def _():
        blocks.each(block, vocabulary_size, take_in)

    @pl.when(any_greedy & is_last)
    def _():
        put(greedy > 0, largest_ref[1], largest_ref[0], 1.0, 1.0)

    @pl.when(any_sampled & is_last)
    def _():
        warped = warp_rows(weights, top_ref[...], RowOptions(*options), truncated, cut)
        put(greedy == 0, _draw(weights, warped.threshold, uniform), *warped)


def _draw(weights: Weights, threshold: jax.Array, uniform: jax.Array) -> jax.Array:
    """The id drawn in each row, as float32 rows: first its tile, then its lane."""
    shape = (weights.rows, -(-weights.tiles // LANES) * LANES)
    tile_ids = lax.broadcasted_iota(jnp.int32, shape, 1)

    def live(e):
        return jnp.where(e >= threshold, e, 0.0)

    def put_sum(tile, sums):
        here = tile_ids == tile.number
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
