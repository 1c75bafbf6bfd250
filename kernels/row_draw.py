"""Inside the rejection kernel: the one row that a slot's next token is drawn from."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels.bisection import first_above
from tpuspec.kernels.row_weights import Weights, of_row, probability
from tpuspec.kernels.sampling_reference import WarpedRows
from tpuspec.kernels.vocabulary_tiles import (
    LANES,
    SUBLANES,
    TileIndex,
    row_sum,
    rows_above,
    sweep,
    tiles_of,
)


class RowDraw(NamedTuple):
    """Row n of p, and of max(0, p - q) or of p again if no draft was rejected.

    Attributes:
      p_ref: [V / 128, 128], so that eight tiles of the row make a register.
      residual_ref: likewise.
    """

    p_ref: Any
    residual_ref: Any

    @staticmethod
    def scratch(vocabulary_size: int) -> list[Any]:
        """Shapes of the two references."""
        return [pltpu.VMEM((rows_above(tiles_of(vocabulary_size)), LANES), jnp.float32)] * 2

    def take_in(self, target: Weights, draft: Weights, p_rows: WarpedRows, q_rows: WarpedRows,
                n: jax.Array, rejected: jax.Array, first: Any) -> None:
        """Takes the tiles that ``draft`` has; they are the target's from ``first`` on."""
        at_draft = jnp.minimum(n, draft.rows - 1)
        p_row, q_row = (WarpedRows(*(jnp.broadcast_to(of_row(x, i), (SUBLANES, LANES))
                                     for x in rows))
                        for rows, i in ((p_rows, n), (q_rows, at_draft)))

        def body(register: TileIndex, carry: None) -> None:
            here = register.after(first // SUBLANES)
            p = probability(target.eight_tiles(n, here), p_row)
            q = probability(draft.eight_tiles(at_draft, register), q_row)
            for ref, value in ((self.p_ref, p),
                               (self.residual_ref,
                                jnp.where(rejected, jnp.maximum(p - q, 0.0), p))):
                window, at = here.window(ref, 0, SUBLANES, SUBLANES)
                window[at] = value

        sweep(rows_above(draft.tiles) // SUBLANES, body, None)

    def draw(self, uniform: jax.Array) -> jax.Array:
        """[1, 128] the id drawn from the residual, or from p if rounding left nothing of it."""
        registers = self.p_ref.shape[0] // SUBLANES
        shape = (SUBLANES, -(-registers // LANES) * LANES)
        lane = lax.broadcasted_iota(jnp.int32, shape, 1)

        def of(ref: Any, register: TileIndex) -> jax.Array:
            window, at = register.window(ref, 0, SUBLANES, SUBLANES)
            return window[at]

        def whole(tile: jax.Array) -> jax.Array:
            down = jnp.sum(jnp.sum(tile, axis=1, keepdims=True), axis=0, keepdims=True)
            return jnp.broadcast_to(down, tile.shape)

        most = sweep(registers, lambda i, most: jnp.maximum(most, of(self.residual_ref, i)),
                     jnp.zeros((SUBLANES, LANES), jnp.float32))
        empty = jnp.max(most, axis=(0, 1), keepdims=True) == 0

        def put_sum(register: TileIndex, sums: jax.Array) -> jax.Array:
            weights = jnp.where(empty, of(self.p_ref, register), of(self.residual_ref, register))
            window, at = register.window(self.residual_ref, 0, SUBLANES, SUBLANES)
            window[at] = weights
            return jnp.where(lane == register.number, jnp.sum(weights, axis=1, keepdims=True), sums)

        sums = sweep(registers, put_sum, jnp.zeros(shape, jnp.float32))
        # Tile s of register i is sublane s of lane i.
        ids = jnp.where(lane < registers,
                        lane * SUBLANES + lax.broadcasted_iota(jnp.int32, shape, 0), 0)
        goal = uniform * whole(sums)
        tile = first_above(sums, ids, goal, self.p_ref.shape[0], whole)
        before = whole(jnp.where(ids < tile, sums, 0.0))

        weights = self.residual_ref[pl.ds(tile[0, 0], 1), :]
        lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        at_lane = first_above(weights, lane, (goal - before)[:1, :LANES], LANES, row_sum)
        return (tile[:1, :LANES] * LANES + at_lane).astype(jnp.float32)
