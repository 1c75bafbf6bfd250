"""Parts of the sampling kernels: searches for a threshold and for an id, without a sort."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from tpuspec.kernels.vocabulary_tiles import Rows, Tile

# Bits of an id that one turn of the search for it finds.
_BITS_PER_TURN = 3


def float_of(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def bits_of(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def largest(measure: Callable[[Rows], Rows], goal: Rows, step: Callable[[Rows], Rows],
            low: Rows, high: Rows) -> Rows:
    """Per row the largest t in [low, high) with ``measure(t) >= goal``.

    ``measure`` falls with t and is taken to hold at ``low``. A row is done as soon
    as its bracket is closed, or nothing more can be left out: the measure exceeds
    the goal by less than ``step(t)``, the least that leaving out an id takes off.

    Args:
      low, high: bits of floats in [0, 1], as int32.
    """

    def body(state):
        low, high, _ = state
        middle = low + lax.shift_right_logical(high - low, 1)
        measured = measure(float_of(middle))
        holds = measured >= goal
        done = holds & (measured - goal < step(float_of(middle)))
        low = jnp.where(holds, middle, low)
        high = jnp.where(done, middle + 1, jnp.where(holds, high, middle))
        return low, high, is_open(low, high)

    def is_open(low, high):
        """One lane tells of all, as they are the same."""
        return jnp.max(jnp.where((high - low)[:, :1] > 1, 1.0, 0.0)) > 0

    low, *_ = lax.while_loop(lambda state: state[2], body, (low, high, is_open(low, high)))
    return low


def first_above(weights: Tile, ids: jax.Array, goal: jax.Array, size: int,
                total: Callable[[Tile], jax.Array]) -> jax.Array:
    """The first id at which the running sum of the weights exceeds ``goal``.

    Sums are masked ones in a fixed order, so that they never fall with the id and
    an id of weight 0 is never the first, whatever the rounding.

    Args:
      ids: of the weights, in [0, size).
      total: adds up a tile, per row or in all, and gives the sum to every element.
    """

    whole = total(weights)
    # A number just below 1 may round the goal up to the whole.
    goal = jnp.minimum(goal, float_of(bits_of(whole) - 1))
    turns = -(-(size - 1).bit_length() // _BITS_PER_TURN)

    def body(turn, first):
        # The sums are independent of each other, and hide the time that each takes.
        bits = (turns - 1 - turn) * _BITS_PER_TURN
        steps = jnp.zeros(ids.shape, jnp.int32)
        for way in range(1, 2**_BITS_PER_TURN):
            up_to = total(jnp.where(ids < first + lax.shift_left(way, bits), weights, 0.0))
            steps = jnp.where(up_to <= goal, way, steps)
        return first + lax.shift_left(steps, jnp.full(ids.shape, bits))

    return lax.fori_loop(0, turns, body, jnp.zeros(ids.shape, jnp.int32))
