"""Inside the decoder kernel: new keys and values on their way into the caches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels.attention_blocks import LANES
from tpuspec.kernels.block_stream import ROWS, Ref, Scalar
from tpuspec.kernels.layer_stream import Turn


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
