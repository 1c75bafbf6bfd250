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
from tpuspec.kernels.block_stream import Ref, Scalar
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
