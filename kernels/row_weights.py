"""Parts of the sampling kernels: what a few rows' logits become before they are sampled."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tpuspec.kernels.bisection import bits_of, float_of, largest
from tpuspec.kernels.sampling_reference import ONE_BITS, WarpedRows
from tpuspec.kernels.vocabulary_tiles import (
    LANES,
    SUBLANES,
    Rows,
    Tile,
    TileIndex,
    add_tiles,
    max_tiles,
    row_max,
    row_sum,
    rows_above,
    sweep,
    tiles_of,
)

# Largest e kept of each lane and part of the vocabulary. Top-k and top-p mostly have
# their threshold among these, which are a few tiles instead of all.
_KEPT_PER_LANE = 4
_PARTS = 2


class RowOptions(NamedTuple):
    """``WarpOptions`` of each row, all float32."""

    temperature: Rows
    top_k: Rows
    top_p: Rows
    min_p: Rows


class Weights:
    """Of all rows in VMEM scratch: first logits, then e = exp((logit - top) / temperature).

    Row r of tile i is sublane ``i * stride + r``, so that eight tiles of one row
    can be read as one register.
    """

    def __init__(self, ref: Any, rows: int, vocabulary_size: int):
        self.ref, self.rows, self.stride = ref, rows, rows_above(rows)
        self.tiles, self.shape = tiles_of(vocabulary_size), (rows, LANES)

    @staticmethod
    def scratch_shape(rows: int, vocabulary_size: int) -> tuple[int, int]:
        """Tiles of no ids fill up the last register of a row."""
        return rows_above(tiles_of(vocabulary_size)) * rows_above(rows), LANES

    def __getitem__(self, tile: TileIndex) -> Tile:
        window, at = tile.window(self.ref, 0, self.stride, self.rows)
        return window[at]

    def __setitem__(self, tile: TileIndex, value: Tile) -> None:
        window, at = tile.window(self.ref, 0, self.stride, self.rows)
        window[at] = value

    def at(self, tile: jax.Array) -> Tile:
        """The tile of a traced number."""
        start = pl.multiple_of(tile * self.stride, SUBLANES)
        return self.ref[pl.ds(start, self.rows), :]

    def eight_tiles(self, row: jax.Array, register: TileIndex) -> Tile:
        """[8, 128] of one row: tiles 8 i to 8 i + 7 for register i."""
        window, (at, _) = register.window(self.ref, 0, SUBLANES * self.stride, SUBLANES)
        return window[pl.ds(at.start + row, SUBLANES, stride=self.stride), :]

    def probabilities(self, ids: list[jax.Array], rows: WarpedRows) -> Rows:
        """Row i's probability of ``ids[i]``; of any other row, 0."""
        tiles = [self.at(jnp.minimum(lax.div(at, LANES), self.tiles - 1)) for at in ids]
        return probability(pick(tiles, ids, self.shape), rows)

    def take_in(self, logits: Callable[[TileIndex], Tile], first: Any, tiles: int) -> Rows:
        """Stores ``tiles`` tiles of logits from tile ``first`` on; returns their row maxima,
        NaN if there is one."""

        def store(tile):
            self[tile.after(first)] = stored = logits(tile)
            return stored

        return max_tiles(tiles, store, self.shape)

    def total(self, value: Callable[[Tile], Tile]) -> Rows:
        """Row sums of ``value(e)``."""
        return add_tiles(self.tiles, lambda tile: value(self[tile]), self.shape)

    def fill(self, e: Callable[[TileIndex], Tile],
             value: Callable[[TileIndex, Tile], Tile]) -> Rows:
        """Stores ``e(tile)`` of all tiles and returns row sums of ``value(tile, e)``."""

        def store(tile):
            self[tile] = stored = e(tile)
            return value(tile, stored)

        total = add_tiles(self.tiles, store, self.shape)
        for place in range(self.tiles, rows_above(self.tiles)):
            self[TileIndex(0, place, place + 1)] = jnp.zeros(self.shape, jnp.float32)
        return total

    def threshold(self, options: RowOptions) -> Rows:
        """The least e that top-k and then top-p keep."""

        def keep(tile, parts):
            (oldest, *others), e, part = parts, self[tile], []
            for kept in oldest:
                part.append(jnp.maximum(kept, e))
                e = jnp.minimum(kept, e)
            return (*others, tuple(part))

        nothing = (jnp.zeros(self.shape, jnp.float32),) * _KEPT_PER_LANE
        parts = sweep(self.tiles, keep, (nothing,) * _PARTS)
        kept = [e for part in parts for e in part]
        # Whatever is larger than this has been kept.
        bound = bits_of(row_max(functools.reduce(jnp.maximum, [part[-1] for part in parts])))

        def kept_total(value):
            return row_sum(functools.reduce(jnp.add, [value(e) for e in kept]))

        def find(value, goal, step, on, floor):
            low = jnp.maximum(bound, floor)
            among_kept = functools.partial(_measure, kept_total, value)
            out = ~on | (among_kept(float_of(low + 1)) < goal)
            found = largest(among_kept, goal, step, low, jnp.where(out, low, ONE_BITS) + 1)
            out = on & (found <= bound)
            rest = largest(functools.partial(_measure, self.total, value), goal, step, floor,
                           jnp.where(out, bound, floor) + 1)
            return jnp.where(on, jnp.where(out, rest, found), floor)

        k_on = (options.top_k > 0) & (options.top_k < self.tiles * LANES)
        zero = jnp.zeros(self.shape, jnp.int32)
        top_k = find(jnp.ones_like, options.top_k, jnp.ones_like, k_on, zero)
        mass = self.total(lambda e: jnp.where(e >= float_of(top_k), e, 0.0))
        # All ids with less than this hold at most half of what top-p may leave out.
        least = (1 - options.top_p) * mass * (0.5 / (self.tiles * LANES))
        floor = jnp.maximum(top_k, bits_of(least))
        nucleus = find(lambda e: e, options.top_p * mass, lambda t: t, options.top_p < 1, floor)
        return float_of(jnp.where(options.top_p < 1, nucleus, top_k))


def pick(tiles: list[Tile], ids: list[jax.Array], shape: tuple[int, int]) -> Rows:
    """In row i what is at ``ids[i]`` in row i of ``tiles[i]``; 0 in any other row."""
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    found = jnp.zeros(shape, jnp.float32)
    for i, (tile, at) in enumerate(zip(tiles, ids, strict=True)):
        found = jnp.where((row == i) & (lane == lax.rem(at, LANES)), tile, found)
    return row_sum(found)


def of_row(rows: Rows, i: jax.Array) -> jax.Array:
    """[1, 128] one row, whatever the others hold."""
    row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.sum(jnp.where(row == i, rows, 0.0), axis=0, keepdims=True)


def probability(e: Rows, rows: WarpedRows) -> Rows:
    return jnp.where(e >= rows.threshold, e, 0.0) / rows.total


def _measure(total: Callable[[Callable[[Tile], Tile]], Rows], value: Callable[[Tile], Tile],
             threshold: Rows) -> Rows:
    """The sum of ``value(e)`` over e >= threshold."""
    return total(lambda e: jnp.where(e >= threshold, value(e), 0.0))


def warp_rows(weights: Weights, top: Rows, options: RowOptions, truncated: jax.Array,
              cut: jax.Array) -> WarpedRows:
    """Turns logits into weights, in place, and finds the rows' figures; no row is greedy.

    Args:
      top: the largest logit of each row; NaN if one is.
      truncated: whether top-k or top-p is on for any row, a scalar.
      cut: whether any option is.
    """
    total = weights.fill(lambda tile: jnp.exp((weights[tile] - top) / options.temperature),
                         lambda _, e: e)
    threshold = lax.cond(truncated, lambda: weights.threshold(options),
                         lambda: jnp.zeros_like(top))
    threshold = jnp.maximum(threshold, options.min_p)
    # Comparisons drop what is not a number.
    top = jnp.where(jnp.isnan(total), total, top)
    total = lax.cond(cut, lambda: weights.total(lambda e: jnp.where(e >= threshold, e, 0.0)),
                     lambda: total)
    return WarpedRows(top, threshold, total)
