"""The demo's numbers, and why they are what they are."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from tpuspec import theory
from tpuspec.measurement import SpeculationStats
from tpuspec.protos import generation_pb2 as pb


@dataclasses.dataclass(frozen=True)
class Run:
    """One answered request.

    Attributes:
      responses: all messages, the last with ``finish``.
      seconds: from request to last message, by the client's clock.
    """

    responses: Sequence[pb.GenerateResponse]
    seconds: float

    @property
    def text(self) -> str:
        return "".join(response.text for response in self.responses)

    @property
    def tokens(self) -> list[dict[str, Any]]:
        """Each with its id, the text that it completed and where it comes from."""
        return [{"id": token.id, "text": token.text,
                 "origin": pb.Origin.Name(token.origin).removeprefix("ORIGIN_").lower()}
                for response in self.responses for token in response.tokens]

    @property
    def speculation(self) -> pb.Speculation:
        return self.responses[-1].speculation

    @property
    def finish(self) -> pb.Finish:
        return self.responses[-1].finish


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Plain and speculative runs of the same sources, in turns."""

    sources: Sequence[str]
    shown: Sequence[Run]
    plain: Sequence[Run]
    speculative: Sequence[Run]
    cost: pb.Cost
    draft_length: int
    temperature: float

    @functools.cached_property
    def stats(self) -> SpeculationStats:
        """Counters of all speculative runs together."""
        return sum((_stats(run.speculation) for run in self.speculative), SpeculationStats())

    @property
    def c(self) -> float | None:
        return self.cost.c if self.cost.HasField("c") else None

    @property
    def widening(self) -> float | None:
        return self.cost.verify_widening.get(self.draft_length)

    @property
    def predicted_speedup(self) -> float | None:
        """Eq. (5) with the α, c and widening above."""
        if self.stats.alpha is None or self.c is None or self.widening is None:
            return None
        return theory.speedup(self.stats.alpha, self.draft_length, self.c, self.widening)

    @property
    def observed_speedup(self) -> float | None:
        """Seconds a token after the first step, plain over speculative, by the server's clock."""
        plain, speculative = _seconds_a_token(self.plain), _seconds_a_token(self.speculative)
        return None if plain is None or not speculative else plain / speculative

    @property
    def whole_request_speedup(self) -> float | None:
        """The same for whole requests by the client's clock: encoder, gRPC and all."""
        return _ratio(sum(run.seconds for run in self.plain),
                      sum(run.seconds for run in self.speculative))

    @property
    def same_texts(self) -> int:
        """Sources whose plain and speculative texts are equal."""
        pairs = zip(self.plain, self.speculative, strict=True)
        return sum(a.text == b.text for a, b in list(pairs)[:len(self.sources)])

    def to_json(self) -> dict[str, Any]:
        return {
            "samples": [{"source": source, "text": run.text, "tokens": run.tokens}
                        for source, run in zip(self.sources, self.shown, strict=True)],
            "alpha": self.stats.alpha,
            "draft_acceptance_rate": self.stats.draft_acceptance_rate,
            "c": self.c, "gamma": self.draft_length,
            "tokens_per_target_run": self.stats.tokens_per_target_run,
            "predicted_speedup": self.predicted_speedup,
            "observed_speedup": self.observed_speedup}

    def why_not_faster(self) -> str | None:
        """One sentence if speculation did not pay on this machine."""
        observed, predicted = self.observed_speedup, self.predicted_speedup
        if observed is None or observed > 1 or self.stats.alpha is None:
            return None
        said = f"Speculation did not pay here ({observed:.2f}x): "
        if predicted is None:
            return said + "the cost of the draft is not known."
        if predicted <= 1:
            return said + (
                f"with alpha = {self.stats.alpha:.2f}, c = {self.c:.2f} and a verify pass of "
                f"{self.widening:.2f} plain passes, Eq. (5) expects {predicted:.2f}x.")
        return said + (
            f"Eq. (5) expects {predicted:.2f}x of the two models alone; the rest of a step, or "
            "other work on this machine, takes more than that gain.")


def print_table(report: Report) -> None:
    """The table that ends the demo."""
    stats = report.stats
    rows = (
        ("alpha (accepted / examined)", stats.alpha, "{:.3f}"),
        ("alpha (mean of sum min(p, q))", stats.alpha_overlap, "{:.3f}"),
        ("draft acceptance rate (accepted / drafted)", stats.draft_acceptance_rate, "{:.3f}"),
        ("c (draft pass / target pass)", report.c, "{:.3f}"),
        ("verify widening T(gamma+1) / T(1)", report.widening, "{:.3f}"),
        ("gamma (drafts per target run)", report.draft_length, "{}"),
        ("tokens per target run", stats.tokens_per_target_run, "{:.2f}"),
        ("predicted speed-up, Eq. (5)", report.predicted_speedup, "{:.2f}x"),
        ("observed speed-up, decoding", report.observed_speedup, "{:.2f}x"),
        ("observed speed-up, whole requests", report.whole_request_speedup, "{:.2f}x"),
    )
    runs = len(report.plain)
    print(f"\nPlain (gamma = 0) and speculative decoding, {runs} runs each, in turns:")
    for name, value, form in rows:
        print(f"  {name:<44}{'unknown' if value is None else form.format(value):>8}")
    if (interval := stats.alpha_interval()) is not None:
        print(f"alpha lies within {interval[0]:.3f} and {interval[1]:.3f} (95 %).")
    if report.temperature == 0:
        print(f"Plain decoding gave the same text for {report.same_texts} of "
              f"{len(report.sources)} sources.")
    print(f"c and widening: {report.cost.method}.")
    if reason := report.why_not_faster():
        print(reason)


def _stats(counts: pb.Speculation) -> SpeculationStats:
    return SpeculationStats(
        steps=counts.target_runs, drafted=counts.drafted, accepted=counts.accepted,
        examined=counts.examined, emitted=counts.emitted,
        overlap=counts.alpha_overlap * counts.examined)


def _ratio(over: float, under: float) -> float | None:
    return over / under if under else None


def _seconds_a_token(runs: Sequence[Run]) -> float | None:
    return _ratio(sum(run.finish.timings.decode_seconds for run in runs),
                  sum(run.finish.decode_tokens for run in runs))
