"""From logits to the distribution that is sampled, and a draw from it, in plain ``jnp``.

What the sampling kernels compute, and what their tests hold them against.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

ONE_BITS = 0x3F800000  # float32 1.0; floats in [0, 1] are ordered as their bits are
_BLOCK = 128


class WarpOptions(NamedTuple):
    """How each slot's logits become probabilities.

    Attributes:
      temperature_B: 0 is greedy (argmax, ties to the lowest id), and then the
        other options have no effect.
      top_k_B: keep the k most likely ids; 0 is off. Ids tied with the k-th stay.
      top_p_B: keep the smallest set of most likely ids with this share of what
        top-k left; 1 is off. Ids tied with the last of the set stay.
      min_p_B: of what is left, keep ids at least this times as likely as the most
        likely one, in [0, 1]; 0 is off.

    Source: top-k Fan et al. 2018; top-p Holtzman et al. 2020; min-p Nguyen et al. 2024.
    """

    temperature_B: Float[Array, " B"]
    top_k_B: Int[Array, " B"]
    top_p_B: Float[Array, " B"]
    min_p_B: Float[Array, " B"]


class WarpedRows(NamedTuple):
    """A row's distribution, but for its logits: with e = exp((logit - top) / temperature),
    the probability of an id is e / total where e >= threshold, and 0 elsewhere.

    For greedy rows ``top`` is the largest logit, ``threshold`` and ``total`` are 1.
    """

    top: Float[Array, "*rows"]
    threshold: Float[Array, "*rows"]
    total: Float[Array, "*rows"]


def warp(logits_BGV: Float[Array, "B G V"], options: WarpOptions, vocabulary_size: int,
         ) -> tuple[Float[Array, "B G V"], WarpedRows, Bool[Array, "B G"]]:
    """Probabilities, their rows' figures, and whether each row's logits were sound.

    Order: ids outside the vocabulary get probability 0, then temperature, top-k,
    top-p, min-p, renormalise. A row with a NaN or an infinite largest logit is not
    sound, and its probabilities mean nothing.
    """
    temperature, top_k, top_p, min_p = (option[:, None, None] for option in options)
    ids = jnp.arange(logits_BGV.shape[-1])[None, None, :]
    logits = jnp.where(ids < vocabulary_size, logits_BGV.astype(jnp.float32), -jnp.inf)
    greedy = temperature == 0
    top = jnp.max(logits, axis=-1, keepdims=True)
    # e in [0, 1] with e = 1 at the largest: thresholds are found on these.
    e = jnp.exp((logits - top) / jnp.where(greedy, 1.0, temperature))
    truncated = jnp.any(~greedy & ((top_k > 0) | (top_p < 1)))
    threshold = lax.cond(truncated, lambda: _threshold(e, top_k, top_p),
                         lambda: jnp.zeros_like(top))
    threshold = jnp.where(greedy, 1.0, jnp.maximum(threshold, min_p))
    # Not argmax: reductions to one number are faster, and the lowest id is plain to see.
    best = jnp.min(jnp.where(logits == top, ids, ids.size), axis=-1, keepdims=True)
    one_hot = (ids == best).astype(jnp.float32)
    weights = jnp.where(greedy, one_hot, jnp.where(e >= threshold, e, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    rows = WarpedRows(*(x[..., 0] for x in (top, threshold, total)))
    # A maximum may lose a NaN (XLA's on a CPU does).
    sound = jnp.isfinite(top[..., 0]) & ~jnp.any(jnp.isnan(logits), axis=-1)
    return weights / total, rows, sound


def _threshold(e: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """[B, G, 1] the least e that top-k and then top-p keep; no sort, exact to the bit."""
    size, rows = e.shape[-1], (*e.shape[:-1], 1)

    def kept_sum(t, value):
        return jnp.sum(jnp.where(e >= t, value, 0), axis=-1, keepdims=True)

    k = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)
    kept = _largest(lambda t: kept_sum(t, 1) >= k, rows)
    # 1 is off, and must not cut a tail that rounding hides from the sum.
    mass = top_p * kept_sum(kept, e)
    nucleus = _largest(lambda t: (top_p < 1) & (kept_sum(jnp.maximum(t, kept), e) >= mass), rows)
    return jnp.maximum(kept, nucleus)


def _largest(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """The largest float t in [0, 1] per row with ``holds(t)``, monotone in t; 0 if none."""

    def body(_, bounds):
        low, high = bounds  # holds(low) or low = 0; not holds(high + 1)
        middle = low + (high - low + 1) // 2
        ok = holds(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    low = jnp.zeros(shape, jnp.int32)
    low, _ = lax.fori_loop(0, 30, body, (low, jnp.full(shape, ONE_BITS, jnp.int32)))
    return lax.bitcast_convert_type(low, jnp.float32)


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
