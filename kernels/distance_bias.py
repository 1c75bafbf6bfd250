"""Inside the verification kernel: T5's relative bias from a table by distance."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels.attention_blocks import LANES, AttentionBlocks
from tpuspec.kernels.block_stream import Ref, Scalar


@dataclasses.dataclass(frozen=True)
class DistanceBias:
    """Bias of the stacked rows of a group of lane tiles, for any block of keys.

    The bias of row g and the key at lane l of 128 aligned positions depends on
    start + g - l alone. So a head's table, farthest distance first along the lanes, and
    turned right by start + g + 1, holds the bias of every key nearer than 128, whichever
    128 positions they are; all others have that of the farthest distance. The turn by
    g + 1 is done once for all slots: v4 cannot turn each row differently at once.

    Attributes:
      rows: G padded; R = rows * heads in a tile.
      turned_ref: [tiles, R, 128] float32, turned by the row.
      near_ref: [tiles, R, 128] float32, turned by the row and the slot's start.
      farthest_ref: [tiles, R, 128] float32, that of the farthest distance in all lanes.
    """

    rows: int
    turned_ref: Ref
    near_ref: Ref
    farthest_ref: Ref

    @staticmethod
    def scratch(blocks: AttentionBlocks, rows: int, head_width: int) -> list[Any]:
        """Shapes of the three references."""
        return 3 * [pltpu.VMEM((blocks.tiles, rows * LANES // head_width, LANES), jnp.float32)]

    def start_group(self, bias_ref: Ref, first_tile: Scalar) -> None:
        """Takes the table [N, 128] float32 of all heads, farthest distance first."""
        tiles, rows_R, _ = self.turned_ref.shape
        heads = rows_R // self.rows
        turn_RL = lax.broadcasted_iota(jnp.int32, (rows_R, LANES), 0) % self.rows + 1
        for tile in range(tiles):
            rows = [
                jnp.broadcast_to(
                    bias_ref[pl.ds((first_tile + tile) * heads + head, 1), :], (self.rows, LANES)
                )
                for head in range(heads)
            ]
            bias_RL = jnp.concatenate(rows, axis=0)
            self.farthest_ref[tile] = jnp.broadcast_to(bias_RL[:, :1], bias_RL.shape)
            for bit in range(self.rows.bit_length()):
                step = 1 << bit
                bias_RL = jnp.where(turn_RL & step != 0, pltpu.roll(bias_RL, step, 1), bias_RL)
            self.turned_ref[tile] = bias_RL

    def start_slot(self, start: jax.Array) -> None:
        for tile in range(self.turned_ref.shape[0]):
            self.near_ref[tile] = pltpu.roll(self.turned_ref[tile], start & (LANES - 1), 1)

    def of_block(self, tile: int, distance_RT: jax.Array) -> jax.Array:
        """[R, T] bias of a tile's rows and the keys of a block, at these distances."""
        times = (1, distance_RT.shape[1] // LANES)
        return jnp.where(
            distance_RT < LANES - 1,
            jnp.tile(self.near_ref[tile], times),
            jnp.tile(self.farthest_ref[tile], times),
        )
