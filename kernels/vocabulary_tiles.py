"""Parts of the sampling kernels: logits of a few rows, in tiles of 128 ids.

Rows lie in sublanes. A figure of a row is an array [R, 128] with the same value in
all lanes: it meets a tile as it is.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LANES = 128
SUBLANES = 8  # of a float32 tile
# Tiles per turn of a loop over them: a turn should cost much more than the jump back,
# and code should not grow with the vocabulary.
TILES_PER_TURN = 64
# Sums and maxima run in this many chains: one alone would wait for each of its steps.
_CHAINS = 4

type Rows = jax.Array  # [R, 128], the same in all lanes
type Tile = jax.Array  # [R, 128]


class TileIndex(NamedTuple):
    """A tile by its turn's first one, which may be traced, and its place in the turn.

    Addresses within a turn are constants; computed one by one, they would be what a
    pass over the vocabulary waits for.
    """

    first: Any
    place: int
    places: int  # tiles of the turn

    def after(self, first: Any) -> "TileIndex":
        """The tile counted from another beginning."""
        return self._replace(first=first + self.first)

    @property
    def number(self) -> Any:
        return self.first + self.place

    def window(self, ref: Any, axis: int, size: int, length: int) -> tuple[Any, Any]:
        """``ref`` cut down to the turn, and this tile's slice of it, along an axis.

        Args:
          size: elements from one tile to the next.
          length: elements of the tile.
        """
        cut, start = [slice(None)] * 2, self.place * size
        if not isinstance(self.first, int):
            first = pl.multiple_of(self.first * size, size)
            cut[axis] = pl.ds(first, self.places * size)
            ref = ref.at[tuple(cut)]
        else:
            start += self.first * size
        cut[axis] = pl.ds(start, length)
        return ref, tuple(cut)


def sweep(tiles: int, body: Callable[[TileIndex, Any], Any], carry: Any) -> Any:
    """``carry = body(tile, carry)`` over the tiles; the last has a static index."""
    turns = max(tiles - 1, 0) // TILES_PER_TURN

    def turn(first, places, carry):
        for place in range(places):
            carry = body(TileIndex(first, place, places), carry)
        return carry

    if turns:
        carry = lax.fori_loop(
            0, turns, lambda i, carry: turn(i * TILES_PER_TURN, TILES_PER_TURN, carry), carry)
    return turn(turns * TILES_PER_TURN, tiles - turns * TILES_PER_TURN, carry)


def chains(tiles: int, step: Callable[[TileIndex, Any], Any], start: Any) -> tuple[Any, ...]:
    """Several carries that take the tiles in turns: ``step(tile, carry)``, each from
    ``start``."""

    def body(tile, carries):
        oldest, *others = carries
        return (*others, step(tile, oldest))

    return sweep(tiles, body, (start,) * _CHAINS)


def add_tiles(tiles: int, value: Callable[[TileIndex], Tile], shape: tuple[int, int]) -> Rows:
    """Row sums of ``value(tile)`` over the tiles, in a fixed order."""
    sums = chains(tiles, lambda tile, sum_: sum_ + value(tile), jnp.zeros(shape, jnp.float32))
    return row_sum(functools.reduce(jnp.add, sums))


def max_tiles(tiles: int, value: Callable[[TileIndex], Tile], shape: tuple[int, int]) -> Rows:
    """Row maxima of ``value(tile)`` over the tiles; NaN if there is one."""
    best = chains(tiles, lambda tile, best: jnp.maximum(best, value(tile)),
                  jnp.full(shape, -jnp.inf, jnp.float32))
    return row_max_or_nan(functools.reduce(jnp.maximum, best))


def row_sum(tile: Tile) -> Rows:
    return jnp.broadcast_to(jnp.sum(tile, axis=1, keepdims=True), tile.shape)


def row_max(tile: Tile) -> Rows:
    return jnp.broadcast_to(jnp.max(tile, axis=1, keepdims=True), tile.shape)


def row_max_or_nan(tile: Tile) -> Rows:
    """Row maxima; NaN if there is one, which a reduction may lose (XLA's on a CPU does)."""
    is_nan = row_max(jnp.where(tile != tile, 1.0, 0.0)) > 0
    return jnp.where(is_nan, jnp.nan, row_max(tile))


def row_min(tile: Tile) -> Rows:
    return jnp.broadcast_to(jnp.min(tile, axis=1, keepdims=True), tile.shape)


def rows_above(rows: int) -> int:
    """Sublanes that ``rows`` take: whole tiles."""
    return -(-rows // SUBLANES) * SUBLANES


def tiles_of(vocabulary_size: int) -> int:
    return -(-vocabulary_size // LANES)


def logit_tiles(ref: Any, vocabulary_size: int) -> Callable[[TileIndex], Tile]:
    """Reads tiles of logits [R, V], with those of ids that do not exist at -inf.

    Those are in the last tile of a ``sweep``.
    """

    def tile_of(tile):
        window, at = tile.window(ref, 1, LANES, LANES)
        logits = window[at]
        if not isinstance(tile.first, int):
            return logits
        exist = vocabulary_size - tile.number * LANES
        if exist >= LANES:
            return logits
        return jnp.where(lax.broadcasted_iota(jnp.int32, logits.shape, 1) < exist, logits, -jnp.inf)

    return tile_of


def first_largest(logits: Callable[[TileIndex], Tile], tiles: int, shape: tuple[int, int],
                  ) -> tuple[Rows, Rows]:
    """The largest logit of each row and its id, the lowest among ties, as float32."""

    def step(tile, carry):
        best, at = carry
        x = logits(tile)
        return jnp.maximum(best, x), jnp.where(x > best, tile.number, at)

    carries = chains(tiles, step, (jnp.full(shape, -jnp.inf, jnp.float32),
                                   jnp.zeros(shape, jnp.int32)))
    top = row_max_or_nan(functools.reduce(jnp.maximum, [best for best, _ in carries]))
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    # Lanes are reduced in float32, which ids up to 2**24 are exact in.
    ids = [jnp.where(best == top, (at * LANES + lane).astype(jnp.float32), tiles * LANES - 1.0)
           for best, at in carries]
    return top, row_min(functools.reduce(jnp.minimum, ids))


def join_largest(ref: Any, is_first: jax.Array, first_tile: Any, top: Rows, ids: Rows) -> None:
    """Keeps in ``ref`` [2 or more, R, 128] the largest so far, and its id.

    Args:
      is_first: whether there was none before.
      first_tile: from which the ids are counted; all are higher than those before.
      top, ids: as ``first_largest`` gives them.
    """
    ids = ids + jnp.asarray(first_tile * LANES).astype(jnp.float32)
    more = is_first | (top > ref[0])
    ref[1] = jnp.where(more, ids, ref[1])
    ref[0] = jnp.where(is_first, top, jnp.maximum(ref[0], top))


def pad_lanes(logits: jax.Array) -> jax.Array:
    """Whole tiles; a copy, but only for vocabularies that are not made of them."""
    missing = -logits.shape[-1] % LANES
    return jnp.pad(logits, ((0, 0),) * (logits.ndim - 1) + ((0, missing),)) if missing else logits
