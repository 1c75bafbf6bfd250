"""Inside the decoder kernel: weights and caches of one layer after the other, from HBM."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels.attention_blocks import LANES, POSITION_TILE
from tpuspec.kernels.block_stream import ROWS, Ref, Scalar
from tpuspec.kernels.implementation import precision_of

RING = 2  # buffers of a cache


class Turn(NamedTuple):
    """A slot of a layer; one follows the other through all layers."""

    layer: Scalar
    slot: Scalar
    slots: int

    @property
    def number(self) -> Scalar:
        return self.layer * self.slots + self.slot

    @property
    def buffer(self) -> Scalar:
        return self.number % RING if isinstance(self.number, int) else self.number & (RING - 1)

    def after(self, turns: int) -> "Turn":
        """The one so many turns later, or earlier: at most as many as there are slots, if
        there are several. No division: not every generation has one for scalars."""
        if self.slots == 1:
            return self._replace(layer=self.layer + turns)
        slot = self.slot + turns
        layer = self.layer + jnp.where(slot >= self.slots, 1, jnp.where(slot < 0, -1, 0))
        slot = jnp.where(slot >= self.slots, slot - self.slots, slot)
        return self._replace(layer=layer, slot=jnp.where(slot < 0, slot + self.slots, slot))


@dataclasses.dataclass(frozen=True)
class WeightStream:
    """One linear map of every layer, of which VMEM holds one.

    The next layer's is sent for as soon as this one's has been used, and has the rest of
    the layer to arrive: a second buffer would hide no more.

    Attributes:
      layer: that the kernel is in.
      source: [L, out, in] in HBM.
      buffer: [out, in].
      semaphore: DMA.
    """

    layer: Scalar
    source: Ref
    buffer: Ref
    semaphore: Ref

    def _copy(self, layer: Scalar) -> Any:
        return pltpu.make_async_copy(self.source.at[layer], self.buffer, self.semaphore)

    def start(self) -> None:
        """Sends for the first layer's."""
        self._copy(0).start()

    def product(self, x_RI: jax.Array) -> jax.Array:
        """x Wᵀ, [R, out] float32."""
        self._copy(self.layer).wait()
        weight = self.buffer[...]
        y_RO = lax.dot_general(
            x_RI, weight, (((1,), (1,)), ((), ())),
            precision=precision_of(weight.dtype), preferred_element_type=jnp.float32,
        )  # fmt: skip

        @pl.when(self.layer + 1 < self.source.shape[0])
        def _() -> None:
            self._copy(self.layer + 1).start()

        return y_RO


@dataclasses.dataclass(frozen=True)
class CacheStream:
    """Keys and values of every layer's slots, of which VMEM holds two slots'.

    Attributes:
      end: number of positions to read of a slot, at least 1.
      sources: keys and values in HBM, [L, B, P, T, 128].
      buffers: [2, P, T or more, 128] of each.
      semaphores: DMA [2].
    """

    end: Callable[[Scalar], jax.Array]
    sources: tuple[Ref, Ref]
    buffers: tuple[Ref, Ref]
    semaphores: Ref

    @staticmethod
    def scratch(tiles: int, positions: int, dtype: jnp.dtype) -> list[Any]:
        """Shapes of the last two attributes, with room for ``positions``."""
        buffer = pltpu.VMEM((RING, tiles, positions, LANES), dtype)
        return [(buffer, buffer), pltpu.SemaphoreType.DMA((RING,))]

    def _copy(self, turn: Turn, act: Callable[[Any], None]) -> None:
        """Starts, or waits for, the copies of a turn: of the parts that are to be read."""
        end = self.end(turn.slot)
        for first in range(0, self.sources[0].shape[3], POSITION_TILE):
            part = pl.ds(first, POSITION_TILE)

            @pl.when(first < end)
            def _(part: Any = part) -> None:
                for source, into in zip(self.sources, self.buffers, strict=True):
                    act(
                        pltpu.make_async_copy(
                            source.at[turn.layer, turn.slot, :, part, :],
                            into.at[turn.buffer, :, part, :],
                            self.semaphores.at[turn.buffer],
                        )
                    )

    def start(self, turn: Turn) -> None:
        """Sends for a turn, whose buffer must have been used; nothing after the last."""

        @pl.when(turn.layer < self.sources[0].shape[0])
        def _() -> None:
            self._copy(turn, lambda copy: copy.start())

    def wait(self, turn: Turn) -> tuple[Ref, Ref]:
        """Keys and values [P, T or more, 128] of a turn, once they are there."""
        self._copy(turn, lambda copy: copy.wait())
        keys, values = (buffer.at[turn.buffer] for buffer in self.buffers)
        return keys, values


@dataclasses.dataclass(frozen=True)
class RowWrite:
    """Puts the new rows of a turn into its keys and values, and into the cache in HBM.

    Rows move to HBM in aligned tiles: one or two of them, put together from what was read
    and the new rows. They leave during the rest of the turn, and are waited for in the
    next.

    Attributes:
      window: G, at most 8.
      start: position of a slot's first new row.
      caches: keys and values in HBM, [L, B, P, T, 128].
      rows_ref: [2, P, 32, 128] float32, new rows at their place in the two row tiles.
      tiles_ref: [2, P, 32, 128], row tiles on their way out.
      semaphore: DMA.
    """

    window: int
    start: Callable[[Scalar], jax.Array]
    caches: tuple[Ref, Ref]
    rows_ref: Ref
    tiles_ref: Ref
    semaphore: Ref

    @staticmethod
    def scratch(shape: tuple[int, ...], dtype: jnp.dtype) -> list[Any]:
        """Shapes of the last three attributes, for caches [L, B, P, T, 128]."""
        tiles = (2, shape[2], 2 * ROWS, LANES)
        return [pltpu.VMEM(tiles, jnp.float32), pltpu.VMEM(tiles, dtype), pltpu.SemaphoreType.DMA]

    def _for_tiles(self, turn: Turn, act: Callable[[int, Any], None]) -> None:
        """Calls ``act(i, first position)`` for the row tiles that a turn's rows touch."""
        start = self.start(turn.slot)
        row = pl.multiple_of(start & -ROWS, ROWS)
        act(0, row)
        pl.when(row + ROWS < start + self.window)(lambda: act(1, row + ROWS))

    def _copy(self, turn: Turn, kind: int, i: int, row: Scalar) -> Any:
        return pltpu.make_async_copy(
            self.tiles_ref.at[kind, :, pl.ds(i * ROWS, ROWS), :],
            self.caches[kind].at[turn.layer, turn.slot, :, pl.ds(row, ROWS), :],
            self.semaphore,
        )

    def wait(self, turn: Turn) -> None:
        """Waits for all that a turn sent out."""

        def act(i: int, row: Scalar) -> None:
            for kind in range(2):
                self._copy(turn, kind, i, row).wait()

        self._for_tiles(turn, act)

    def put(self, turn: Turn, new_refs: tuple[Ref, Ref], into: tuple[Ref, Ref]) -> None:
        """Args: new_refs [8, E], into [P, T, 128], each of keys and of values."""

        @pl.when(turn.number > 0)
        def _() -> None:
            self.wait(turn.after(-1))

        start = self.start(turn.slot)
        at = pl.ds(start & (ROWS - 1), new_refs[0].shape[0])
        for kind, new_ref in enumerate(new_refs):
            for tile in range(self.rows_ref.shape[1]):
                new_GL = new_ref[:, tile * LANES : (tile + 1) * LANES]
                self.rows_ref[kind, tile, at, :] = new_GL.astype(jnp.float32)

        def act(i: int, row: Scalar) -> None:
            position = row + lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 0)
            is_new = (position >= start) & (position < start + self.window)
            here, there = pl.ds(i * ROWS, ROWS), pl.ds(pl.multiple_of(row, ROWS), ROWS)
            for kind, ref in enumerate(into):
                for tile in range(self.rows_ref.shape[1]):
                    old = ref[tile, there, :].astype(jnp.float32)  # v4 selects in 32 bits only
                    both = jnp.where(is_new, self.rows_ref[kind, tile, here, :], old)
                    self.tiles_ref[kind, tile, here, :] = both.astype(ref.dtype)
                    ref[tile, there, :] = both.astype(ref.dtype)
                self._copy(turn, kind, i, row).start()

        self._for_tiles(turn, act)
