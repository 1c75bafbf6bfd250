"""What speculative decoding is expected to gain (Leviathan et al. 2022, §3).

Symbols: α acceptance rate, γ draft length, c time of a draft pass over time of a
target pass of width 1, ĉ the same for arithmetic operations, and the widening
w(γ) = T(γ+1)/T(1) of the verify pass, which the paper takes as 1. Acceptances are
taken as independent, which is an approximation; where they differ by position,
``alphas[i]`` is the rate of draft i given that all before it were accepted.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from tpuspec.config import check_range

Widening = Callable[[int], float]


def _one(_: int) -> float:
    return 1.0


def expected_tokens(alpha: float, draft_length: int) -> float:
    """Tokens of one target run, Eq. (1): (1 - α^(γ+1)) / (1 - α)."""
    return sum(_at_least(alpha, draft_length))


def _at_least(alpha: float, draft_length: int) -> list[float]:
    """Probability of at least k tokens in a run, for k = 1 .. γ+1: α^(k-1)."""
    check_range("alpha", alpha, 0.0, 1.0)
    check_range("draft_length", draft_length, 0, None)
    return [alpha**i for i in range(draft_length + 1)]


def run_length_distribution(alpha: float, draft_length: int) -> list[float]:
    """Probability of exactly k tokens in a run, for k = 1 .. γ+1:
    α^(k-1) (1 - α), and α^γ for the clean sweep."""
    reached = _at_least(alpha, draft_length)
    return [here - after for here, after in zip(reached, [*reached[1:], 0.0], strict=True)]


def run_lengths_by_position(alphas: Sequence[float]) -> list[float]:
    """The same where acceptance differs by position; γ is ``len(alphas)``."""
    for i, alpha in enumerate(alphas):
        check_range(f"alphas[{i}]", alpha, 0.0, 1.0)
    reached = [1.0, *np.cumprod(np.asarray(alphas, np.float64)).tolist()]
    return [here - after for here, after in zip(reached, [*reached[1:], 0.0], strict=True)]


def expected_tokens_by_position(alphas: Sequence[float]) -> float:
    """Eq. (1) where acceptance differs by position: 1 + Σ_k Π_{i<=k} α_i."""
    for i, alpha in enumerate(alphas):
        check_range(f"alphas[{i}]", alpha, 0.0, 1.0)
    return 1.0 + float(np.sum(np.cumprod(np.asarray(alphas, np.float64))))


def speedup(alpha: float, draft_length: int, c: float, widening: float = 1.0) -> float:
    """Walltime gain over plain decoding, Eq. (5), with T(γ+1)/T(1) in place of 1.

    Args:
      alpha: acceptance rate.
      draft_length: γ.
      c: time of one draft pass over time of one target pass of width 1.
      widening: time of one target pass of width γ+1 over one of width 1.
    """
    return expected_tokens(alpha, draft_length) / _step_cost(draft_length, c, widening)


def speedup_by_position(alphas: Sequence[float], c: float, widening: float = 1.0) -> float:
    """Eq. (5) where acceptance differs by position; γ is ``len(alphas)``."""
    return expected_tokens_by_position(alphas) / _step_cost(len(alphas), c, widening)


def _step_cost(draft_length: int, c: float, widening: float) -> float:
    check_range("c", c, 0.0, None)
    check_range("widening", widening, 0.0, None)
    return draft_length * c + widening


def operations_factor(alpha: float, draft_length: int, c_hat: float) -> float:
    """Factor by which total arithmetic grows, Theorem 3.11:
    (1 - α)(γ ĉ + γ + 1) / (1 - α^(γ+1))."""
    check_range("c_hat", c_hat, 0.0, None)
    return (draft_length * (c_hat + 1) + 1) / expected_tokens(alpha, draft_length)


def pays(alpha: float, c: float) -> bool:
    """Corollary 3.9: some draft length helps exactly if α > c (with a widening of 1),
    and then γ = 1 gains at least (1 + α) / (1 + c)."""
    check_range("alpha", alpha, 0.0, 1.0)
    check_range("c", c, 0.0, None)
    return alpha > c


def best_draft_length(alpha: float | Sequence[float], c: float, *, longest: int = 32,
                      widening: Widening = _one) -> int:
    """The γ in 0 .. longest with the largest Eq. (5); the shortest of equals.

    Args:
      alpha: one rate for every position, or one for each (then γ <= their number).
      widening: γ -> T(γ+1)/T(1).
    """
    check_range("longest", longest, 0, None)
    alphas = [alpha] * longest if isinstance(alpha, int | float) else list(alpha)[:longest]
    gains = [speedup_by_position(alphas[:length], c, widening(length))
             for length in range(len(alphas) + 1)]
    return gains.index(max(gains))


def oracle_speedup(alpha: float, c: float) -> float:
    """Bound for a γ chosen at each step as the number of drafts about to be accepted:
    1 / (1 - α) tokens a run for 1 + c α / (1 - α) target passes (§3.5)."""
    check_range("alpha", alpha, 0.0, 1.0)
    check_range("c", c, 0.0, None)
    if alpha == 1:
        return math.inf if c == 0 else 1 / c
    return 1 / (1 - alpha + c * alpha)


def overlap(p: np.ndarray, q: np.ndarray) -> float:
    """β = Σ min(p, q): the chance that a draft from q is accepted (Theorem 3.5)."""
    return float(np.minimum(p, q).sum())


def d_lk(p: np.ndarray, q: np.ndarray) -> float:
    """D_LK(p, q) = Σ |p - (p + q) / 2| = 1 - β: the total variation distance (Lemma 3.3)."""
    return float(np.abs(p - (p + q) / 2).sum())


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """norm(max(0, p - q)), from which a correction is drawn; p itself if nothing is left."""
    rest = np.maximum(p - q, 0.0)
    return rest / rest.sum() if rest.any() else p


def rejection_sampling_rate(p: np.ndarray, q: np.ndarray) -> float:
    """Acceptance of ordinary rejection sampling, 1 / max p/q: at most β (appendix A.2)."""
    return 1 / float(np.max(p[p > 0] / q[p > 0])) if (q[p > 0] > 0).all() else 0.0


def lenient_acceptance(p: np.ndarray, q: np.ndarray, lenience: float) -> float:
    """Acceptance where q is multiplied by l before the comparison (appendix A.5). Not
    exact for l < 1: a token may come up to 1/l times too often."""
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience must be in (0, 1], got {lenience}")
    return float(np.minimum(p / lenience, q).sum())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """Idealized time of one pass, in seconds: the larger of its two parts."""

    memory: float
    arithmetic: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.arithmetic)


class Machine(Protocol):
    """A chip, or anything else of which both are known."""

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""

    @property
    def flops(self) -> float:
        """Operations a second."""


def roofline(parameters: float, positions: int, machine: Machine, *,
             bytes_per_parameter: float = 2.0, utilization: float = 0.5) -> Pass:
    """One pass over ``positions`` tokens: every weight is read once, and takes one
    multiply-add for each position, at ``utilization`` of the peak."""
    check_range("positions", positions, 1, None)
    return Pass(memory=parameters * bytes_per_parameter / machine.bandwidth,
                arithmetic=2 * parameters * positions / (utilization * machine.flops))


def crossover(machine: Machine, *, bytes_per_parameter: float = 2.0,
              utilization: float = 0.5) -> float:
    """Positions from which a pass is bound by arithmetic; the same for every size."""
    return bytes_per_parameter * utilization * machine.flops / (2 * machine.bandwidth)
