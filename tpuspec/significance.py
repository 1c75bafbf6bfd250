"""Tests of sampled counts: p-values, effect sizes, and the smallest bias that they see.

Host code without JAX or scipy. Chi-square tests pool rare cells, as they assume none.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

POWER = 0.9  # chance of seeing the smallest bias that is said to be seen
_LEAST_EXPECTED = 5.0  # of a cell


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of a test of one hypothesis: that there is no bias.

    Attributes:
      kind: what is compared with what; tests of one kind are reported together.
      where: of which source, at which position.
      p_value: chance of a deviation like this without bias; 0 if the impossible happened.
      effect: the deviation found: Cohen's w for counts, the share of drafts that came
        out in place of the target's tokens for acceptance.
      samples: on which it stands.
      degrees: of freedom; None for a normal test.
      draft_divergence: χ² of the draft's distribution from the target's over the cells,
        or for a normal test its drift in standard deviations of one sample; None if it is
        not known.
    """

    kind: str
    where: str
    p_value: float
    effect: float
    samples: float
    degrees: int | None
    draft_divergence: float | None

    def smallest_effect(self, level: float) -> float:
        """Effect that is seen with a chance of ``POWER`` at this level."""
        if self.degrees is None:
            raise ValueError("effects of a normal test are shares: see smallest_share")
        return math.sqrt(noncentrality(self.degrees, level) / self.samples)

    def smallest_share(self, level: float) -> float | None:
        """The same as a share ε: output that is the draft's with chance ε and the target's
        otherwise. None where no share is seen, or the draft is not known."""
        if not self.draft_divergence:
            return None
        if self.degrees is None:
            share = ((normal_quantile(level / 2) + normal_quantile(1 - POWER))
                     / (self.draft_divergence * math.sqrt(self.samples)))
        else:
            share = self.smallest_effect(level) / math.sqrt(self.draft_divergence)
        return share if share <= 1 else None


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979): if every hypothesis holds, one falls
    below a level with a chance of at most that level, however they depend on each other."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def against_exact[Cell: Hashable](
        kind: str, where: str, counts: Mapping[Cell, int], exact: Mapping[Cell, float],
        draft: Mapping[Cell, float]) -> Outcome:
    """Chi-square of counts against probabilities that sum to 1.

    Args:
      counts: how often each cell came.
      exact, draft: probabilities under the target and under the draft alone.
    """
    total = sum(counts.values())
    impossible = any(count and not exact.get(cell) for cell, count in counts.items())
    live = [cell for cell, p in exact.items() if p > 0]
    p = np.array([exact[cell] for cell in live])
    observed = np.array([counts.get(cell, 0) for cell in live], np.float64)
    q = np.array([draft.get(cell, 0.0) for cell in live])
    observed, p, q = _pooled(p * total, observed, p, q)
    p = p / p.sum()
    chi2 = float(((observed - total * p)**2 / (total * p)).sum())
    degrees = len(p) - 1
    p_value = 0.0 if impossible else chi2_tail(chi2, degrees)
    divergence = float(((q - p)**2 / p).sum())  # what p cannot give counts as never seen
    return Outcome(kind=kind, where=where, p_value=p_value, samples=total, degrees=degrees,
                effect=math.sqrt(chi2 / total), draft_divergence=divergence if degrees else None)


def two_samples[Cell: Hashable](kind: str, where: str, one: Mapping[Cell, int],
                                other: Mapping[Cell, int]) -> Outcome:
    """Chi-square of two samples' counts against their sum."""
    cells = list({**one, **other})
    a, b = (np.array([counts.get(cell, 0) for cell in cells], np.float64)
            for counts in (one, other))
    share = a.sum() / (a.sum() + b.sum())
    a, b = _pooled((a + b) * min(share, 1 - share), a, b)
    chi2 = sum(float(((found - part * (a + b))**2 / (part * (a + b))).sum())
               for found, part in ((a, share), (b, 1 - share)))
    effective = a.sum() * b.sum() / (a.sum() + b.sum())  # of one sample against the exact
    return Outcome(kind=kind, where=where, p_value=chi2_tail(chi2, len(a) - 1),
                samples=float(effective), degrees=len(a) - 1,
                effect=math.sqrt(chi2 / effective), draft_divergence=None)


def of_drift(kind: str, where: str, drifts: np.ndarray, variances: np.ndarray,
             under_draft: np.ndarray, *, rounding: float) -> Outcome:
    """Whether values whose means are 0, and whose variances are known, drift.

    Args:
      drifts: of single tokens, each with mean 0 given all tokens before it.
      variances: of each.
      under_draft: the mean of each if its token came from the draft.
      rounding: error of one drift.
    """
    # Rounding may push all tokens the same way; without it, a draft that is the target
    # would fail by what is not there.
    spread = math.hypot(math.sqrt(float(variances.sum())), len(drifts) * rounding)
    drift = float(under_draft.mean())
    z = float(drifts.sum()) / spread
    return Outcome(kind=kind, where=where, p_value=math.erfc(abs(z) / math.sqrt(2)),
                   effect=float(drifts.mean()) / drift if abs(drift) > rounding else 0.0,
                   samples=len(drifts), degrees=None,
                   draft_divergence=abs(drift) * math.sqrt(len(drifts)) / spread)


def _pooled(expected: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
    """Rare cells as one, with the next rarer ones until that one is not rare."""
    order = np.argsort(expected, kind="stable")
    rare = int((expected < _LEAST_EXPECTED).sum())
    while 0 < rare < len(order) and expected[order[:rare]].sum() < _LEAST_EXPECTED:
        rare += 1
    return [np.append(column[order[rare:]], column[order[:rare]].sum()) if rare else column
            for column in columns]


def chi2_tail(x: float, degrees: float) -> float:
    """Chance that chi-square exceeds x; 1 without degrees of freedom."""
    if degrees <= 0:
        return 1.0
    return _upper_gamma(degrees / 2, x / 2)


@functools.cache
def noncentrality(degrees: int, level: float) -> float:
    """Of a chi-square that exceeds the level's quantile with a chance of ``POWER``."""
    if degrees < 1:
        return math.inf
    critical = _solve(lambda x: -chi2_tail(x, degrees), -level)
    return _solve(lambda value: noncentral_tail(critical, degrees, value), POWER)


def noncentral_tail(x: float, degrees: int, noncentral: float) -> float:
    """Chance that a noncentral chi-square exceeds x: a Poisson mixture of central ones."""
    half, total = noncentral / 2, 0.0
    if half == 0:
        return chi2_tail(x, degrees)
    spread = 10 * math.sqrt(half) + 20
    first = max(0, int(half - spread))
    a = degrees / 2 + first
    tail = chi2_tail(x, 2 * a)
    for j in range(first, int(half + spread) + 1):
        total += math.exp(-half + j * math.log(half) - math.lgamma(j + 1)) * tail
        # Γ(a + 1, x) / Γ(a + 1) is the same of a, and one term more.
        tail += math.exp(a * math.log(x / 2) - x / 2 - math.lgamma(a + 1))
        a += 1
    return total


def normal_quantile(tail: float) -> float:
    """z that a normal value exceeds with this chance."""
    return _solve(lambda z: -math.erfc(z / math.sqrt(2)) / 2, -tail) if tail < 0.5 else 0.0


def _solve(rising: Callable[[float], float], value: float) -> float:
    """x >= 0 with rising(x) = value."""
    low, high = 0.0, 1.0
    while rising(high) < value:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return high


def _upper_gamma(a: float, x: float) -> float:
    """Regularized Γ(a, x) / Γ(a), by the series below a + 1 and the continued fraction
    above it."""
    if x <= 0:
        return 1.0
    factor = math.exp(-x + a * math.log(x) - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-16:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - total * factor)
    b = x + 1 - a  # Lentz
    c, d = 1e300, 1 / b
    h = d
    for i in range(1, 10_000):
        an = -i * (i - a)
        b += 2
        d = 1 / (an * d + b)
        c = b + an / c
        h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return factor * h
