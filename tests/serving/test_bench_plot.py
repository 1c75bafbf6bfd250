"""The picture of a load: every figure at its place, and nothing where nothing is known."""

import asyncio
import re
from xml.etree import ElementTree

import pytest
from harness import on_server, run_cli

from tpuspec.serving import bench_plot

SVG = "{http://www.w3.org/2000/svg}"


def row(rate: float, mode: str, tokens: float, first, token=None):
    def percentiles(values):
        return None if values is None else dict(zip(("p50", "p90", "p99"), values, strict=True))

    return {"rate": rate, "mode": mode, "tokens_per_s": tokens,
            "first_token_ms": percentiles(first), "token_ms": percentiles(token)}


DOCUMENT = {"model": "a <b> & c", "platform": "tpu", "slots": 8, "rows": [
    row(4.0, "plain", 100.0, (10.0, 20.0, 50.0)), row(4.0, "speculative", 200.0, (5.0, 6.0, 7.0)),
    row(2.0, "plain", 50.0, (4.0, 5.0, 6.0)), row(2.0, "speculative", 50.0, None)]}


def test_every_figure_is_at_its_place():
    root = ElementTree.fromstring(bench_plot.svg(DOCUMENT))
    assert "a <b> & c on tpu, 8 slots" in root.find(f"{SVG}title").text
    throughput, first, token = root.findall(f"{SVG}g")
    # Axes from 0 to 4 requests and to 200 tokens a second, 320 by 240 units, y downwards.
    assert [line.get("points") for line in throughput.findall(f"{SVG}polyline")] == [
        "160.0,180.0 320.0,120.0", "160.0,180.0 320.0,0.0"]
    # To 50 ms: p50, p90 and p99 of plain requests at two rates, of the others at one.
    found = [(line.get("points"), line.get("stroke-dasharray"))
             for line in first.findall(f"{SVG}polyline")]
    assert found == [
        ("160.0,220.8 320.0,192.0", "none"), ("160.0,216.0 320.0,144.0", "7 3"),
        ("160.0,211.2 320.0,0.0", "2 3"),
        ("320.0,216.0", "none"), ("320.0,211.2", "7 3"), ("320.0,206.4", "2 3")]
    assert len(first.findall(f"{SVG}circle")) == 9  # a single point is seen, too
    assert first.find(f"{SVG}circle/{SVG}title").text == "plain p50: 4 at 2/s"
    assert not token.findall(f"{SVG}polyline") and not token.findall(f"{SVG}circle")
    colours = {line.get("stroke") for line in throughput.findall(f"{SVG}polyline")}
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert len(colours) == 2 and texts[1:] == ["plain", "speculative", "p50", "p90", "p99"]
    width, height = float(root.get("width")), float(root.get("height"))
    for panel in (throughput, first, token):
        x, y = map(float, re.findall(r"\d+", panel.get("transform")))
        assert x + 320 <= width and y + 240 <= height


@pytest.mark.parametrize("highest, expected", [
    (0.0, [0, 1]), (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (7.0, [0, 2, 4, 6, 8]),
    (50.0, [0, 10, 20, 30, 40, 50]), (0.03, [0, 0.01, 0.02, 0.03]),
    (51.0, [0, 20, 40, 60]), (1234.0, [0, 500, 1000, 1500])])
def test_ticks_are_round_and_reach_the_highest(highest, expected):
    assert bench_plot.ticks(highest) == pytest.approx(expected)
    assert 2 <= len(expected) <= 7


def test_command_draws_what_it_measured(tmp_path):
    source, plot = tmp_path / "in.jsonl", tmp_path / "load.svg"
    source.write_text('{"text": "one", "max_new_tokens": 6}\n')

    async def body(it):
        def command(plot):
            return asyncio.to_thread(
                run_cli, "bench", "--server", it.address, "--input", str(source), "--rates",
                "5,10", "--seconds", "0.5", "--plot", str(plot))

        done = await command(plot)
        assert done.returncode == 0 and "speculative" in done.stdout, done.stderr
        panels = ElementTree.fromstring(plot.read_text()).findall(f"{SVG}g")
        assert [len(panel.findall(f"{SVG}circle")) for panel in panels] == [4, 12, 12]
        accepted = (await it.client.get_model()).load.accepted
        refused = await command(tmp_path / "nowhere" / "load.svg")
        assert refused.returncode == 1 and "plot must lie in a directory" in refused.stderr
        assert (await it.client.get_model()).load.accepted == accepted

    on_server(body)
