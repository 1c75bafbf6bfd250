"""What ``tpuspec top`` shows of a server, counted by hand."""

import asyncio
import json
import signal
import subprocess
import sys

import pytest
from fake_engine import FakeEngine
from harness import on_server, run_cli

from tpuspec import theory
from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving import top


def test_figures_between_two_looks():
    async def body(it):
        before = await it.client.get_model()
        first = top.figures(before, before, 1.0)
        assert first["alpha"] is first["alpha_now"] is first["predicted_speedup"] is None
        assert "now unknown" in top.view(first)
        await it.answer([10, 9])  # [a c] [a c] [a c] [a c] [a c]
        middle = await it.client.get_model()
        seen = top.figures(before, middle, 2.0)
        assert seen["requests"] == {"accepted": 1, "finished": 1, "cancelled": 0, "failed": 0,
                                    "refused": 0}
        assert (seen["tokens_per_s"], seen["target_runs_per_s"], seen["requests_per_s"]) == (
            5.0, 2.5, 0.5)
        assert seen["alpha"] == seen["alpha_now"] == 5 / 10
        assert seen["tokens_per_target_run"] == 2.0
        assert seen["predicted_speedup"] == pytest.approx(theory.speedup(0.5, 3, 0.25, 1.25))
        assert (seen["slots"], seen["active_slots"], seen["queued"]) == (2, 0, 0)
        await it.answer([10, 0])  # [a]
        later = top.figures(middle, await it.client.get_model(), 1.0)
        assert later["tokens_per_s"] == 1.0 and later["alpha_now"] == 1.0
        assert later["alpha"] == 6 / 11
        again = top.figures(await it.client.get_model(), before, 1.0)  # a new server
        assert again["tokens_per_s"] == 0.0

    on_server(body, FakeEngine(accepts=1))


def test_view_is_for_a_person():
    seen = top.figures(pb.GetModelResponse(), pb.GetModelResponse(
        name="count", version="1", platform="tpu", devices=["TPU v4"], limits=pb.Limits(
            slots=4, queue=64, draft_lengths=[0, 3]), load=pb.Load(
                active_slots=3, queued=2, accepted=7), speculation=pb.Speculation(
                    emitted=30, target_runs=10, examined=20, accepted=15, alpha=0.75,
                    tokens_per_target_run=3.0)), 2.0)
    assert top.view(seen).splitlines() == [
        "count on tpu (TPU v4), tpuspec 1",
        "slots       [######################........] 3 of 4, queue 2 of 64",
        "requests    7 accepted, 0 finished, 0 cancelled, 0 failed, 0 refused",
        "throughput  15.0 tokens/s, 5.0 target runs/s, 0.00 requests/s, in the last 2.0 s",
        "alpha       0.75, now 0.75; 3.00 tokens per target run",
        "c           unknown; draft length chosen for every step; predicted speed-up unknown"]


def test_once_as_json_and_what_is_refused():
    async def body(it):
        stream = it.client.generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[10])))
        await anext(stream)

        async def run(*flags: str):
            return await asyncio.to_thread(run_cli, "top", "--server", it.address, *flags)

        result = await run("--once", "--json", "--interval", "1")
        assert result.returncode == 0, result.stderr
        seen = json.loads(result.stdout)
        assert seen["active_slots"] == 1 and seen["tokens_per_s"] > 0 and seen["c"] == 0.25
        refused = await run("--json")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert refused.stderr == "tpuspec top: json needs once: it is one document\n"
        await stream.aclose()

    on_server(body, FakeEngine(step_seconds=0.4))


def test_live_view_goes_on_until_it_is_interrupted():
    async def body(it):
        live = await asyncio.create_subprocess_exec(
            # Who starts the tests in the background may have SIGINT ignored, and so children.
            sys.executable, "-c", "import signal; from tpuspec.serving.cli import main; "
            "signal.signal(signal.SIGINT, signal.default_int_handler); main()", "top",
            "--server", it.address, "--interval", "0.2", stdout=subprocess.PIPE,
            stderr=subprocess.PIPE)
        lines = [(await live.stdout.readline()).decode() for _ in range(13)]
        assert [line.startswith("count on ") for line in lines] == ([True] + 5 * [False]) * 2 + [
            True]
        assert "\x1b" not in "".join(lines)  # not a terminal
        live.send_signal(signal.SIGINT)
        _, said = await live.communicate()
        assert (live.returncode, said) == (0, b"")

    on_server(body)
