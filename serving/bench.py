"""``tpuspec bench``: open-loop load on a server, and what speculation gains under it.

Open loop: requests leave at their times whether or not earlier ones were answered, as
those of many users do, so that a slow server shows as waiting and not as fewer requests.
At every rate the same requests are sent plain (draft length 0) and as the server drafts,
in turns, so that a machine that slows down for a while slows both.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import inspect
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import numpy as np
import tqdm

from tpuspec.measurement import SpeculationStats
from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving import bench_plot
from tpuspec.serving.client import Client, make_request
from tpuspec.serving.generate import client_security
from tpuspec.serving.records import Failure, read_rows

_ROUNDS = 2  # of plain and speculative phases, in turns
_PERCENTILES = (50, 90, 99)
_PARAMETERS: dict[str, Any] = {  # that a line may name
    name: parameter.default
    for name, parameter in inspect.signature(make_request).parameters.items()
    if name not in ("source", "request_id")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One request.

    Attributes:
      code: name of its gRPC status.
      first: seconds from the time that it was to leave at to its first tokens.
      total: the same to its end.
      gaps: seconds for each token after the first message: a message's wait is shared by
        the tokens that came with it.
      tokens: that came.
      stats: the server's counters of it.
    """

    code: str
    first: float = 0.0
    total: float = 0.0
    gaps: tuple[float, ...] = ()
    tokens: int = 0
    stats: SpeculationStats = SpeculationStats()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What a request must keep to for goodput, in seconds; None is anything."""

    first: float | None
    token: float | None

    def holds(self, sample: Sample) -> bool:
        slow = self.first is not None and sample.first > self.first
        crawls = self.token is not None and bool(sample.gaps) and (
            float(np.mean(sample.gaps)) > self.token)
        return sample.code == "OK" and not slow and not crawls


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if a request failed for another reason than a full queue."""
    plot = None if args.plot is None else pathlib.Path(args.plot)
    if plot is not None and not plot.parent.is_dir():  # said before minutes are spent
        raise ValueError(f"plot must lie in a directory that there is, got {plot}")
    document = asyncio.run(measure(args))
    print(json.dumps(document, indent=1) if args.json else _table(document))
    if plot is not None:
        plot.write_text(bench_plot.page(document), encoding="utf-8")
    failed = {code for row in document["rows"] for code in row["statuses"]}
    return int(bool(failed - {"OK", "RESOURCE_EXHAUSTED"}))


def _requests(path: str) -> list[pb.GenerateRequest]:
    with open(path, "rb") as lines:
        rows = list(read_rows(lines, _PARAMETERS))
    for row in rows:
        if isinstance(row.request, Failure):
            raise ValueError(f"{path}: {row.request.message}")
    if not rows:
        raise ValueError(f"{path} must have at least 1 request, got 0")
    return [row.request for row in rows if isinstance(row.request, pb.GenerateRequest)]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The document that ``--json`` prints."""
    requests = _requests(args.input)
    objective = Objective(
        first=None if args.first_token_ms is None else 1e-3 * args.first_token_ms,
        token=None if args.token_ms is None else 1e-3 * args.token_ms)
    rows: list[dict[str, Any]] = []
    async with Client(args.server, client_security(args)) as client:
        try:
            model = await client.get_model()
        except grpc.aio.AioRpcError as error:
            raise ValueError(f"no answer from {args.server}: {error.code().name}: "
                             f"{error.details()}") from None
        modes = ("plain", "speculative") if len(model.limits.draft_lengths) > 1 else ("plain",)
        with tqdm.tqdm(total=len(args.rates) * _ROUNDS * len(modes), unit="phase",
                       file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
            for rate in args.rates:
                samples: dict[str, list[Sample]] = {mode: [] for mode in modes}
                seconds = dict.fromkeys(modes, 0.0)
                for turn in range(_ROUNDS):
                    times = arrivals(rate, args.seconds / _ROUNDS, args.seed + turn)
                    for mode in modes:
                        bar.set_description_str(f"{rate:g} requests/s, {mode}")
                        began = time.monotonic()
                        samples[mode] += await _phase(client, requests, times, mode == "plain")
                        seconds[mode] += time.monotonic() - began
                        bar.update()
                rows += [{"rate": rate, "mode": mode} | summary(
                    samples[mode], seconds[mode], objective) for mode in modes]
    return {"server": args.server, "model": model.name, "platform": model.platform,
            "slots": model.limits.slots, "c": model.cost.c if model.cost.HasField("c") else None,
            "rows": rows, "speedup": speedups(rows)}


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of a Poisson process, at least one."""
    count = max(1, round(rate * seconds))
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return [float(t) for t in np.cumsum(gaps) - gaps[0]]


async def _phase(client: Client, requests: Sequence[pb.GenerateRequest], times: Sequence[float],
                 plain: bool) -> list[Sample]:
    began = time.monotonic()
    tasks = []
    try:
        for number, offset in enumerate(times):
            await asyncio.sleep(max(0.0, began + offset - time.monotonic()))
            request = requests[number % len(requests)]
            if plain:
                request = pb.GenerateRequest()
                request.CopyFrom(requests[number % len(requests)])
                request.draft_length = 0
            tasks.append(asyncio.ensure_future(_send(client, request, began + offset)))
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _send(client: Client, request: pb.GenerateRequest, due: float) -> Sample:
    first = last = 0.0
    gaps: list[float] = []
    tokens = 0
    stats: dict[int, SpeculationStats] = {}  # by sample
    try:
        async with contextlib.aclosing(client.generate(request)) as responses:
            async for response in responses:
                now = time.monotonic()
                if new := len(response.tokens):
                    if tokens:
                        gaps += [(now - last) / new] * new
                    else:
                        first = now - due
                    last, tokens = now, tokens + new
                s = response.speculation
                stats[response.index] = SpeculationStats(
                    steps=s.target_runs, drafted=s.drafted, accepted=s.accepted,
                    examined=s.examined, emitted=s.emitted)
    except grpc.aio.AioRpcError as error:
        return Sample(code=error.code().name, tokens=tokens)
    return Sample(code="OK", first=first, total=time.monotonic() - due, gaps=tuple(gaps),
                  tokens=tokens, stats=sum(stats.values(), SpeculationStats()))


def summary(samples: Sequence[Sample], seconds: float, objective: Objective) -> dict[str, Any]:
    """Figures of one rate and mode; times in milliseconds, by percentile."""
    good = [sample for sample in samples if sample.code == "OK"]
    stats = sum((sample.stats for sample in good), SpeculationStats())

    def percentiles(values: Sequence[float]) -> dict[str, float] | None:
        if not values:
            return None
        found = np.percentile(values, _PERCENTILES)
        return {f"p{p}": 1e3 * float(value)
                for p, value in zip(_PERCENTILES, found, strict=True)}

    return {
        "requests": len(samples),
        "statuses": dict(collections.Counter(sample.code for sample in samples)),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "tokens_per_s": sum(sample.tokens for sample in samples) / seconds,
        "goodput_per_s": sum(map(objective.holds, samples)) / seconds,
        "first_token_ms": percentiles([sample.first for sample in good]),
        "token_ms": percentiles([gap for sample in good for gap in sample.gaps]),
        "request_ms": percentiles([sample.total for sample in good]),
        "alpha": stats.alpha, "draft_acceptance_rate": stats.draft_acceptance_rate,
        "tokens_per_target_run": stats.tokens_per_target_run,
    }


def speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Plain over speculative, by rate: of the median time of a request (what its user waits
    for) and of the tokens a second (what the server gets done)."""
    by_rate: dict[float, dict[str, dict[str, Any]]] = collections.defaultdict(dict)
    for row in rows:
        by_rate[row["rate"]][row["mode"]] = row
    found = []
    for rate, modes in by_rate.items():
        if len(modes) < 2 or any(row["request_ms"] is None for row in modes.values()):
            continue
        plain, speculative = modes["plain"], modes["speculative"]
        found.append({
            "rate": rate,
            "request": plain["request_ms"]["p50"] / speculative["request_ms"]["p50"],
            "throughput": speculative["tokens_per_s"] / plain["tokens_per_s"]})
    return found


def _table(document: dict[str, Any]) -> str:
    lines = [f"{document['model']} on {document['platform']}, {document['slots']} slots, c "
             + ("unknown" if document["c"] is None else f"{document['c']:.3f}"),
             f"{'rate':>6} {'mode':<12} {'requests':>8} {'failed':>6} {'tokens/s':>9} "
             f"{'goodput/s':>9} {'first ms p50/p99':>18} {'token ms p50/p99':>18} {'alpha':>6}"]
    for row in document["rows"]:
        pairs = ["-" if row[name] is None else f"{row[name]['p50']:.1f} / {row[name]['p99']:.1f}"
                 for name in ("first_token_ms", "token_ms")]
        lines.append(
            f"{row['rate']:>6g} {row['mode']:<12} {row['requests']:>8} "
            f"{row['requests'] - row['statuses'].get('OK', 0):>6} {row['tokens_per_s']:>9.1f} "
            f"{row['goodput_per_s']:>9.2f} {pairs[0]:>18} {pairs[1]:>18} "
            + ("     -" if row["alpha"] is None else f"{row['alpha']:>6.2f}"))
    for gain in document["speedup"]:
        lines.append(f"at {gain['rate']:g} requests/s speculation makes the median request "
                     f"{gain['request']:.2f}x as fast and gives {gain['throughput']:.2f}x the "
                     "tokens a second")
    return "\n".join(lines)
