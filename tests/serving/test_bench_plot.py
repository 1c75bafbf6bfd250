"""The page of a load: every figure at its place, and nothing where nothing is known."""

import asyncio
import re
from xml.etree import ElementTree

import pytest
from harness import on_server, run_cli

from tpuspec.serving import bench_plot
from tpuspec.serving.report_svg import ticks


def row(rate: float, mode: str, tokens: float, first, token=None):
    def percentiles(values):
        return None if values is None else dict(zip(("p50", "p90", "p99"), values, strict=True))

    return {"rate": rate, "mode": mode, "tokens_per_s": tokens, "goodput_per_s": rate / 2,
            "first_token_ms": percentiles(first), "token_ms": percentiles(token),
            "requests": 7, "statuses": {"OK": 6, "<UNKNOWN>": 1}, "alpha": None}


DOCUMENT = {
    "model": "a <b> & c", "platform": "tpu", "slots": 8, "c": 0.125, "rows": [
        row(4.0, "plain", 100.0, (10.0, 20.0, 50.0)),
        row(4.0, "speculative", 200.0, (5.0, 6.0, 7.0)),
        row(2.0, "plain", 50.0, (4.0, 5.0, 6.0)), row(2.0, "speculative", 50.0, None)],
    "speedup": [{"rate": 4.0, "request": 2.0, "throughput": 1.5}]}


def charts(page: str) -> dict[str, ElementTree.Element]:
    """By their ids."""
    found = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page)]
    return {svg.get("id"): svg for svg in found}


def marks(svg: ElementTree.Element) -> dict[str, tuple[float, float, str]]:
    """Places by what a pointer is told, and their classes."""
    found = {}
    for path in svg.findall("path"):
        if (title := path.find("title")) is not None:
            x, y = map(float, re.findall(r"[\d.]+", path.get("transform")))
            found[title.text] = x, y, path.get("class")
    return found


def test_every_figure_is_at_its_place():
    page = bench_plot.page(DOCUMENT)
    drawn = charts(page)
    assert list(drawn) == ["tokens_per_s", "goodput_per_s", "first_token_ms", "token_ms", "speedup"]
    left, right, bottom, top, *axes = map(float, drawn["tokens_per_s"].get("data-plot").split())
    assert axes == [0, 4, 0, 200, 0]
    middle, height = (left + right) / 2, bottom - top
    found = marks(drawn["tokens_per_s"])
    assert found["speculative : 200 at 4/s"] == (right, top, "mark circle s1")
    assert found["plain : 100 at 4/s"] == (right, pytest.approx(bottom - height / 2, abs=0.1),
                                           "mark circle s2")
    assert found["plain : 50 at 2/s"][:2] == (middle, pytest.approx(bottom - height / 4, abs=0.1))
    assert [line.get("class") for line in drawn["tokens_per_s"].findall("polyline")] == [
        "line s2", "line s1"]
    found = marks(drawn["first_token_ms"])  # of 50 ms
    assert set(found) == {f"plain {p}: {ms} at {rate}/s" for p, ms, rate in (
        ("p50", 4, 2), ("p50", 10, 4), ("p99", 6, 2), ("p99", 50, 4))} | {
        "speculative p50: 5 at 4/s", "speculative p99: 7 at 4/s"}
    assert found["plain p99: 50 at 4/s"] == (right, top, "mark triangle s2 hollow")
    assert not marks(drawn["token_ms"])
    assert len(marks(drawn["speedup"])) == 2
    labels = [(text.text.strip(), float(text.get("y"))) for text in drawn[
        "first_token_ms"].findall("text") if "label" in text.get("class")]
    assert sorted(name for name, _ in labels) == [
        "plain p50", "plain p99", "speculative p50", "speculative p99"]
    places = sorted(y for _, y in labels)
    assert all(low + 13.9 <= high for low, high in zip(places, places[1:], strict=False))


def test_what_a_server_says_is_text_and_what_is_not_known_a_dash():
    page = bench_plot.page(DOCUMENT | {"c": None, "speedup": []})
    assert "a &lt;b&gt; &amp; c on tpu under load" in page and "&lt;UNKNOWN&gt; 1" in page
    assert "<b>" not in page and "8 slots, c –." in page and "speedup" not in charts(page)
    assert "<td>10.0 / 20.0 / 50.0</td><td>–</td><td>–</td>" in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize("highest, expected", [
    (0.0, [0, 1]), (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (7.0, [0, 2, 4, 6, 8]),
    (50.0, [0, 10, 20, 30, 40, 50]), (0.03, [0, 0.01, 0.02, 0.03]),
    (51.0, [0, 20, 40, 60]), (1234.0, [0, 500, 1000, 1500])])
def test_ticks_are_round_and_reach_the_highest(highest, expected):
    assert ticks(highest) == pytest.approx(expected)
    assert 2 <= len(expected) <= 7


def test_command_draws_what_it_measured(tmp_path):
    source, plot = tmp_path / "in.jsonl", tmp_path / "load.html"
    source.write_text('{"text": "one", "max_new_tokens": 6}\n')

    async def body(it):
        def command(plot):
            return asyncio.to_thread(
                run_cli, "bench", "--server", it.address, "--input", str(source), "--rates",
                "5,10", "--seconds", "0.5", "--plot", str(plot))

        done = await command(plot)
        assert done.returncode == 0 and "speculative" in done.stdout, done.stderr
        drawn = charts(plot.read_text())
        assert [len(marks(svg)) for svg in drawn.values()] == [4, 4, 8, 8, 4]
        accepted = (await it.client.get_model()).load.accepted
        refused = await command(tmp_path / "nowhere" / "load.html")
        assert refused.returncode == 1 and "plot must lie in a directory" in refused.stderr
        assert (await it.client.get_model()).load.accepted == accepted

    on_server(body)
