"""Means with intervals, of values that come in blocks: the positions of one text belong
together, texts of different prompts do not. Host code without JAX."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpuspec.config import check_range

LEVEL = 0.95  # of every interval here
_RESAMPLES = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure and its 95 % interval; bounds are None where there are too few blocks.

    Attributes:
      count: values.
      blocks: that they come in.
    """

    value: float
    low: float | None
    high: float | None
    count: int
    blocks: int

    def to_json(self, name: str) -> dict[str, Any]:
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_by_blocks(values: Sequence[np.ndarray], blocks: Sequence[int]) -> Estimate:
    """Mean over all values, with the spread between blocks: a ratio estimator.

    Args:
      values: arrays of any lengths, at least one value among them.
      blocks: the block of each array; arrays of one block may depend on each other.
    """
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for array, block in zip(values, blocks, strict=True):
        if len(array):
            sums[block] = sums.get(block, 0.0) + float(np.sum(array, dtype=np.float64))
            counts[block] = counts.get(block, 0) + len(array)
    total = sum(counts.values())
    check_range("number of values", total, 1, None)
    mean, n = sum(sums.values()) / total, len(counts)
    if n < 2:
        return Estimate(value=mean, low=None, high=None, count=total, blocks=n)
    deviations = sum((sums[block] - mean * counts[block])**2 for block in counts)
    half = t_quantile(n - 1) * math.sqrt(deviations * n / (n - 1)) / total
    return Estimate(value=mean, low=mean - half, high=mean + half, count=total, blocks=n)


def clipped(estimate: Estimate) -> Estimate:
    """The same, of a figure that lies in [0, 1]."""
    if estimate.low is None or estimate.high is None:
        return estimate
    return dataclasses.replace(estimate, low=max(0.0, estimate.low), high=min(1.0, estimate.high))


def t_quantile(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t; from 3 degrees on by a series, within 2 %."""
    check_range("degrees", degrees, 1, None)
    p = 0.5 + LEVEL / 2
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    z = statistics.NormalDist().inv_cdf(p)
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96,
             (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / degrees**power for power, term in enumerate(terms))


def bootstrap(figure: Callable[[np.ndarray], float], blocks: int, *, seed: int = 0) -> Estimate:
    """Percentile interval of any figure of whole blocks.

    Args:
      figure: of block numbers [blocks], in which a block may come several times; NaN where
        these blocks have none.

    Raises:
      ValueError: all blocks together have none.
    """
    check_range("blocks", blocks, 1, None)
    value = figure(np.arange(blocks))
    if math.isnan(value):
        raise ValueError("there is too little to measure: outputs of a token or two")
    if blocks < 2:
        return Estimate(value=value, low=None, high=None, count=blocks, blocks=blocks)
    rng = np.random.default_rng(seed)
    drawn = [figure(rng.integers(blocks, size=blocks)) for _ in range(_RESAMPLES)]
    low, high = np.nanquantile(drawn, (0.5 - LEVEL / 2, 0.5 + LEVEL / 2))
    return Estimate(value=value, low=float(low), high=float(high), count=blocks, blocks=blocks)
