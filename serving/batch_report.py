"""From a job's records to its output files and its summary."""

import contextlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from tpuspec.measurement import SpeculationStats
from tpuspec.serving.batch_engine import Answer
from tpuspec.serving.batch_input import split_name
from tpuspec.serving.batch_job import Job
from tpuspec.serving.records import Failure, Row, inexact, joined, logprobs
from tpuspec.serving.scores import Scores
from tpuspec.serving.storage import File, draft, write_text

_COUNTS = ("steps", "drafted", "accepted", "examined", "emitted")


def record(number: int, row: Row | None, result: Answer | Failure | None, *,
           ids: bool) -> dict[str, Any]:
    """What a job keeps of one line: nothing that depends on time or neighbours.

    Args:
      number: of the line.
      row: None for a blank line; then there is no result.
      result: of the row.
      ids: whether the output shows token ids.
    """
    if row is None or result is None:
        return {"line": number}
    if isinstance(result, Failure):
        return {"line": number, "error": {"id": row.id, "line": number, "error": {
            "code": result.code, "message": result.message}}}
    samples = (result, *result.others)
    stats = sum((sample.stats for sample in samples), SpeculationStats())
    return {"line": number, "output": joined(row.id, [_sample(one, ids) for one in samples]),
            "counts": [getattr(stats, name) for name in _COUNTS],
            **({} if row.target is None else {"target": row.target})}


def _sample(result: Answer, ids: bool) -> dict[str, Any]:
    request, stats = result.request, result.stats
    return {
        "text": result.text,
        **({"token_ids": result.token_ids} if ids else {}),
        **logprobs(result.logprobs, result.top_logprobs),
        **inexact(not request.sampling.exact),
        "finish_reason": result.finish.ending.value,
        "source_tokens": len(request.source),
        "new_tokens": stats.emitted,
        "seed": request.seed,
        "draft_length": request.draft_length,
        "alpha": stats.alpha,
        "tokens_per_target_run": stats.tokens_per_target_run,
    }


def write(job: Job, output: File, errors: File) -> dict[str, Any]:
    """Makes both files of the job's records; there is no file of errors without any.

    Returns:
      The summary of the job: it does not depend on how often the job was interrupted.
    """
    with draft(job.local_path) as folder:
        summary, has_errors = _write(job.records(), folder, output)
        if has_errors:
            errors.publish(folder / "errors")
        output.publish(folder / "output")
    return {"output": output.url, "errors": errors.url if has_errors else None,
            "seed": job.settings["seed"], **summary}


def _write(records: Iterable[Mapping[str, Any]], folder: pathlib.Path,
           output: File) -> tuple[dict[str, Any], bool]:
    as_text = split_name(output)[1] == "text"
    counts = dict.fromkeys(("ok", "failed", "skipped"), 0)
    reasons: dict[str, int] = {}
    totals = dict.fromkeys(_COUNTS, 0)
    scores: Scores | None = None
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(write_text(folder / "output", compress=output.compressed))
        bad = stack.enter_context(write_text(folder / "errors", compress=False))
        for entry in records:
            if "error" in entry:
                counts["failed"] += 1
                print(_json(entry["error"]), file=bad)
                if as_text:
                    print(file=out)  # line n still answers source n
            elif "output" in entry:
                counts["ok"] += 1
                answer = entry["output"]
                print(" ".join(answer["text"].splitlines()) if as_text else _json(answer),
                      file=out)
                samples = answer.get("samples", [answer])
                for reason in (sample["finish_reason"] for sample in samples):
                    reasons[reason] = reasons.get(reason, 0) + 1
                for name, value in zip(_COUNTS, entry["counts"], strict=True):
                    totals[name] += value
                if "target" in entry:
                    scores = scores or Scores()
                    scores.add(samples[0]["text"], entry["target"])  # what n = 1 gives
            else:
                counts["skipped"] += 1
    stats = SpeculationStats(**totals)
    low, high = stats.alpha_interval() or (None, None)
    return {**counts, "finish_reasons": dict(sorted(reasons.items())),
            "new_tokens": stats.emitted, "target_runs": stats.steps, "alpha": stats.alpha,
            "alpha_low": low, "alpha_high": high,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "tokens_per_target_run": stats.tokens_per_target_run,
            "scores": None if scores is None else scores.result()}, counts["failed"] > 0


def describe(summary: Mapping[str, Any]) -> str:
    """The summary for people."""
    lines = [f"{summary['output']}: {summary['ok']} ok, {summary['failed']} failed, "
             f"{summary['skipped']} skipped (blank)"]
    if summary["errors"]:
        lines.append(f"reasons of the failed ones: {summary['errors']}")
    if summary["alpha"] is not None:
        lines.append(f"alpha {summary['alpha']:.3f}, {summary['tokens_per_target_run']:.2f} "
                     "tokens per target run")
    if summary["scores"] is not None:
        scores = ", ".join(f"{name} {value:.2f}" for name, value in summary["scores"].items()
                           if name != "lines")
        lines.append(f"{summary['scores']['lines']} lines with a target: {scores}")
    if summary["run"]["lines"]:
        run = summary["run"]
        lines.append(f"this run: {run['lines']} lines in {run['seconds']:.1f} s, "
                     f"{run['lines_per_second']:.1f} lines and "
                     f"{run['tokens_per_second']:.0f} tokens a second")
        if run.get("lost_workers"):
            lines.append(f"workers that were lost and replaced: {run['lost_workers']}")
    return "\n".join(lines)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
