"""Load on a server: open loop, figures counted by hand, statuses that are not hidden."""

import asyncio
import json

import numpy as np
import pytest
from fake_engine import CONFIG, FakeEngine
from harness import on_server, run_cli

from tpuspec.measurement import SpeculationStats
from tpuspec.serving import bench
from tpuspec.serving.bench import Objective, Sample
from tpuspec.serving.cli import make_parser


def prompts(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def document(it, source, *flags):
    args = make_parser().parse_args(
        ["bench", "--server", it.address, "--input", source, "--json", *flags])
    return await bench.measure(args)


def test_summary_by_hand():
    stats = SpeculationStats(steps=2, drafted=6, accepted=3, examined=5, emitted=5)
    samples = [Sample(code="OK", first=0.1, total=0.5, gaps=(0.1, 0.1, 0.1, 0.1), tokens=5,
                      stats=stats),
               Sample(code="OK", first=0.3, total=0.7, gaps=(0.2, 0.2), tokens=3),
               Sample(code="RESOURCE_EXHAUSTED"), Sample(code="UNAVAILABLE", tokens=2)]
    found = bench.summary(samples, 2.0, Objective(first=0.2, token=0.15))
    assert found["statuses"] == {"OK": 2, "RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}
    assert (found["requests"], found["requests_per_s"], found["tokens_per_s"]) == (4, 1.0, 5.0)
    assert found["goodput_per_s"] == 0.5  # one of them keeps to both
    assert found["first_token_ms"]["p50"] == pytest.approx(200)
    assert found["token_ms"]["p50"] == pytest.approx(100)  # of tokens, not of messages
    assert found["request_ms"]["p99"] == pytest.approx(698)
    assert (found["alpha"], found["tokens_per_target_run"]) == (0.6, 2.5)
    nothing = bench.summary([Sample(code="UNAVAILABLE")], 1.0, Objective(first=None, token=None))
    assert nothing["token_ms"] is None and nothing["alpha"] is None
    assert nothing["goodput_per_s"] == 0


def test_arrivals_are_a_poisson_process_of_the_rate():
    times = bench.arrivals(50, 100, seed=1)
    assert times[0] == 0 and len(times) == 5000 and times == sorted(times)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.02, rel=0.05)
    assert gaps.std() == pytest.approx(0.02, rel=0.1)
    assert bench.arrivals(50, 100, seed=1) == times != bench.arrivals(50, 100, seed=2)
    assert bench.arrivals(0.001, 1, seed=0) == [0.0]


def test_plain_and_speculative_requests_in_turns(tmp_path):
    source = prompts(tmp_path / "in.jsonl", {"token_ids": [10, 12]}, {"token_ids": [10, 3]})

    async def body(it):
        found = await document(it, source, "--rates", "20,40", "--seconds", "0.5")
        assert (found["model"], found["slots"], found["c"]) == ("count", 2, 0.25)
        assert [(row["rate"], row["mode"]) for row in found["rows"]] == [
            (20.0, "plain"), (20.0, "speculative"), (40.0, "plain"), (40.0, "speculative")]
        for row in found["rows"]:
            assert row["statuses"] == {"OK": row["requests"]}
            assert row["requests"] == 0.5 * row["rate"]
            assert (row["alpha"] is None) == (row["mode"] == "plain")
        # Of 13 and 4 tokens, in 4 steps and 1 with every draft accepted; 3 and 2 in each round.
        assert found["rows"][0]["tokens_per_target_run"] == 1.0
        assert found["rows"][1]["tokens_per_target_run"] == pytest.approx(
            (3 * 13 + 2 * 4) / (3 * 4 + 2))
        assert [gain["rate"] for gain in found["speedup"]] == [20.0, 40.0]
        assert all(gain["request"] > 0 for gain in found["speedup"])

    on_server(body, FakeEngine(step_seconds=0.005))


def test_a_slow_server_shows_as_waiting_and_a_full_queue_as_what_it_is(tmp_path):
    source = prompts(tmp_path / "in.jsonl", {"token_ids": [10, 8], "draft_length": 0})

    async def body(it):
        row = (await document(it, source, "--rates", "60", "--seconds", "1"))["rows"][0]
        assert row["requests"] == 60
        refused = row["statuses"]["RESOURCE_EXHAUSTED"]
        assert refused > 10 and row["statuses"]["OK"] == 60 - refused
        # Of those that were queued the wait counts from the time they were to leave at.
        # One that finds a slot free has its first token after one step, of 20 ms.
        assert row["first_token_ms"]["p50"] > 3 * 20

    on_server(body, FakeEngine(step_seconds=0.02), queue_limit=3)


def test_command_prints_one_document_or_a_table(tmp_path):
    source = prompts(tmp_path / "in.jsonl", {"text": "one", "max_new_tokens": 6})
    bad = prompts(tmp_path / "bad.jsonl", {"text": "one"}, {"text": "one", "colour": 1})
    empty = prompts(tmp_path / "empty.jsonl")

    async def body(it):
        def command(path, *flags):
            return asyncio.to_thread(run_cli, "bench", "--server", it.address, "--input", path,
                                     "--rates", "5", "--seconds", "1", *flags)

        done = await command(source, "--json")
        assert done.returncode == 0 and done.stderr == "", done.stderr
        assert len(json.loads(done.stdout)["rows"]) == 2
        table = await command(source)
        assert "speculative" in table.stdout and "tokens a second" in table.stdout
        for path, message in ((bad, "bad.jsonl: line 2: unknown fields ['colour']"),
                              (empty, "empty.jsonl must have at least 1 request, got 0")):
            refused = await command(path)
            assert refused.returncode == 1 and message in refused.stderr

    on_server(body)
    nobody = run_cli("bench", "--server", "localhost:1", "--input", source)
    assert nobody.returncode == 1 and "no answer from localhost:1: UNAVAILABLE" in nobody.stderr


def test_requests_that_fail_make_the_command_fail(tmp_path):
    source = prompts(tmp_path / "in.jsonl", {"token_ids": [13, 9]})  # non-finite logits

    async def body(it):
        done = await asyncio.to_thread(
            run_cli, "bench", "--server", it.address, "--input", source, "--rates", "4",
            "--seconds", "1", "--json")
        assert done.returncode == 1
        rows = json.loads(done.stdout)["rows"]
        assert all(row["statuses"] == {"INTERNAL": row["requests"]} for row in rows)

    on_server(body, FakeEngine(config=CONFIG))
