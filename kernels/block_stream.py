"""Inside the attention kernels: blocks of a cache on their way from HBM."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels.attention_blocks import LANES, POSITION_TILE, AttentionBlocks

ROWS = 16  # of a tile in bfloat16: the unit in which cached positions are written
type Ref = Any
type Scalar = jax.Array | int


# The cores of a chip share the first axis of the grid (cores, groups, slots).
COMPILER_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary", "arbitrary"), disable_bounds_checks=True
)


def padded_window(window: int) -> int:
    """Rows that the kernels take for G positions: XLA would copy other numbers around."""
    return 8 if window <= 8 else ROWS


def rows_spec(blocks: AttentionBlocks, groups: int, rows_G: int) -> pl.BlockSpec:
    """[1, G padded, tiles * 128] of a step of the grid, out of [B, G padded, E]."""
    return pl.BlockSpec(
        (1, rows_G, blocks.tiles * LANES),
        lambda core, group, slot, _: (slot, 0, core * groups + group),
    )


@dataclasses.dataclass(frozen=True)
class Step:
    """Where a core is in the grid (cores, groups of lane tiles, slots).

    To be made at the top of a kernel: not everywhere inside can its numbers be asked for.
    """

    core: Scalar
    group: Scalar
    slot: Scalar
    groups: Scalar
    slots: Scalar

    @classmethod
    def here(cls) -> "Step":
        return cls(*map(pl.program_id, range(3)), *map(pl.num_programs, (1, 2)))

    @property
    def is_first(self) -> Any:
        return (self.group == 0) & (self.slot == 0)

    @property
    def is_last(self) -> Any:
        return (self.group + 1 == self.groups) & (self.slot + 1 == self.slots)

    def tiles(self, blocks: AttentionBlocks, group: Scalar) -> Any:
        """The lane tiles of one of this core's groups."""
        return pl.ds((self.core * self.groups + group) * blocks.tiles, blocks.tiles)


@dataclasses.dataclass(frozen=True)
class BlockStream:
    """Cached keys and values, block by block, for a grid (cores, groups, slots).

    While a block is used, the next one is on its way, be it of the same slot or of the
    next grid step.

    Attributes:
      step: of the grid.
      blocks: sizes.
      end: number of positions to read of a slot, at least 1.
      sources: keys and values in HBM, [B, P, T, 128].
      buffers: [2, tiles, positions, 128] of each.
      semaphores: DMA [2 buffers, keys and values].
      turn_ref: SMEM [1], the buffer that the next block comes to.
    """

    step: Step
    blocks: AttentionBlocks
    end: Callable[[Scalar], jax.Array]
    sources: tuple[Ref, Ref]
    buffers: tuple[Ref, Ref]
    semaphores: Ref
    turn_ref: Ref

    @staticmethod
    def scratch(blocks: AttentionBlocks, dtype: jnp.dtype) -> list[Any]:
        """Shapes of the two buffers, the semaphores and the turn."""
        buffer = pltpu.VMEM((2, blocks.tiles, blocks.positions, LANES), dtype)
        return [buffer, buffer, pltpu.SemaphoreType.DMA((2, 2)), pltpu.SMEM((1,), jnp.int32)]

    def _copy(
        self,
        kind: int,
        act: Callable[[Any], None],
        group: Scalar,
        slot: Scalar,
        block: Scalar,
        buffer: Scalar,
    ) -> None:
        """Starts, or waits for, the copy of a block: of its parts that are to be read."""
        tiles = self.step.tiles(self.blocks, group)
        for part in range(0, self.blocks.positions, POSITION_TILE):
            first = block * self.blocks.positions + part

            def act_on_part(part: int = part, first: Scalar = first) -> None:
                source = self.sources[kind].at[slot, tiles, pl.ds(first, POSITION_TILE), :]
                into = self.buffers[kind].at[buffer, :, pl.ds(part, POSITION_TILE), :]
                act(pltpu.make_async_copy(source, into, self.semaphores.at[buffer, kind]))

            if part:
                pl.when(first < self.end(slot))(act_on_part)
            else:
                act_on_part()

    def _send_for(self, *block: Scalar) -> None:
        for kind in (0, 1):
            self._copy(kind, lambda copy: copy.start(), *block)

    def start(self) -> None:
        """Sends for the core's first block; to be called before any other work."""

        @pl.when(self.step.is_first)
        def _() -> None:
            self.turn_ref[0] = 0
            self._send_for(0, 0, 0, 0)

    def use(
        self,
        start_slot: Callable[[], None],
        use_block: Callable[[Scalar, Scalar, Callable[[], None], Callable[[], None]], None],
    ) -> None:
        """Calls ``use_block`` for every block of the grid step's slot.

        What there is to do before the first, ``start_slot`` does while two blocks are on
        their way. It is a branch inside the loop: the compiler starts copies as late as a
        part without branches lets it, which is after all else before the loop.

        The arguments of ``use_block`` are the block, its buffer, and two functions that
        wait for the keys and for the values to be there: the values are still on their
        way while the logits are computed.
        """
        group, slot = self.step.group, self.step.slot
        count = lax.div(self.end(slot) - 1, self.blocks.positions) + 1

        def body(block: jax.Array, buffer: jax.Array) -> jax.Array:
            is_last = block + 1 == count
            wraps = is_last & (slot + 1 == self.step.slots)
            next_group = jnp.where(wraps, group + 1, group)
            next_slot = jnp.where(is_last, jnp.where(wraps, 0, slot + 1), slot)

            @pl.when(next_group < self.step.groups)
            def _() -> None:
                next_block = jnp.where(is_last, 0, block + 1)
                self._send_for(next_group, next_slot, next_block, 1 - buffer)

            pl.when(block == 0)(start_slot)
            wait_for_keys, wait_for_values = (
                functools.partial(
                    self._copy, kind, lambda copy: copy.wait(), group, slot, block, buffer
                )
                for kind in (0, 1)
            )
            use_block(block, buffer, wait_for_keys, wait_for_values)
            return 1 - buffer

        self.turn_ref[0] = lax.fori_loop(0, count, body, self.turn_ref[0])
