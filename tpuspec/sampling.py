"""From logits to the distribution that is sampled: one function for every place.

Draft, accept test, residual, bonus and plain decoding all see the output of
``warp``, in float32, so that speculation stays exact under every option.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import random
from jaxtyping import Array, Bool, Float, Int, UInt32

from tpuspec.config import check_range

_BLOCK = 128
_ONE_BITS = 0x3F800000  # float32 1.0; the order of floats in [0, 1] is that of their bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
      temperature: 0 is greedy (argmax, ties to the lowest id).
      top_k: keep the k most likely ids; 0 is off. Ids tied with the k-th stay.
      top_p: keep the smallest set of most likely ids with this mass; 1 is off.
        Ids tied with the last of the set stay.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < 1e-3:
            raise ValueError("temperature must be 0 (greedy) or at least 0.001, "
                             f"got {self.temperature}")
        check_range("top_k", self.top_k, 0, 2**31 - 1)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


@functools.partial(jax.tree_util.register_dataclass,
                   data_fields=["temperature_B", "top_k_B", "top_p_B"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSampling:
    """``SamplingParams`` of all slots as arrays [B]."""

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array

    def where(self, active_B: jax.Array) -> "SlotSampling":
        """The same, with the other slots greedy: the cheapest way to sample."""
        return dataclasses.replace(
            self, temperature_B=jnp.where(active_B, self.temperature_B, 0.0))

    @classmethod
    def greedy(cls, slots: int) -> "SlotSampling":
        return cls(temperature_B=jnp.zeros(slots, jnp.float32),
                   top_k_B=jnp.zeros(slots, jnp.int32), top_p_B=jnp.ones(slots, jnp.float32))


class Purpose(enum.IntEnum):
    """What a random number is for; part of its key."""

    DRAFT = 0
    ACCEPT = 1
    CORRECTION = 2


def warp(logits_BGV: Float[Array, "B G V"], sampling: SlotSampling, vocabulary_size: int,
         ) -> tuple[Float[Array, "B G V"], Bool[Array, "B G"]]:
    """Probabilities that are sampled, and whether each row's logits were sound.

    Order: ids outside the vocabulary get probability 0, then temperature, top-k,
    top-p, renormalise. Temperature 0 gives the one-hot of the argmax. A row with a
    NaN or infinite largest logit is reported, and its probabilities mean nothing.
    """
    ids = jnp.arange(logits_BGV.shape[-1])[None, None, :]
    logits = jnp.where(ids < vocabulary_size, logits_BGV.astype(jnp.float32), -jnp.inf)
    greedy = (sampling.temperature_B == 0)[:, None, None]
    temperature = jnp.where(greedy, 1.0, sampling.temperature_B[:, None, None])
    top = jnp.max(logits, axis=-1, keepdims=True)
    # e in [0, 1] with e = 1 at the largest: thresholds are found on these.
    e = jnp.exp((logits - top) / temperature)
    warped = jnp.any((sampling.temperature_B > 0)
                     & ((sampling.top_k_B > 0) | (sampling.top_p_B < 1)))
    e = lax.cond(warped, lambda e: _truncate(e, sampling), lambda e: e, e)
    # Not argmax: reductions to one number are faster, and the lowest id is plain to see.
    best = jnp.min(jnp.where(logits == top, ids, ids.size), axis=-1, keepdims=True)
    one_hot = ids == best
    weights = jnp.where(greedy, one_hot.astype(jnp.float32), e)
    probabilities = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return probabilities, jnp.isfinite(top[..., 0])


def _truncate(e: jax.Array, sampling: SlotSampling) -> jax.Array:
    """Top-k, then top-p of what is left; both as thresholds found by bisection on
    the bits of the floats, without a sort and exact to the bit."""
    size = e.shape[-1]
    k = jnp.where(sampling.top_k_B > 0, sampling.top_k_B, size)[:, None]
    k = jnp.minimum(k, size)
    threshold = _largest(
        lambda t: jnp.sum((e >= t).astype(jnp.int32), axis=-1) >= k, e.shape[:2])
    e = jnp.where(e >= threshold, e, 0.0)
    # 1 is off, and must not cut a tail that rounding hides from the sum.
    mass = sampling.top_p_B[:, None] * jnp.sum(e, axis=-1)
    off = (sampling.top_p_B == 1)[:, None]
    threshold = _largest(
        lambda t: ~off & (jnp.sum(jnp.where(e >= t, e, 0.0), axis=-1) >= mass), e.shape[:2])
    return jnp.where(e >= threshold, e, 0.0)


def _largest(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """The largest float t in [0, 1] per row with ``holds(t)``, monotone in t; 0 if none."""

    def body(_, bounds):
        low, high = bounds  # holds(low) or low = 0; not holds(high + 1)
        middle = low + (high - low + 1) // 2
        ok = holds(lax.bitcast_convert_type(middle, jnp.float32)[..., None])
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    low = jnp.zeros(shape, jnp.int32)
    low, _ = lax.fori_loop(0, 30, body, (low, jnp.full(shape, _ONE_BITS, jnp.int32)))
    return lax.bitcast_convert_type(low, jnp.float32)[..., None]


def draw(weights_BV: Float[Array, "B V"], uniform_B: Float[Array, " B"]) -> Int[Array, " B"]:
    """One id per row with probability proportional to its weight (inverse CDF).

    An id of weight 0 is never drawn, whatever the uniform number in [0, 1).
    In two levels, blocks of ids and the ids of one block: every weight is read once.
    """
    slots, size = weights_BV.shape
    blocks = jnp.pad(weights_BV, ((0, 0), (0, -size % _BLOCK))).reshape(slots, -1, _BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    goal_B = uniform_B * jnp.cumsum(sums, axis=-1)[:, -1]
    block_B, before_B = _first_above(sums, goal_B)
    within = jnp.take_along_axis(blocks, block_B[:, None, None], axis=1)[:, 0]
    id_B, _ = _first_above(within, goal_B - before_B)
    return block_B * _BLOCK + id_B


def _first_above(weights: jax.Array, goal_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Per row, the first place of a weight above 0 up to which the sum exceeds the
    goal, and the sum before it. Rounding may leave none: the last such weight then."""
    cumulative = jnp.cumsum(weights, axis=-1)
    positive = weights > 0
    hit = (cumulative > goal_B[:, None]) & positive
    places = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None, :]
    first = jnp.min(jnp.where(hit, places, places.size), axis=-1)
    last = jnp.max(jnp.where(positive, places, 0), axis=-1)
    place_B = jnp.where(first < places.size, first, last)
    upto = jnp.take_along_axis(cumulative, place_B[:, None], axis=-1)[:, 0]
    at = jnp.take_along_axis(weights, place_B[:, None], axis=-1)[:, 0]
    return place_B, upto - at


def seed_words(seed: int) -> tuple[int, int]:
    """A request's seed, an integer in [0, 2**64), as two 32-bit words."""
    check_range("seed", seed, 0, 2**64 - 1)
    return seed >> 32, seed & 0xFFFFFFFF


def uniforms(seed_B2: UInt32[Array, "B 2"], positions_BG: Int[Array, "B G"],
             ) -> Float[Array, "3 B G"]:
    """Numbers in [0, 1) by Purpose, slot and position.

    Counter-based: Threefry of the counter (position, purpose) under the request's
    seed, so that an output does not depend on slot, neighbours or arrival.
    """

    def one(seed, position, purpose):
        counter = jnp.stack([position.astype(jnp.uint32), purpose])
        return random.threefry_2x32(seed, counter)[0]

    over_positions = jax.vmap(one, in_axes=(None, 0, None))
    over_slots = jax.vmap(over_positions, in_axes=(0, 0, None))
    bits = jax.vmap(over_slots, in_axes=(None, None, 0))(
        seed_B2, positions_BG, jnp.arange(len(Purpose), dtype=jnp.uint32))
    # 24 bits: every value is a float32, and none rounds up to 1.
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
