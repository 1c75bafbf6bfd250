"""What acceptance along finished texts says: α, how it varies, and what runs would give.

``overlaps`` are arrays, one for each text, of Σ min(p, q) at its positions: the chance
that a draft at this place is accepted. ``kept`` are min(1, q(x)/p(x)) of the tokens x
that stand there. A text with the target's distribution and an accepted draft at a place
come together with probability min(p(x), q(x)), whatever came before, so that a text
without any speculation, with a coin of chance ``kept`` at each place, is a speculative
run: how many target runs a text takes follows from it exactly, clustering included.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tpuspec.config import check_range
from tpuspec.estimates import Estimate, clipped, mean_by_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionBin:
    """α of the positions ``first`` to ``last`` of the texts, from 0, both included."""

    first: int
    last: int
    alpha: Estimate


def alpha(overlaps: Sequence[np.ndarray], blocks: Sequence[int]) -> Estimate:
    """Mean Σ min(p, q), over positions, with an interval by blocks."""
    return clipped(mean_by_blocks(overlaps, blocks))


def by_position(overlaps: Sequence[np.ndarray], blocks: Sequence[int]) -> list[PositionBin]:
    """α in bins that double: 0, 1, 2 to 3, 4 to 7, ..."""
    longest = max(len(array) for array in overlaps)
    firsts = [0, *(2**k for k in range(longest.bit_length()) if 2**k < longest)]
    bins = []
    for first, after in zip(firsts, [*firsts[1:], longest], strict=True):
        parts = [array[first:after] for array in overlaps]
        bins.append(PositionBin(first=first, last=after - 1, alpha=alpha(parts, blocks)))
    return bins


@dataclasses.dataclass(frozen=True, kw_only=True)
class Autocorrelation:
    """How acceptance at one place goes with that some places later, within a text.

    Attributes:
      lags: correlation at lags 1, 2, ...; None where no text is long enough, or acceptance
        is the same everywhere.
      noise: at each lag, what independent acceptance would keep below, 95 times of 100.
    """

    lags: tuple[float | None, ...]
    noise: tuple[float | None, ...]


def autocorrelation(overlaps: Sequence[np.ndarray], longest: int) -> Autocorrelation:
    """About the mean over all texts: texts that are easy as a whole count as clustering.

    Args:
      longest: lag.
    """
    check_range("longest lag", longest, 1, None)
    everything = np.concatenate([np.asarray(array, np.float64) for array in overlaps])
    mean, variance = everything.mean(), everything.var()
    lags: list[float | None] = []
    noise: list[float | None] = []
    for lag in range(1, longest + 1):
        products = [(array[:-lag] - mean) * (array[lag:] - mean)
                    for array in overlaps if len(array) > lag]
        pairs = sum(len(product) for product in products)
        if not pairs or variance < 1e-12:
            lags.append(None)
            noise.append(None)
            continue
        lags.append(float(sum(product.sum() for product in products)) / pairs / float(variance))
        noise.append(1.96 / math.sqrt(pairs))
    return Autocorrelation(lags=tuple(lags), noise=tuple(noise))


def target_runs(kept: np.ndarray, draft_length: int) -> float:
    """Target runs expected for one text, its end included, by dynamic programming."""
    check_range("draft_length", draft_length, 0, None)
    length = len(kept)
    starts = np.zeros(length + draft_length + 2)  # chance that a run starts here
    starts[0] = 1.0
    for place in range(length):
        reached = starts[place]
        for draft in range(place, min(place + draft_length, length)):
            starts[draft + 1] += reached * (1 - kept[draft])  # rejected: the next run
            reached *= kept[draft]
        if place + draft_length < length:  # all accepted: one token more
            starts[place + draft_length + 1] += reached
    return float(starts[:length].sum())


def tokens_per_run(kept: Sequence[np.ndarray], draft_length: int) -> float:
    """Tokens of all texts over the target runs expected for them. Ends of texts cut the
    last runs short, as they do in speculative decoding."""
    return (sum(len(array) for array in kept)
            / sum(target_runs(array, draft_length) for array in kept))
