"""Inside the verification kernel: new keys and values on their way into the cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels.attention_blocks import LANES, AttentionBlocks
from tpuspec.kernels.block_stream import ROWS, Ref, Scalar, Step


@dataclasses.dataclass(frozen=True)
class WindowWrite:
    """Writes G rows at a slot's start, without the rest of the cache being touched.

    Rows move to HBM in aligned tiles of 16, so the one or two tiles that the window
    touches are put together from the block that was read and the new rows. They leave
    while the slot is attended to, and are waited for before the next slot's do.

    Attributes:
      step: of the grid.
      window: G.
      blocks: sizes.
      start_B: SMEM, where each slot's window starts.
      new_refs: keys and values [1, G padded, tiles * 128].
      buffers: blocks that were read, [2, tiles, positions, 128] of each.
      caches: the whole caches in HBM, [B, P, T, 128].
      rows_ref: [2, tiles, 32, 128] float32, new rows at their place in the two row tiles.
      tiles_ref: [2, tiles, 32, 128], row tiles on their way out.
      semaphore: DMA.
    """

    step: Step
    window: int
    blocks: AttentionBlocks
    start_B: Ref
    new_refs: tuple[Ref, Ref]
    buffers: tuple[Ref, Ref]
    caches: tuple[Ref, Ref]
    rows_ref: Ref
    tiles_ref: Ref
    semaphore: Ref

    @staticmethod
    def scratch(blocks: AttentionBlocks, dtype: jnp.dtype) -> list[Any]:
        """Shapes of the last three attributes."""
        shape = (2, blocks.tiles, 2 * ROWS, LANES)
        return [
            pltpu.VMEM(shape, jnp.float32),
            pltpu.VMEM(shape, dtype),
            pltpu.SemaphoreType.DMA,
        ]

    def start(self, slot: Scalar) -> jax.Array:
        """First position of a slot's window, moved back if it would overhang the end."""
        return jnp.clip(self.start_B[slot], 0, self.caches[0].shape[2] - self.window)

    def end(self, slot: Scalar) -> jax.Array:
        return self.start(slot) + self.window

    def _first_row(self, slot: Scalar) -> jax.Array:
        """Position at which the first of the row tiles starts."""
        return self.start(slot) & -ROWS

    def take(self) -> None:
        """Takes in the slot's new rows."""
        slot = self.step.slot
        at = pl.ds(self.start(slot) - self._first_row(slot), self.new_refs[0].shape[1])
        for kind, new_ref in enumerate(self.new_refs):
            for tile in range(self.blocks.tiles):
                new_GL = new_ref[0, :, tile * LANES : (tile + 1) * LANES]
                self.rows_ref[kind, tile, at, :] = new_GL.astype(jnp.float32)

    def _copy(self, kind: int, slot: Scalar, group: Scalar, i: Scalar) -> Any:
        row = pl.multiple_of(self._first_row(slot) + i * ROWS, ROWS)
        tiles = self.step.tiles(self.blocks, group)
        return pltpu.make_async_copy(
            self.tiles_ref.at[kind, :, pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS), :],
            self.caches[kind].at[slot, tiles, pl.ds(row, ROWS), :],
            self.semaphore,
        )

    def blend(self, kind: int, block: Scalar, buffer: Scalar) -> None:
        """Puts the new rows that belong to a block into its buffer, and sends them out.

        Args:
          kind: 0 for keys, to be done first; 1 for values.
        """
        group, slot = self.step.group, self.step.slot
        start, end, first_row = self.start(slot), self.end(slot), self._first_row(slot)
        block_start = block * self.blocks.positions
        block_end = block_start + self.blocks.positions

        def blend_tile(i: jax.Array, carry: None) -> None:
            row = first_row + i * ROWS

            @pl.when((row < end) & (row >= block_start) & (row < block_end))
            def _() -> None:
                if kind == 0:

                    @pl.when((i == 0) & ~self.step.is_first)
                    def _() -> None:
                        wraps = slot == 0
                        self._wait(
                            jnp.where(wraps, self.step.slots - 1, slot - 1),
                            jnp.where(wraps, group - 1, group),
                        )

                position = row + lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 0)
                is_new = (position >= start) & (position < end)
                at = pl.ds(pl.multiple_of(row - block_start, ROWS), ROWS)
                here = pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)
                for tile in range(self.blocks.tiles):
                    old = self.buffers[kind][buffer, tile, at, :].astype(jnp.float32)
                    both = jnp.where(is_new, self.rows_ref[kind, tile, here, :], old)
                    both = both.astype(self.tiles_ref.dtype)
                    self.tiles_ref[kind, tile, here, :] = both
                    self.buffers[kind][buffer, tile, at, :] = both
                self._copy(kind, slot, group, i).start()

        @pl.when(first_row < block_end)
        def _() -> None:
            lax.fori_loop(0, 2, blend_tile, None)

    def _wait(self, slot: Scalar, group: Scalar) -> None:
        """Waits until all that a grid step sent out has arrived."""
        for i in range(2):

            @pl.when(self._first_row(slot) + i * ROWS < self.end(slot))
            def _(i: int = i) -> None:
                for kind in range(2):
                    self._copy(kind, slot, group, i).wait()

    def finish(self) -> None:
        """Waits for the last of the core's writes."""

        @pl.when(self.step.is_last)
        def _() -> None:
            self._wait(self.step.slot, self.step.group)
