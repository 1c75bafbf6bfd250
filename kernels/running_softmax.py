"""Inside the attention kernels: the softmax over blocks, and the values it mixes.

Rows. The G queries of all heads in one lane tile are stacked: R = G * 128 / H rows of 128
lanes, each zero outside its own head's lanes. So one product with a block of keys
[T, 128] gives the logits [R, T] of all the tile's heads, and one with the values gives
[R, 128], of which each row's own lanes are kept.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels.attention_blocks import LANES, MASKED, AttentionBlocks
from tpuspec.kernels.block_stream import ROWS, Ref, Scalar
from tpuspec.kernels.implementation import precision_of


def clear_rows(v_ref: Ref, first: Scalar) -> None:
    """Zeros rows ``first`` and beyond of values [tiles, T, 128].

    A weight of 0 does not hide a NaN that an earlier tenant of the slot left behind.
    """
    zeros = jnp.zeros((ROWS, LANES), v_ref.dtype)
    whole = lax.div(first + (ROWS - 1), ROWS)

    @pl.when(whole * ROWS != first)
    def _() -> None:
        at = pl.ds(pl.multiple_of((whole - 1) * ROWS, ROWS), ROWS)
        row = (whole - 1) * ROWS + lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 0)
        for tile in range(v_ref.shape[0]):
            old = v_ref[tile, at, :].astype(jnp.float32)  # v4 selects in 32 bits only
            v_ref[tile, at, :] = jnp.where(row < first, old, 0.0).astype(v_ref.dtype)

    def body(i: jax.Array, carry: None) -> None:
        at = pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)
        for tile in range(v_ref.shape[0]):
            v_ref[tile, at, :] = zeros

    lax.fori_loop(whole, v_ref.shape[1] // ROWS, body, None)


def _lane_head(rows: int, head_width: int) -> jax.Array:
    """[rows, 128] the head, within its tile, that each lane belongs to."""
    return lax.broadcasted_iota(jnp.int32, (rows, LANES), 1) // head_width


def _unstack(x_RL: jax.Array, head_width: int) -> jax.Array:
    """[R, 128] to [G, 128]: of each head's rows its own lanes."""
    window = x_RL.shape[0] * head_width // LANES
    head_GL = _lane_head(window, head_width)
    x_GL = x_RL[:window]
    for head in range(1, LANES // head_width):
        x_GL = jnp.where(head_GL == head, x_RL[head * window : (head + 1) * window], x_GL)
    return x_GL


@dataclasses.dataclass(frozen=True)
class RunningSoftmax:
    """Attention of the stacked queries of a group of lane tiles, block by block.

    Every phase runs over all tiles before the next begins: a tile alone would wait out
    the latency of the matrix and cross-lane units in each.

    Attributes:
      head_width: H.
      rows_ref: [tiles, R, 128] stacked queries.
      max_ref: [tiles, R, 128] float32, largest logit so far, the same in all lanes.
      sum_ref: [tiles, R, 128] float32, sum of weights, spread over the lanes.
      mixed_ref: [tiles, R, 128] float32, sum of weighted values.
    """

    head_width: int
    rows_ref: Ref
    max_ref: Ref
    sum_ref: Ref
    mixed_ref: Ref

    @staticmethod
    def scratch(blocks: AttentionBlocks, rows: int, head_width: int, dtype: jnp.dtype) -> list[Any]:
        """Shapes of the four references, for ``rows`` queries a head."""
        shape = (blocks.tiles, rows * LANES // head_width, LANES)
        return [pltpu.VMEM(shape, dtype)] + 3 * [pltpu.VMEM(shape, jnp.float32)]

    def start(self, q_ref: Ref) -> None:
        """Takes the queries [1, G, tiles * 128]."""
        head_GL = _lane_head(q_ref.shape[1], self.head_width)
        for tile in range(self.rows_ref.shape[0]):
            q_GL = q_ref[0, :, tile * LANES : (tile + 1) * LANES]
            rows = [
                jnp.where(head_GL == head, q_GL, jnp.zeros_like(q_GL))
                for head in range(LANES // self.head_width)
            ]
            self.rows_ref[tile] = jnp.concatenate(rows, axis=0).astype(self.rows_ref.dtype)
        self.max_ref[...] = jnp.full_like(self.max_ref, MASKED)
        self.sum_ref[...] = jnp.zeros_like(self.sum_ref)
        self.mixed_ref[...] = jnp.zeros_like(self.mixed_ref)

    def add(
        self,
        k_ref: Ref,
        v_ref: Ref,
        adjust: Callable[[int, jax.Array], jax.Array],
        values_ready: Callable[[], None],
    ) -> None:
        """Adds a block.

        Args:
          k_ref, v_ref: [tiles, T, 128].
          adjust: from a tile and its logits [R, T] float32 to those with bias and mask.
          values_ready: called before the values are read.
        """
        tiles, positions, _ = k_ref.shape
        parts = positions // LANES
        options = dict(precision=precision_of(k_ref.dtype), preferred_element_type=jnp.float32)
        logits = [
            adjust(
                tile,
                lax.dot_general(
                    self.rows_ref[tile], k_ref[tile], (((1,), (1,)), ((), ())), **options
                ),
            )
            for tile in range(tiles)
        ]
        weights, shrinks = [], []
        for tile, logits_RT in enumerate(logits):
            old_RL = self.max_ref[tile]
            max_RL = jnp.maximum(old_RL, jnp.max(logits_RT, axis=1, keepdims=True))
            self.max_ref[tile] = max_RL
            shrink_RL = jnp.exp(old_RL - max_RL)
            weights_RT = jnp.exp(logits_RT - jnp.tile(max_RL, (1, parts)))
            self.sum_ref[tile] = shrink_RL * self.sum_ref[tile] + sum(
                weights_RT[:, i * LANES : (i + 1) * LANES] for i in range(parts)
            )
            shrinks.append(shrink_RL)
            weights.append(weights_RT.astype(v_ref.dtype))
        values_ready()
        for tile, (weights_RT, shrink_RL) in enumerate(zip(weights, shrinks, strict=True)):
            self.mixed_ref[tile] = shrink_RL * self.mixed_ref[tile] + lax.dot_general(
                weights_RT, v_ref[tile], (((1,), (0,)), ((), ())), **options
            )

    def finish(self, out_ref: Ref) -> None:
        """Writes [1, G, tiles * 128]."""
        for tile in range(self.rows_ref.shape[0]):
            mixed_RL = self.mixed_ref[tile]
            total_RL = jnp.broadcast_to(
                jnp.sum(self.sum_ref[tile], axis=1, keepdims=True), mixed_RL.shape
            )
            out_GL = _unstack(mixed_RL, self.head_width) / _unstack(total_RL, self.head_width)
            out_ref[0, :, tile * LANES : (tile + 1) * LANES] = out_GL.astype(out_ref.dtype)
