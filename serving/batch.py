"""``tpuspec batch``: a file of sources to a file of outputs, however often it is interrupted."""

import argparse
import contextlib
import itertools
import json
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import tqdm

from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving import batch_input, batch_ray, batch_report, local, models, scores
from tpuspec.serving.batch_engine import Answer, BatchEngine
from tpuspec.serving.batch_input import Survey
from tpuspec.serving.batch_job import Job, checkpoint_identity
from tpuspec.serving.batch_ray import Cluster, RayEngine
from tpuspec.serving.batch_worker import Setup
from tpuspec.serving.client import OPTIONS, make_request
from tpuspec.serving.errors import RequestError
from tpuspec.serving.records import Failure, Row
from tpuspec.serving.storage import File

_OWN = ("seed", "max_new_tokens", "draft_length")  # a line may name them; else the engine's
# What a later run of the job may not change. Slots and mesh it may.
_SETTINGS = (*OPTIONS, "seed", "max_new_tokens", "draft_length", "source_buckets", "ids",
             "sampler")


class _BadLine(Exception):
    """The first bad line of a strict job."""


def run(args: argparse.Namespace) -> int:
    summary = _run(args)
    return 1 if summary is None else _report(summary, as_json=args.json)


def _run(args: argparse.Namespace) -> dict[str, Any] | None:
    """The summary; None of a job that has not ended."""
    if args.workers is not None and args.ray is None:
        raise ValueError(f"workers must be with ray, got {args.workers} without")
    source, output = File(args.input), File(args.output)
    stem, _ = batch_input.split_name(output)
    errors = output.sibling(f"{stem}.errors.jsonl")
    survey = batch_input.survey(source)
    if survey.first_target is not None:
        scores.check_installed(survey.first_target)
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(models.pair(args.target, args.draft))
        cluster = None if args.ray is None else stack.enter_context(
            batch_ray.connect(args.ray, args.mesh))
        dtype = args.dtype or (cluster.chips.dtype if cluster else models.default_dtype())
        identity = _identity(source, survey, pair, dtype)
        job = Job.open(output, errors, identity=identity, settings=_settings(args),
                       fresh={"seed": secrets.randbits(53)})
        stack.callback(job.close)
        rates = _rates(0, 0, 0.0)
        if job.summary is not None:
            print(f"{output.url} is complete already", file=sys.stderr)
            return job.summary | {"run": rates}
        try:
            if job.done < survey.lines:
                with _engine(args, pair, identity["model"], cluster) as engine:
                    rates = _answer_all(args, engine, source, survey, job)
            summary = batch_report.write(job, output, errors)
            job.complete(summary)
            return summary | {"run": rates}
        except (RequestError, _BadLine, KeyboardInterrupt) as error:
            print(f"tpuspec batch: {str(error) or 'interrupted'}\n"
                  f"{job.done} of {survey.lines} lines are done; the same command goes on from "
                  "there", file=sys.stderr)
            return None


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """As JSON holds them."""
    values: dict[str, Any] = json.loads(json.dumps({n: getattr(args, n) for n in _SETTINGS}))
    return values


def _identity(source: File, survey: Survey, pair: models.Pair, dtype: str,
              ) -> dict[str, dict[str, Any]]:
    draft = None if pair.draft is None else checkpoint_identity(pair.draft)
    return {"input": {"kind": batch_input.split_name(source)[1], "lines": survey.lines,
                      "sha256": survey.sha256},
            "model": {"target": checkpoint_identity(pair.target), "draft": draft,
                      "dtype": dtype}}


def _engine(args: argparse.Namespace, pair: models.Pair, model: dict[str, Any],
            cluster: Cluster | None) -> contextlib.AbstractContextManager[BatchEngine | RayEngine]:
    """In this process, or on a cluster."""
    options = {name: getattr(args, name) for name in (
        "slots", "source_buckets", "max_new_tokens", "draft_length", "mesh", "sampler")}
    options["dtype"] = model["dtype"]
    if cluster is None:
        return local.start(pair, **options)
    named = args.target is not None  # where the bundled pair lies, each host knows
    return cluster.start(Setup(
        target=str(pair.target) if named else None,
        draft=str(pair.draft) if named and pair.draft is not None else None,
        identity=model, platform=args.platform, options=options), args.workers)


def _answer_all(args: argparse.Namespace, engine: BatchEngine | RayEngine, source: File,
                survey: Survey, job: Job) -> dict[str, Any]:
    """Every line that has no record yet gets one; returns the rates of this run."""
    defaults: dict[str, Any] = {name: job.settings[name] for name in OPTIONS}
    with contextlib.ExitStack() as stack:
        engine.check(make_request([1], **defaults))  # no line can do with bad flags
        rows = stack.enter_context(contextlib.closing(batch_input.read(
            source, defaults | dict.fromkeys(_OWN), job.settings["seed"])))
        bar = stack.enter_context(tqdm.tqdm(
            total=survey.lines, initial=job.done, unit="line", file=sys.stderr,
            dynamic_ncols=True, disable=not sys.stderr.isatty()))
        stack.callback(job.save)
        before, failed, tokens, began = job.done, 0, 0, time.monotonic()
        most_samples = 1 if batch_input.split_name(File(args.output))[1] == "text" else None
        for number, row, result in _answers(engine, rows, job, most_samples):
            if isinstance(result, Failure):
                if args.strict:
                    raise _BadLine(f"line {number}: "
                                   + result.message.removeprefix(f"line {number}: "))
                failed += 1
            elif result is not None:
                tokens += result.stats.emitted
            job.append(batch_report.record(number, row, result, ids=args.ids))
            bar.set_postfix(failed=failed, refresh=False)
            bar.update()
        rates = _rates(job.done - before, tokens, time.monotonic() - began)
        return rates | ({"lost_workers": engine.lost} if isinstance(engine, RayEngine) else {})


def _answers(engine: BatchEngine | RayEngine, rows: Iterable[Row | None], job: Job,
             most_samples: int | None) -> Iterator[tuple[int, Row | None, Answer | Failure | None]]:
    """Lines that have no record with their results, as these come; blank lines have none.

    Args:
      most_samples: of a line, that the output has a place for; None is any number.
    """
    waiting: dict[int, tuple[int, Row]] = {}
    blank: list[int] = []

    def requests() -> Iterator[pb.GenerateRequest | Failure]:
        places = itertools.count()
        for number, row in enumerate(rows, 1):
            if job.has(number):
                continue
            if row is None:
                blank.append(number)
            else:
                waiting[next(places)] = number, row
                request = row.request
                if (most_samples is not None and isinstance(request, pb.GenerateRequest)
                        and request.n > most_samples):
                    yield Failure("INVALID_ARGUMENT", f"line {number}: n must be {most_samples} "
                                  f"with an output of text, got {request.n}")
                else:
                    yield request

    for place, result in engine.completed(requests()):
        yield *waiting.pop(place), result
        while blank:
            yield blank.pop(), None, None
    yield from ((number, None, None) for number in blank)


def _rates(lines: int, tokens: int, seconds: float) -> dict[str, Any]:
    return {"lines": lines, "seconds": seconds,
            "lines_per_second": lines / seconds if seconds else None,
            "tokens_per_second": tokens / seconds if seconds else None}


def _report(summary: dict[str, Any], *, as_json: bool) -> int:
    print(batch_report.describe(summary), file=sys.stderr)
    if as_json:
        print(json.dumps(summary, ensure_ascii=False, indent=1))
    return int(summary["failed"] > 0)
