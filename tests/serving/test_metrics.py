"""Prometheus metrics: values counted by hand, on a real server and over real HTTP."""

import asyncio
import dataclasses
import socket
import threading
import urllib.request

import pytest
from fake_engine import CONFIG, FakeEngine
from harness import Running, on_server
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tpuspec import theory
from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving import metrics


def scrape(it: Running) -> dict[str, float]:
    """Value of every sample, by name and labels other than the model's."""
    text = generate_latest(it.server.metrics.registry).decode()
    return values(text)


def values(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items())
                              if key not in ("model_name", "engine"))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def vllm(found: dict[str, float]) -> list[float]:
    names = ["drafts", "draft_tokens", "accepted_tokens"]
    totals = [found[f"vllm:spec_decode_num_{name}_total"] for name in names]
    return totals + [found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{position={i}}}"]
                     for i in range(7)]


def test_counters_of_vllm_by_their_exact_names_and_meanings():
    async def body(it):
        assert vllm(scrape(it)) == [0] * 10
        await it.answer([10, 9])  # [a a a b] [a a a b] [a 1]
        assert vllm(scrape(it)) == [3, 9, 8, 3, 3, 2, 0, 0, 0, 0]
        await it.answer([10, 9], draft_length=0)  # 10 plain steps
        assert vllm(scrape(it)) == [3, 9, 8, 3, 3, 2, 0, 0, 0, 0]
        text = generate_latest(it.server.metrics.registry).decode()
        assert ('vllm:spec_decode_num_drafts_total{engine="0",model_name="count"} 3.0' in text)

    on_server(body)


def test_our_own_figures():
    async def body(it):
        before = scrape(it)
        assert "tpuspec_alpha" not in before  # unknown is absent, never 0
        assert before["tpuspec_cost_coefficient"] == 0.25
        await it.answer([10, 5], label="a")  # [a c] [a c] [a 1]
        await it.answer([10, 5], draft_length=0)
        found = scrape(it)
        assert found["tpuspec_alpha"] == 0.5
        assert found["tpuspec_predicted_speedup"] == pytest.approx(
            theory.speedup(0.5, 3, 0.25, 1.25))
        assert found["tpuspec_tokens_per_target_run"] == 12 / 9
        assert found["tpuspec_target_runs_total{label=a}"] == 3
        assert found["tpuspec_target_runs_total{label=}"] == 6
        assert found["tpuspec_examined_draft_tokens_total{label=a}"] == 6
        assert found["tpuspec_accepted_draft_tokens_total{label=a}"] == 3
        assert found["tpuspec_generated_tokens_total{label=}"] == 6
        assert found["tpuspec_requests_total{outcome=finished}"] == 2
        assert (found["tpuspec_slots"], found["tpuspec_active_slots"]) == (2, 0)
        for name in ("queue", "time_to_first_token", "time_per_output_token", "request"):
            for label in ("a", ""):
                assert found[f"tpuspec_{name}_seconds_count{{label={label}}}"] == 1, name
        # 4 tokens after the first step, 2 ms each when plain.
        spent = found["tpuspec_time_per_output_token_seconds_sum{label=a}"]
        assert found["tpuspec_observed_speedup"] > 0 and spent > 0

    on_server(body, FakeEngine(accepts=1))


def test_figures_that_are_not_known_are_absent():
    async def body(it):
        await it.answer([10, 5])
        found = scrape(it)
        assert found["tpuspec_alpha"] == 1.0
        for name in ("cost_coefficient", "predicted_speedup", "observed_speedup"):
            assert f"tpuspec_{name}" not in found

    on_server(body, FakeEngine(dataclasses.replace(CONFIG, draft_length=None), cost=None))


def test_cancelled_requests_count_once_and_counters_never_fall():
    async def body(it):
        stream = it.client.generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[10])))
        await anext(stream)
        await stream.aclose()
        await it.until_idle()
        first = scrape(it)
        assert first["tpuspec_requests_total{outcome=cancelled}"] == 1
        assert first["tpuspec_generated_tokens_total{label=}"] >= 4
        assert "tpuspec_request_seconds_count{label=}" not in first
        await it.answer([10, 9])
        second = scrape(it)
        assert all(second[name] >= value for name, value in first.items()
                   if name.partition("{")[0].endswith(("_total", "_count", "_sum")))

    on_server(body, FakeEngine(step_seconds=0.01))


def test_labels_of_requests_are_bounded_in_number():
    async def body(it):
        for number in range(metrics.MOST_LABELS + 5):
            await it.answer([10, 2], label=f"label {number}")
        found = scrape(it)
        for name in ("tpuspec_target_runs_total", "tpuspec_time_to_first_token_seconds_count"):
            series = [one for one in found if one.startswith(name)]
            assert len(series) == metrics.MOST_LABELS + 1
            assert found[f"{name}{{label=other}}"] == 5

    on_server(body)


def test_served_over_http_on_a_port_of_its_own():
    async def body(it):
        port = it.server.metrics.serve("localhost", 0)
        await it.answer([10, 9])

        def read() -> tuple[str, str]:
            with urllib.request.urlopen(f"http://localhost:{port}/metrics") as reply:
                return reply.headers["Content-Type"], reply.read().decode()

        kind, text = await asyncio.to_thread(read)
        assert kind.startswith("text/plain")
        assert vllm(values(text))[:3] == [3, 9, 8]
        with socket.socket() as taken:
            taken.bind(("localhost", 0))
            taken.listen()
            number = taken.getsockname()[1]
            with pytest.raises(OSError, match=f"cannot listen on localhost:{number} for metrics"):
                it.server.metrics.serve("localhost", number)

    on_server(body)


@pytest.mark.parametrize("accept, kind", [
    ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
    ("application/openmetrics-text; version=one", "text/plain"),
    ("text/plain; version=x; q=nonsense, */*", "text/plain"), (";;=,=;", "text/plain"),
    ("text/plain;version=", "text/plain"), ("a" * 5000, "text/plain")])
def test_malformed_accept_header_is_answered_in_the_plain_format(accept, kind):
    async def body(it):
        port = it.server.metrics.serve("localhost", 0)

        def read() -> tuple[str, str]:
            request = urllib.request.Request(f"http://localhost:{port}/metrics",
                                             headers={"Accept": accept})
            with urllib.request.urlopen(request) as reply:
                return reply.headers["Content-Type"], reply.read().decode()

        found, text = await asyncio.to_thread(read)
        assert found.startswith(kind) and "tpuspec_slots 2.0" in text

    on_server(body)


def test_connections_that_say_nothing_are_closed_and_hold_no_thread(monkeypatch, capfd):
    assert metrics.HTTP_SECONDS == 10
    monkeypatch.setattr(metrics, "HTTP_SECONDS", 0.5)

    async def body(it):
        port = it.server.metrics.serve("localhost", 0)
        silent = [await asyncio.open_connection("localhost", port) for _ in range(10)]
        for number, (_, writer) in enumerate(silent):
            writer.write(b"GET /metrics HT"[:number])  # the beginning of a request, or nothing
        with urllib.request.urlopen(f"http://localhost:{port}/metrics") as reply:
            assert reply.status == 200
        async with asyncio.timeout(10):
            for reader, writer in silent:
                assert await reader.read() == b""
                writer.close()
            while any("process_request" in thread.name for thread in threading.enumerate()):
                await asyncio.sleep(0.02)

    on_server(body)
    assert capfd.readouterr().err == ""
