"""``tpuspec measure speedup``: plain against speculative decoding, Tables 2 and 4.

One request at a time, as in the paper, every prompt plainly and with each draft length in
turn, so that a machine that slows down for a while slows all of them. Times are those of
the engine loop: what a server would tell.
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpuspec import acceptance_figures, theory
from tpuspec.config import EngineConfig
from tpuspec.estimates import Estimate, bootstrap, clipped, mean_by_blocks
from tpuspec.measurement import CostReport, SpeculationStats
from tpuspec.sampling import SamplingParams
from tpuspec.serving import models, prompts
from tpuspec.serving.batch_engine import BatchEngine
from tpuspec.serving.measure import bounds, progress


class Runs:
    """Requests of one temperature and draft length: [prompts, repeats] each."""

    def __init__(self, prompts: int, repeats: int):
        shape = (prompts, repeats)
        self.tokens = np.zeros(shape)  # all of them
        self.decode_tokens = np.zeros(shape)  # after those of the first step
        self.decode_steps = np.zeros(shape)
        self.decode_seconds = np.zeros(shape)
        self.first_seconds = np.zeros(shape)
        self.seconds = np.zeros(shape)
        self.stats = [SpeculationStats() for _ in range(prompts)]

    def rate(self, chosen: np.ndarray) -> float:
        """Tokens a second of decoding: the median over repeats."""
        tokens, seconds = self.decode_tokens[chosen].sum(0), self.decode_seconds[chosen].sum(0)
        return float(np.median(tokens / seconds)) if (tokens > 0).all() else math.nan

    def whole_rate(self, chosen: np.ndarray) -> float:
        """The same of whole requests, encoder and all."""
        return float(np.median(self.tokens[chosen].sum(0) / self.seconds[chosen].sum(0)))

    @property
    def step_seconds(self) -> float:
        """Of a step after the first, the host's part included: the median over repeats."""
        steps, seconds = self.decode_steps.sum(0), self.decode_seconds.sum(0)
        return float(np.median(seconds / steps)) if (steps > 0).all() else math.nan

    @property
    def total(self) -> SpeculationStats:
        return sum(self.stats, SpeculationStats())

    @property
    def alpha(self) -> Estimate | None:
        """Accepted / examined, with an interval between prompts."""
        judged = [np.repeat([1.0, 0.0], [one.accepted, one.examined - one.accepted])
                  for one in self.stats]
        return clipped(mean_by_blocks(judged, range(len(judged)))) if self.total.examined else None


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The document that ``--json`` prints."""
    for temperature in args.temperatures:
        SamplingParams(temperature=temperature)  # refused before anything is loaded
    sources = prompts.read(args.input, bundled=args.target is None)
    lengths = tuple(sorted({0, *args.draft_lengths}))
    with models.pair(args.target, args.draft) as pair:
        if pair.draft is None:
            raise ValueError("measure speedup needs a draft beside the target")
        config = EngineConfig(
            slots=1, source_buckets=(models.source_bucket(pair, *prompts.lengths(sources)),),
            max_target_length=args.max_new_tokens, draft_lengths=lengths,
            draft_length=lengths[-1])
        served = models.load(pair, config, dtype=args.dtype, mesh_shape=args.mesh)
        names = {"target": pair.target.resolve().name, "draft": pair.draft.resolve().name}
    models.warm_up(served.engine)
    costs = [served.engine.cost]
    engine = BatchEngine(served.engine, served.vocabulary, eos_id=served.info.eos_id)
    engine.start()
    try:
        runs = {temperature: run(engine, sources, lengths, temperature, args.repeats)
                for temperature in args.temperatures}
    finally:
        engine.stop()
    models.warm_up(served.engine)
    cost = together([one for one in (*costs, served.engine.cost) if one is not None])
    return {
        **names, "platform": served.info.platform, "dtype": args.dtype or models.default_dtype(),
        "prompts": len(sources), "repeats": args.repeats, "cost_method": cost.method,
        "rows": [row(temperature, gamma, of[0], of[gamma], cost)
                 for temperature, of in runs.items() for gamma in lengths if gamma]}


def run(engine: BatchEngine, sources: Sequence[prompts.Prompt], lengths: Sequence[int],
        temperature: float, repeats: int) -> dict[int, Runs]:
    """By draft length. Each repeat has its own seeds, and begins with another length; one
    more before them is not counted, as it warms caches."""
    found = {length: Runs(len(sources), repeats) for length in lengths}
    with progress((repeats + 1) * len(sources) * len(lengths), "request",
                  f"temperature {temperature:g}") as bar:
        for repeat in range(-1, repeats):
            turn = [lengths[(i + repeat) % len(lengths)] for i in range(len(lengths))]
            for (number, source), length in itertools.product(enumerate(sources), turn):
                answer, = engine.generate([source], seed=repeat + 1, temperature=temperature,
                                          draft_length=length)
                bar.update(1)
                if repeat < 0:
                    continue
                of, at, times = found[length], (number, repeat), answer.finish.timings
                of.tokens[at] = len(answer.token_ids)
                of.decode_tokens[at] = answer.finish.decode_tokens
                of.decode_steps[at] = answer.stats.steps - 1
                of.decode_seconds[at] = times.decode
                of.first_seconds[at] = times.first_token
                of.seconds[at] = times.total
                of.stats[number] += answer.stats
    return found


def together(costs: Sequence[CostReport]) -> CostReport:
    """Means of what was timed before and after the runs."""
    first = costs[0]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def means(name: str) -> dict[int, float]:
        return {key: mean([getattr(cost, name)[key] for cost in costs])
                for key in getattr(first, name)}

    drafts = [cost.draft_ms for cost in costs if cost.draft_ms is not None]
    return dataclasses.replace(
        first, target_ms=mean([cost.target_ms for cost in costs]),
        draft_ms=mean(drafts) if drafts else None, verify_ms=means("verify_ms"),
        step_ms=means("step_ms"), method=f"{first.method}; before the runs and after them")


def row(temperature: float, gamma: int, plain: Runs, speculative: Runs, cost: CostReport,
        ) -> dict[str, Any]:
    """One line of Tables 2 and 4, with what else was seen."""
    blocks = len(plain.stats)
    alpha, total = speculative.alpha, speculative.total
    widening, c = cost.widening(gamma), cost.c
    rates = {f"{name}_tokens_per_s": bootstrap(of.rate, blocks)
             for name, of in (("plain", plain), ("speculative", speculative))}
    observed = bootstrap(lambda chosen: speculative.rate(chosen) / plain.rate(chosen), blocks)
    whole = bootstrap(lambda chosen: speculative.whole_rate(chosen) / plain.whole_rate(chosen),
                      blocks)
    predicted = by_steps = tokens_expected = step_expected = with_ends = None
    if alpha is not None and c is not None:
        predicted = theory.speedup(alpha.value, gamma, c, widening)
        # Its two parts: each stands beside what the runs did.
        tokens_expected = theory.expected_tokens(alpha.value, gamma)
        step_expected = gamma * c + widening
        with_ends = _tokens_of_a_step(speculative.tokens, alpha.value, gamma) / step_expected
    if total.tokens_per_target_run is not None:
        by_steps = total.tokens_per_target_run * cost.step_ms[0] / cost.step_ms[gamma]
    figures: dict[str, Any] = {"temperature": temperature, "gamma": gamma}
    for name, estimate in (rates | {"observed_speedup": observed}).items():
        figures |= estimate.to_json(name)
    figures |= {
        "predicted_speedup": predicted, "predicted_speedup_with_ends": with_ends,
        "predicted_by_step_times": by_steps,
        **(alpha.to_json("alpha") if alpha is not None else {"alpha": None}),
        "c": c, "widening": widening, "tokens_per_target_run": total.tokens_per_target_run,
        "predicted_tokens_per_target_run": tokens_expected,
        "plain_steps_per_step": speculative.step_seconds / plain.step_seconds,
        "timed_plain_steps_per_step": cost.step_ms[gamma] / cost.step_ms[0],
        "predicted_plain_steps_per_step": step_expected,
        **whole.to_json("whole_request_speedup"),
        "plain_first_token_ms": 1e3 * float(np.median(plain.first_seconds)),
        "speculative_first_token_ms": 1e3 * float(np.median(speculative.first_seconds)),
        "speedup_of_requests": spread(_by_prompt(speculative) / _by_prompt(plain)),
        "slowest_over_fastest_of_identical_requests": {
            "plain": _identical(plain), "speculative": _identical(speculative)}}
    return figures


def _tokens_of_a_step(lengths: np.ndarray, alpha: float, gamma: int) -> float:
    """Eq. (1) for steps after the first of outputs that end: their last steps are cut short,
    which costs a short output much. NaN if none has a second step.

    Args:
      lengths: tokens of each output.
    """
    tokens = steps = 0.0
    for length, count in zip(*np.unique(lengths, return_counts=True), strict=True):
        runs = acceptance_figures.target_runs(np.full(int(length), alpha), gamma)
        steps += count * (runs - 1)
        tokens += count * (length - theory.expected_tokens(alpha, min(gamma, int(length) - 1)))
    return tokens / steps if steps > 1e-9 else math.nan


def spread(values: np.ndarray) -> dict[str, float]:
    """How much single requests gain: from the least to the most."""
    found = np.quantile(values, (0, 0.1, 0.5, 0.9, 1))
    return {name: float(value) for name, value in
            zip(("least", "p10", "median", "p90", "most"), found, strict=True)}


def _by_prompt(runs: Runs) -> np.ndarray:
    """[prompts] tokens a second of whole requests, the median over repeats."""
    return np.asarray(np.median(runs.tokens / runs.seconds, axis=1))


def _identical(runs: Runs) -> float:
    """Of the same source, with another seed each time: the time for a token of the slowest
    over that of the fastest, the median over sources."""
    each = runs.seconds / runs.tokens
    return float(np.median(each.max(1) / each.min(1)))


def text(document: dict[str, Any]) -> str:
    lines = [f"{document['target']} with {document['draft']} on {document['platform']}, "
             f"{document['dtype']}, one request at a time: {document['prompts']} prompts, "
             f"{document['repeats']} repeats, in turns.",
             f"{'temp.':>5} {'gamma':>5} {'alpha':<21} {'c':>6} {'widening':>8} "
             f"{'plain tok/s':>11} {'spec. tok/s':>11} {'expected':>8} {'ends':>8} {'by steps':>8} "
             f"{'observed':<22} "
             f"{'tokens/run':>10}  first token ms"]
    for one in document["rows"]:
        expected, with_ends, by_steps = (one[f"predicted_{name}"] for name in (
            "speedup", "speedup_with_ends", "by_step_times"))
        runs = one["tokens_per_target_run"]
        lines.append(
            f"{one['temperature']:>5g} {one['gamma']:>5} {bounds(one, 'alpha'):<21} "
            f"{'-' if one['c'] is None else format(one['c'], '.3f'):>6} {one['widening']:>8.2f} "
            f"{one['plain_tokens_per_s']:>11.1f} {one['speculative_tokens_per_s']:>11.1f} "
            f"{'-' if expected is None else f'{expected:.2f}x':>8} "
            f"{'-' if with_ends is None else f'{with_ends:.2f}x':>8} "
            f"{'-' if by_steps is None else f'{by_steps:.2f}x':>8} "
            f"{bounds(one, 'observed_speedup', '{:.2f}x'):<22} "
            f"{'-' if runs is None else format(runs, '.2f'):>10}  "
            f"{one['plain_first_token_ms']:.1f} plain, {one['speculative_first_token_ms']:.1f}")
    lines.append("Where expected and observed part: tokens of a run, and what a step costs in "
                 "plain steps:")
    for one in document["rows"]:
        if one["predicted_speedup"] is not None:
            lines.append(
                f"{one['temperature']:>5g} {one['gamma']:>5} "
                f"{one['tokens_per_target_run']:.2f} tokens, by Eq. (1) "
                f"{one['predicted_tokens_per_target_run']:.2f}; "
                f"{one['plain_steps_per_step']:.2f} plain steps in these runs, "
                f"{one['timed_plain_steps_per_step']:.2f} as timed apart, gamma c + widening "
                f"{one['predicted_plain_steps_per_step']:.2f}")
    lines.append("Whole requests, and how much they differ:")
    for one in document["rows"]:
        gains, same = one["speedup_of_requests"], one["slowest_over_fastest_of_identical_requests"]
        lines.append(
            f"{one['temperature']:>5g} {one['gamma']:>5} {one['whole_request_speedup']:.2f}x, "
            f"from {gains['least']:.2f}x to {gains['most']:.2f}x (half of them above "
            f"{gains['median']:.2f}x); the slowest of {document['repeats']} identical requests "
            f"takes {same['speculative']:.2f} times the fastest ({same['plain']:.2f} plain)")
    lines.append("expected: Eq. (5) with the alpha, c and widening beside it; ends: the same for "
                 "outputs as long as these, whose ends cut steps short; by steps: the "
                 "tokens that a run did give, ends cut, and the time of whole steps. Intervals: "
                 "95 %, between prompts.")
    lines.append(f"c and widening: {document['cost_method']}.")
    return "\n".join(lines)
