"""α and c, measured: always named by their definition."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping

import jax

from tpuspec.decode_state import StepOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationStats:
    """Counters of speculative steps; ``+`` adds two.

    Attributes:
      steps: target runs.
      drafted: drafts offered to verify passes.
      accepted: drafts accepted and emitted.
      examined: accepted, plus one per step that ended in a rejection.
      emitted: new tokens.
      overlap: Σ min(p, q) summed over the examined positions.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    examined: int = 0
    emitted: int = 0
    overlap: float = 0.0

    @classmethod
    def of_slot(cls, output: StepOutput, slot: int) -> "SpeculationStats":
        """Counters of one step of one slot; all zero if the slot was inert."""
        emitted = int(output.num_tokens[slot])
        return cls(steps=int(emitted > 0), drafted=int(output.drafted[slot]),
                   accepted=int(output.accepted[slot]), examined=int(output.examined[slot]),
                   emitted=emitted, overlap=float(output.overlap[slot]))

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        return SpeculationStats(**{f.name: getattr(self, f.name) + getattr(other, f.name)
                                   for f in dataclasses.fields(self)})

    @property
    def alpha(self) -> float | None:
        """Acceptance rate: accepted / examined drafts."""
        return self.accepted / self.examined if self.examined else None

    @property
    def alpha_overlap(self) -> float | None:
        """Mean Σ min(p, q) over examined positions: the same mean, less variance."""
        return self.overlap / self.examined if self.examined else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / all drafted, as other servers report it. Not α."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_target_run(self) -> float | None:
        return self.emitted / self.steps if self.steps else None

    def alpha_interval(self, z: float = 1.96) -> tuple[float, float] | None:
        """Wilson interval of ``alpha``, as if examined drafts were independent."""
        n, a = self.examined, self.alpha
        if a is None:
            return None
        middle = (a + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(a * (1 - a) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostReport:
    """Times of the compiled programs, in milliseconds.

    Attributes:
      target_ms: one target pass of plain decoding, and the choice of a token.
      draft_ms: one draft pass of width 1, and the choice of a token; None without draft.
      verify_ms: one target pass of a step of γ drafts, by γ: γ + 1 positions, or the
        one width of all passes in bfloat16.
      step_ms: the whole fused step, by γ; of plain decoding alone, without draft.
      method: how these were measured.
      look_up_ms: the whole step where all drafts are looked up, by γ.
    """

    target_ms: float
    draft_ms: float | None
    verify_ms: Mapping[int, float]
    step_ms: Mapping[int, float]
    method: str
    look_up_ms: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def c(self) -> float | None:
        """Cost coefficient: draft pass over target pass of width 1."""
        return None if self.draft_ms is None else self.draft_ms / self.target_ms

    def widening(self, draft_length: int) -> float:
        """T(γ+1) / T(1) of the target; the paper takes it as 1."""
        return self.verify_ms[draft_length] / self.target_ms


def time_interleaved[Name](runs: Mapping[Name, Callable[[], object]], repeats: int,
                           ) -> dict[Name, float]:
    """Median milliseconds of each run, taken in turns so that drift hits all alike."""
    times: dict[Name, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            if turn:  # the first turn warms caches
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in times.items()}
