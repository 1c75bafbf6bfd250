"""Inside the verification kernel: T5's relative bias from a table by distance."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels.attention_blocks import LANES, AttentionBlocks
from tpuspec.kernels.block_stream import Ref, Scalar

SUBLANES = 8


@dataclasses.dataclass(frozen=True)
class DistanceBias:
    """Bias of the stacked rows of a group of lane tiles, for any block of keys.

    The bias of row g and the key at lane l of 128 aligned positions depends on
    start + g - l alone. So a head's table, farthest distance first along the lanes, and
    turned right by start + g + 1, holds the bias of every key nearer than 128, whichever
    128 positions they are; all others have that of the farthest distance. v4 cannot turn
    each row differently at once: eight heads' tables are turned together, for one row at
    a time.

    Attributes:
      rows: G padded. A group's heads have as many stacked rows each.
      near_ref: [heads * rows, 128] float32, turned by the row and the slot's start.
      farthest_ref: [heads * rows, 128] float32, that of the farthest distance in all lanes.
    """

    rows: int
    near_ref: Ref
    farthest_ref: Ref

    @staticmethod
    def scratch(blocks: AttentionBlocks, rows: int, head_width: int) -> list[Any]:
        """Shapes of the two references."""
        return 2 * [pltpu.VMEM((blocks.tiles * rows * LANES // head_width, LANES), jnp.float32)]

    def _put(
        self, ref: Ref, bias_ref: Ref, first_head: Scalar, of_row: Callable[[Any, int], jax.Array]
    ) -> None:
        """Writes ``of_row(tables of up to eight heads, row)`` to that row of these heads."""
        heads = ref.shape[0] // self.rows
        for head in range(0, heads, SUBLANES):
            count = min(SUBLANES, heads - head)
            tables = bias_ref[pl.ds(first_head + head, count), :]
            for row in range(self.rows):
                at = pl.ds(head * self.rows + row, count, stride=self.rows)
                ref[at, :] = of_row(tables, row)

    def start_group(self, bias_ref: Ref, first_head: Scalar) -> None:
        """Takes the table [N, 128] float32 of all heads, farthest distance first."""
        self._put(
            self.farthest_ref,
            bias_ref,
            first_head,
            lambda tables, row: jnp.broadcast_to(tables[:, :1], tables.shape),
        )

    def start_slot(self, bias_ref: Ref, first_head: Scalar, start: jax.Array) -> None:
        self._put(
            self.near_ref,
            bias_ref,
            first_head,
            lambda tables, row: pltpu.roll(tables, (start + (row + 1)) & (LANES - 1), 1),
        )

    def of_block(self, tile: int, distance_RT: jax.Array) -> jax.Array:
        """[R, T] bias of a tile's rows and the keys of a block, at these distances."""
        rows_R, positions = distance_RT.shape
        at, times = pl.ds(tile * rows_R, rows_R), (1, positions // LANES)
        return jnp.where(
            distance_RT < LANES - 1,
            jnp.tile(self.near_ref[at, :], times),
            jnp.tile(self.farthest_ref[at, :], times),
        )
