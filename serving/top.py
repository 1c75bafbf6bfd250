"""``tpuspec top``: slots, α, c and throughput of a running server, live."""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from typing import Any

import grpc.aio

from tpuspec import theory
from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving.client import Client
from tpuspec.serving.generate import client_security

_CLEAR = "\x1b[H\x1b[J"
_BAR = 30  # characters


def run(args: argparse.Namespace) -> int:
    if args.json and not args.once:
        raise ValueError("json needs once: it is one document")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(args))
    return 0


async def _watch(args: argparse.Namespace) -> None:
    """Raises ValueError if the server does not answer; later, when live, it may come back."""
    async with Client(args.server, client_security(args)) as client:
        before, began = await _model(client, args.server), time.monotonic()
        while True:
            await asyncio.sleep(args.interval)
            try:
                now, ended = await _model(client, args.server), time.monotonic()
            except ValueError as error:
                if args.once:
                    raise
                _show(str(error))
                continue
            seen = figures(before, now, ended - began)
            if args.once:
                print(json.dumps(seen) if args.json else view(seen))
                return
            _show(view(seen))
            before, began = now, ended


def _show(text: str) -> None:
    print((_CLEAR if sys.stdout.isatty() else "") + text, flush=True)


async def _model(client: Client, server: str) -> pb.GetModelResponse:
    try:
        return await client.get_model()
    except grpc.aio.AioRpcError as error:
        raise ValueError(f"no answer from {server}: {error.code().name}: "
                         f"{error.details()}") from None


def figures(before: pb.GetModelResponse, now: pb.GetModelResponse,
            seconds: float) -> dict[str, Any]:
    """What is shown: totals of ``now``, and rates between the two. None is not known.

    A server that was started anew in between counts from 0, as if it were the same.
    """
    limits, load, total = now.limits, now.load, now.speculation
    was = before.speculation if before.load.accepted <= load.accepted else pb.Speculation()
    finished = before.load.finished if before.load.accepted <= load.accepted else 0
    examined, accepted = total.examined - was.examined, total.accepted - was.accepted

    def optional(message: pb.Speculation | pb.Limits | pb.Cost, name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    alpha, c = optional(total, "alpha"), optional(now.cost, "c")
    draft_length = optional(limits, "default_draft_length")
    return {
        "model": now.name, "version": now.version, "platform": now.platform,
        "devices": list(now.devices),
        "slots": limits.slots, "active_slots": load.active_slots,
        "queue_limit": limits.queue, "queued": load.queued,
        "requests": {name: getattr(load, name) for name in (
            "accepted", "finished", "cancelled", "failed", "refused")},
        "seconds": seconds,
        "tokens_per_s": (total.emitted - was.emitted) / seconds,
        "target_runs_per_s": (total.target_runs - was.target_runs) / seconds,
        "requests_per_s": (load.finished - finished) / seconds,
        "alpha": alpha, "alpha_low": optional(total, "alpha_low"),
        "alpha_high": optional(total, "alpha_high"),
        "alpha_now": accepted / examined if examined else None,
        "draft_acceptance_rate": optional(total, "draft_acceptance_rate"),
        "tokens_per_target_run": optional(total, "tokens_per_target_run"),
        "c": c, "draft_length": draft_length,
        "predicted_speedup": _predicted(alpha, c, draft_length, now),
        "compilations": load.compilations,
    }


def _predicted(alpha: float | None, c: float | None, draft_length: int | None,
               model: pb.GetModelResponse) -> float | None:
    """Eq. (5), where all of it is known."""
    if alpha is None or c is None or not draft_length:
        return None
    rung = min(length for length in model.limits.draft_lengths if length >= draft_length)
    return theory.speedup(alpha, draft_length, c, model.cost.verify_widening[rung])


def view(seen: dict[str, Any]) -> str:
    def number(name: str, digits: int = 2) -> str:
        value = seen[name]
        return "unknown" if value is None else f"{value:.{digits}f}"

    full = round(_BAR * seen["active_slots"] / seen["slots"])
    draft_length = "chosen for every step" if seen["draft_length"] is None else (
        f"{seen['draft_length']}")
    interval = "" if seen["alpha_low"] is None else (
        f" ({number('alpha_low')} to {number('alpha_high')})")
    requests = ", ".join(f"{count} {name}" for name, count in seen["requests"].items())
    return "\n".join((
        f"{seen['model']} on {seen['platform']} ({', '.join(seen['devices'])}), "
        f"tpuspec {seen['version']}",
        f"slots       [{'#' * full}{'.' * (_BAR - full)}] {seen['active_slots']} of "
        f"{seen['slots']}, queue {seen['queued']} of {seen['queue_limit']}",
        f"requests    {requests}",
        f"throughput  {number('tokens_per_s', 1)} tokens/s, "
        f"{number('target_runs_per_s', 1)} target runs/s, "
        f"{number('requests_per_s')} requests/s, in the last {seen['seconds']:.1f} s",
        f"alpha       {number('alpha')}{interval}, now {number('alpha_now')}; "
        f"{number('tokens_per_target_run')} tokens per target run",
        f"c           {number('c', 3)}; draft length {draft_length}; predicted speed-up "
        f"{number('predicted_speedup')}"))
