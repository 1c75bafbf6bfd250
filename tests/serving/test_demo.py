"""The demo: exact keys, honest numbers, plain text where there is no terminal."""

import json

import pytest
from fake_engine import COST, FakeEngine
from harness import on_server

from tpuspec import theory
from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving import demo, report_documents
from tpuspec.serving.cli import make_parser
from tpuspec.serving.demo_report import Report, Run

KEYS = ["samples", "alpha", "draft_acceptance_rate", "c", "gamma", "tokens_per_target_run",
        "predicted_speedup", "observed_speedup"]
SOURCES = ("zero", "ten")


def measured(engine: FakeEngine, show: bool = False):
    reports = []

    async def body(it):
        reports.append(await demo.measure(it.client, SOURCES, draft_length=3, temperature=0.0,
                                          show=show, seconds=0.0))

    on_server(body, engine)
    return reports[0]


def test_numbers_are_those_of_the_runs():
    report = measured(FakeEngine(accepts=1, step_seconds=0.002))
    document = report.to_json()
    assert list(document) == KEYS
    assert [list(sample) for sample in document["samples"]] == [
        ["source", "text", "tokens"]] * 2
    sample = document["samples"][0]
    assert "".join(token["text"] for token in sample["tokens"]) == sample["text"]
    # One draft of three is accepted, then the target corrects.
    assert [token["origin"] for token in sample["tokens"][:4]] == [
        "accepted_draft", "correction"] * 2
    assert document["samples"][0]["text"].startswith("one two three ")
    assert document["alpha"] == 0.5 and document["c"] == 0.25 and document["gamma"] == 3
    assert document["draft_acceptance_rate"] == pytest.approx(1 / 3, abs=0.02)
    assert document["tokens_per_target_run"] == 2.0
    assert document["predicted_speedup"] == pytest.approx(theory.speedup(0.5, 3, 0.25, 1.25))
    # Two tokens a step, and a step takes as long as a plain one here: 2, as far as a busy
    # machine keeps to it.
    assert document["observed_speedup"] == pytest.approx(2.0, rel=0.8)
    assert report.why_not_faster() is None
    assert report.same_texts == 2
    assert len(report.plain) == len(report.speculative) == 4


def made_up(*, seconds: float, alpha: float, c: float) -> Report:
    """Runs of 9 tokens, of which 8 came after the first step."""
    def run(seconds: float) -> Run:
        finish = pb.Finish(timings=pb.Timings(decode_seconds=seconds), decode_tokens=8)
        speculation = pb.Speculation(target_runs=4, emitted=9, drafted=40, examined=20,
                                     accepted=round(20 * alpha))
        return Run([pb.GenerateResponse(finish=finish, speculation=speculation)], seconds)

    return Report(sources=["a"], shown=[], plain=[run(1.0)], speculative=[run(seconds)],
                  cost=pb.Cost(c=c, verify_widening={3: 1.5}), draft_length=3, temperature=0.0)


@pytest.mark.parametrize("seconds, alpha, c, said", [
    (0.5, 0.8, 0.1, None),
    (2.0, 0.1, 0.5, "did not pay here (0.50x): with alpha = 0.10, c = 0.50 and a verify pass of "
                    "1.50 plain passes, Eq. (5) expects 0.37x."),
    (1.25, 0.8, 0.1, "did not pay here (0.80x): Eq. (5) expects 1.64x of the two models alone; ")])
def test_pair_that_does_not_pay_says_why(seconds, alpha, c, said):
    why = made_up(seconds=seconds, alpha=alpha, c=c).why_not_faster()
    assert why is said or said in why


def test_stream_is_shown_plain_without_a_terminal(capsys):
    report = measured(FakeEngine(accepts=1), show=True)
    demo.print_table(report)
    out = capsys.readouterr().out
    assert "zero\n  one two three four" in out
    assert "alpha (accepted / examined)" in out and "0.500" in out
    assert COST.method in out
    assert "\x1b" not in out


@pytest.mark.parametrize("no_color, coloured", [("", True), ("1", False)])
def test_origins_are_told_apart_by_colour_on_a_terminal(monkeypatch, capsys, no_color, coloured):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", no_color)
    measured(FakeEngine(accepts=1), show=True)
    out = capsys.readouterr().out
    assert ("\x1b[32mone\x1b[0m\x1b[31m two\x1b[0m" in out) == coloured
    assert ("Colours:" in out) == coloured


def test_command_prints_one_document(monkeypatch, capsys, fake_models):
    monkeypatch.setattr(demo, "_MEASURE_SECONDS", 0.0)
    assert demo.run(make_parser().parse_args(["demo", "--json", "--draft_length", "7"])) == 0
    document = json.loads(capsys.readouterr().out)
    assert report_documents.check(document) == "demo"
    assert list(document) == KEYS and document["gamma"] == 7
    assert len(document["samples"]) == len(demo.SOURCES)


def test_demo_needs_a_draft(tiny_pair):
    args = make_parser().parse_args(["demo", "--target", str(tiny_pair / "target")])
    with pytest.raises(ValueError, match="demo needs a draft"):
        demo.run(args)
