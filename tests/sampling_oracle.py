"""Adjusting, warping, acceptance and drawing by sorting, in float64, one row at a time.

Each decision comes with its margin: how far, relative to what is compared, the inputs
are from another decision. A kernel in float32 must decide the same where the margin is
more than rounding.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ROUNDING = 3e-6  # a few float32 roundings in sums of hundreds of terms


def adjust(logits: np.ndarray, counts: np.ndarray, *, repetition_penalty: float = 1.0,
           presence_penalty: float = 0.0, frequency_penalty: float = 0.0,
           logit_bias: Mapping[int, float] | None = None, banned_ids: Sequence[int] = (),
           allowed_ids: Sequence[int] = ()) -> np.ndarray:
    """Logits after penalties, bias and bans; ``counts`` are those of the tokens before."""
    adjusted = logits.astype(np.float64)
    for token in range(len(adjusted)):
        if counts[token]:
            adjusted[token] *= (1 / repetition_penalty if adjusted[token] > 0
                                else repetition_penalty)
            adjusted[token] -= presence_penalty + frequency_penalty * counts[token]
        adjusted[token] += (logit_bias or {}).get(token, 0.0)
        if token in banned_ids or (allowed_ids and token not in allowed_ids):
            adjusted[token] = -np.inf
    return adjusted


def sequences(logits: np.ndarray, length: int, *, start: int = 0, min_new_tokens: int = 0,
              eos_ids: Sequence[int] = (), temperature: float = 1.0, top_k: int = 0,
              top_p: float = 1.0, min_p: float = 0.0, banned_ids: Sequence[int] = (),
              **options: Any) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of tokens of a CHAIN with logits [V(next), V(last)];
    what follows an end id is 0."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for position in range(length):
        early = tuple(eos_ids) if position < min_new_tokens else ()
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in found.items():
            if set(tokens) & set(eos_ids):
                longer[*tokens, 0] = probability
                continue
            counts = np.bincount(tokens or [0], minlength=len(logits)) * bool(tokens)
            adjusted = adjust(logits[:, tokens[-1] if tokens else start], counts,
                              banned_ids=(*banned_ids, *early), **options)
            p, _ = warp(adjusted, temperature, top_k, top_p, min_p, len(logits))
            longer |= {(*tokens, int(i)): probability * p[i] for i in np.flatnonzero(p > 1e-15)}
        found = longer
    return found


def warp(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float,
         vocabulary: int) -> tuple[np.ndarray, float]:
    """Probabilities and the margin of the choice of ids."""
    logits = logits.astype(np.float64)
    logits[vocabulary:] = -np.inf
    if temperature == 0:
        return (np.arange(len(logits)) == np.argmax(logits)).astype(np.float64), 1.0
    e = np.exp((logits - logits.max()) / np.float64(np.float32(temperature)))
    margin = 1.0
    order = np.sort(e)[::-1]
    if 0 < top_k < vocabulary:
        last, next_ = order[top_k - 1], order[top_k]
        if last != next_:  # ties stay together in any arithmetic
            margin = min(margin, (last - next_) / last)
        e[e < last] = 0
    if top_p < 1:
        order = np.sort(e)[::-1]
        cumulative = np.cumsum(order)
        goal = np.float64(np.float32(top_p)) * e.sum()
        margin = min(margin, np.abs(cumulative - goal).min() / e.sum())
        e[e < order[np.searchsorted(cumulative, goal)]] = 0
    if min_p:
        cut = np.float64(np.float32(min_p))
        margin = min(margin, np.abs(e - cut).min() / cut)
        e[e < cut] = 0
    return e / e.sum(), margin


def draw(weights: np.ndarray, uniform: float) -> tuple[int, float]:
    """The id drawn, and how far the uniform number is from where another would be."""
    live = np.flatnonzero(weights)
    cumulative = np.cumsum(weights[live]) / weights.sum()
    edges = cumulative[:-1] if len(live) > 1 else np.array([2.0])
    at = np.searchsorted(edges, uniform, side="right") if len(live) > 1 else 0
    return int(live[at]), float(np.abs(edges - uniform).min())


def accept(p: np.ndarray, q: np.ndarray, drafts: np.ndarray, limit: int, coins: np.ndarray,
           next_coins: np.ndarray) -> tuple[int, int, float]:
    """Number accepted, next token and margin; p [G, V], q [γ, V]."""
    margin = 1.0
    for i, draft in enumerate(drafts[:limit]):
        left, right = coins[i] * q[i, draft], p[i, draft]
        if left != right:
            margin = min(margin, abs(left - right) / max(left, right))
        if not left < right:
            residual = np.maximum(p[i] - q[i], 0)
            # Where p and q are nearly the same, rounding decides what is left.
            margin = min(margin, residual.sum())
            residual[residual < 1e-12] = 0
            token, drawn = draw(residual, next_coins[i]) if residual.any() else (-1, 0.0)
            return i, token, min(margin, drawn)
    token, drawn = draw(p[limit], next_coins[limit])
    return limit, token, min(margin, drawn)
