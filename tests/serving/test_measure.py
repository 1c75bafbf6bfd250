"""``tpuspec measure`` on a pair of tiny models: what its documents say, and its tables."""

import dataclasses
import json

import numpy as np
import pytest
from fake_engine import COST, FakeEngine, FakeVocabulary

from tpuspec import checkpoint, cost_sweep, theory
from tpuspec.cost_sweep import CostSweep, PassCost
from tpuspec.measurement import SpeculationStats
from tpuspec.serving import (
    measure,
    measure_alpha,
    measure_cost,
    measure_speedup,
    models,
    report_documents,
)
from tpuspec.serving.cli import make_parser
from tpuspec.serving.service import ModelInfo

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"one two {word}", "temperature": 3.0}) + "\n"
                            for word in ("three", "four", "five", "one")))
    return str(path)


def parse(pair, sources, *flags):
    return make_parser().parse_args([
        "measure", *flags, "--target", str(pair / "target"), "--input", sources,
        "--max_new_tokens", "48"])


def test_alpha_of_models_and_tables(tiny_pair, sources):
    args = parse(tiny_pair, sources, "alpha", "--tokens", "60", "--slots", "16", "--draft",
                 str(tiny_pair / "draft"), "--draft", str(tiny_pair / "target"), *(
                     flag for name in ("bigram", "unigram", "ngram", "uniform")
                     for flag in ("--draft", name)))
    document = measure_alpha.measure(args)
    assert report_documents.check(document) == "measure alpha"
    assert document["target"] == "target" and document["dtype"] == "float32"
    assert document["impossible_tokens"] == 0
    rows = {(row["temperature"], row["draft"]): row for row in document["rows"]}
    assert len(rows) == 2 * 6
    for temperature in (0.0, 1.0):
        alpha = {name: rows[temperature, name]["alpha"] for _, name in rows}
        assert alpha["target"] == pytest.approx(1.0, abs=1e-4)
        assert all(0 <= value <= 1 + 1e-6 for value in alpha.values())
        assert alpha["uniform"] < 0.1 or temperature  # random models are nearly uniform
        row = rows[temperature, "target"]
        assert row["prompts"] == 2  # the others are held out
        assert [run["of_these_texts"] for run in row["tokens_per_target_run"]] == pytest.approx(
            [row["tokens"] / texts_runs(row, gamma) for gamma in (1, 3, 5, 7)], rel=0.15)
    assert rows[1.0, "target"]["tokens"] >= 60
    assert rows[1.0, "draft"]["alpha_low"] <= rows[1.0, "draft"]["alpha"]
    assert sum(one["tokens"] for one in rows[1.0, "draft"]["by_position"]) == rows[
        1.0, "draft"]["tokens"]
    assert all(run["independent"] == pytest.approx(run["of_these_texts"], rel=1e-3)
               for run in rows[1.0, "target"]["tokens_per_target_run"])
    run = rows[1.0, "draft"]["tokens_per_target_run"][1]
    assert run["equation_1"] == pytest.approx(
        theory.expected_tokens(rows[1.0, "draft"]["alpha"], 3))
    table = measure_alpha.text(document)
    assert table.count("bigram") == 4 and "lag 1" in table and "By position" in table


def texts_runs(row, gamma):
    """Target runs of texts of 48 tokens in which every draft is accepted."""
    return row["tokens"] / 48 * -(-48 // (gamma + 1))


def test_a_corpus_is_texts_by_line(tiny_pair, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one two three\nfour five\n\n")
    target = checkpoint.load(tiny_pair / "target")
    texts = measure_alpha._read_corpus(str(corpus), target)
    assert [target.vocabulary.decode(ids) for ids in texts] == ["one two three", "four five"]
    assert all(ids[-1] == 1 for ids in texts)


@pytest.mark.parametrize("flags, message", [
    ((), "input must be named"), (("--input", "{one}"), "must have at least 2 sources"),
    (("--input", "{bad}"), "line 1: unknown fields"), (("--input", "{empty}"), "at least 1 source"),
    (("--temperatures", "0.0001", "--input", "{one}"), "temperature must be 0")])
def test_what_cannot_be_measured_is_refused_by_name(tiny_pair, tmp_path, flags, message):
    for name, content in (("one", '{"text": "a"}\n'), ("bad", '{"text": "a", "b": 1}\n'),
                          ("empty", "\n")):
        (tmp_path / f"{name}.jsonl").write_text(content)
    flags = [flag.format(**{path.stem: path for path in tmp_path.iterdir()}) for flag in flags]
    args = make_parser().parse_args(
        ["measure", "alpha", "--target", str(tiny_pair / "target"), *flags])
    with pytest.raises(ValueError, match=message):
        measure_alpha.measure(args)


def test_speedup_of_a_hand_computable_engine(fake_models, monkeypatch, tmp_path, capsys):
    engines = []

    def load(_, config, **__):
        engines.append(FakeEngine(config, accepts=1, step_seconds=0.004))
        return models.Served(engine=engines[0], vocabulary=FakeVocabulary(),
                             info=ModelInfo(name="count", eos_id=1))

    monkeypatch.setattr(models, "load", load)
    path = tmp_path / "in.jsonl"
    path.write_text('{"token_ids": [30, 21]}\n{"token_ids": [40, 31]}\n')
    args = make_parser().parse_args([
        "measure", "speedup", "--input", str(path), "--draft_lengths", "3,1", "--repeats", "3",
        "--temperatures", "0", "--max_new_tokens", "64"])
    document = measure_speedup.measure(args)
    assert report_documents.check(document) == "measure speedup"
    assert (document["prompts"], document["repeats"], document["target"]) == (2, 3, "target")
    # Every prompt with every length, and once more to warm up.
    assert engines[0].steps >= 4 * (22 + 32 + 2 * (11 + 16))
    one, three = document["rows"]
    assert set(one) >= {"plain_tokens_per_s", "speculative_tokens_per_s", "observed_speedup",
                        "predicted_speedup", "alpha", "c", "widening", "gamma"}
    assert (one["gamma"], three["gamma"]) == (1, 3)
    assert one["alpha"] == 1.0 and three["alpha"] == pytest.approx(0.5)
    assert (three["c"], three["widening"]) == (0.25, 1.25)
    assert three["predicted_speedup"] == pytest.approx(theory.speedup(0.5, 3, 0.25, 1.25))
    assert three["predicted_by_step_times"] == pytest.approx(2.0 * 2.0 / 4.0)
    assert three["tokens_per_target_run"] == pytest.approx(2.0)
    # Two tokens a step, and a step takes as long as a plain one here.
    assert three["observed_speedup"] == pytest.approx(2.0, rel=0.5)
    assert three["predicted_tokens_per_target_run"] == pytest.approx(1.875)
    assert three["predicted_plain_steps_per_step"] == pytest.approx(3 * 0.25 + 1.25)
    assert one["predicted_speedup_with_ends"] == pytest.approx(2.0 / (0.25 + 1.05), rel=0.05)
    assert three["timed_plain_steps_per_step"] == pytest.approx(2.0)
    assert three["plain_steps_per_step"] == pytest.approx(1.0, rel=0.5)
    assert three["observed_speedup_low"] <= three["observed_speedup"] <= three[
        "observed_speedup_high"]
    assert one["plain_first_token_ms"] > 3.9
    printed = measure_speedup.text(document)
    assert "one request at a time: 2 prompts, 3 repeats" in printed and "made up" in printed
    assert "2.00 tokens, by Eq. (1) 1.88;" in printed


def test_figures_of_runs_by_hand():
    runs = measure_speedup.Runs(2, 3)
    runs.decode_tokens[:] = [[10, 10, 10], [30, 30, 30]]
    runs.decode_seconds[:] = [[1, 1, 9], [3, 4, 3]]
    runs.decode_steps[:] = [[2, 2, 2], [6, 6, 6]]
    runs.tokens[:], runs.seconds[:] = runs.decode_tokens, runs.decode_seconds
    assert runs.step_seconds == pytest.approx(5 / 8)
    assert runs.rate(np.arange(2)) == pytest.approx(40 / 5)  # of 10, 8 and 40 / 12
    assert runs.rate(np.array([0, 0])) == pytest.approx(10)
    assert measure_speedup._identical(runs) == pytest.approx((9 + 4 / 3) / 2)
    assert runs.alpha is None
    runs.stats[1] = SpeculationStats(steps=4, drafted=12, accepted=6, examined=8, emitted=10)
    assert runs.alpha.value == 0.75
    assert measure_speedup.spread(np.array([1.0, 2.0, 3.0]))["median"] == 2.0
    runs.decode_tokens[0] = 0
    assert np.isnan(runs.rate(np.array([0, 0])))


def test_tokens_of_a_step_of_outputs_that_end():
    """All accepted, three drafts: 10 tokens are 4 + 4 + 2, and 4 + 2 + ... after the first."""
    of = measure_speedup._tokens_of_a_step
    assert of(np.array([[10.0]]), 1.0, 3) == pytest.approx((4 + 2) / 2)
    assert of(np.array([[10.0, 8.0]]), 1.0, 3) == pytest.approx((4 + 2 + 4) / 3)
    assert np.isnan(of(np.array([[4.0, 2.0]]), 1.0, 3))
    assert of(np.array([[10_000.0]]), 0.7, 3) == pytest.approx(
        theory.expected_tokens(0.7, 3), rel=1e-3)
    # Simulated: a rejection after k drafts gives k + 1 tokens, and the end cuts.
    rng, tokens, steps = np.random.default_rng(0), 0, 0
    for _ in range(5000):
        left, first = 13, True
        while left > 0:
            accepted = next((k for k in range(3) if rng.random() >= 0.8), 3)
            given = min(accepted + 1, left)
            left -= given
            if not first:
                tokens, steps = tokens + given, steps + 1
            first = False
    assert of(np.array([[13.0]]), 0.8, 3) == pytest.approx(tokens / steps, rel=0.02)


def test_costs_before_and_after_are_taken_together():
    later = dataclasses.replace(COST, target_ms=4.0, draft_ms=0.5,
                                verify_ms={k: 2 * v for k, v in COST.verify_ms.items()})
    found = measure_speedup.together([COST, later])
    assert found.c == pytest.approx(0.5 / 3.0)
    assert found.widening(3) == pytest.approx(1.25) and "after" in found.method
    assert found.step_ms == COST.step_ms


def test_speedup_needs_a_draft(tiny_pair, sources):
    with pytest.raises(ValueError, match="measure speedup needs a draft"):
        measure_speedup.measure(parse(tiny_pair, sources, "speedup"))


def test_cost_of_a_batch(tiny_pair, monkeypatch, capsys):
    def sweep(target, draft, *, slots, widths, progress, **shapes):
        assert shapes == dict(source_positions=64, positions=128, vocabulary_size=300, mesh=None)
        progress(len(widths) + 1)
        return CostSweep(
            slots=slots, copy_bytes_per_s=1e10, product_flops_per_s=2e11,
            draft=PassCost(width=1, ms=0.5, moved=10**6),
            target=tuple(PassCost(width=g, ms=1 + g, moved=4 * 10**7) for g in widths))

    monkeypatch.setattr(cost_sweep, "sweep", sweep)
    args = make_parser().parse_args([
        "measure", "cost", "--target", str(tiny_pair / "target"), "--draft",
        str(tiny_pair / "draft"), "--slots", "1,4", "--widths", "1,2,8", "--json"])
    assert measure.run(args) == 0
    document = json.loads(capsys.readouterr().out)
    assert report_documents.check(document) == "measure cost"
    assert [batch["slots"] for batch in document["batches"]] == [1, 4]
    batch = document["batches"][1]
    assert batch["c"] == 0.25 and [one["width"] for one in batch["target"]] == [1, 2, 8]
    assert batch["target"][2]["widening"] == 4.5
    assert batch["target"][0]["bytes_per_s"] == pytest.approx(2e10)
    assert batch["target"][0]["share_of_copy"] == pytest.approx(2.0)
    assert batch["draft"]["share_of_copy"] == pytest.approx(0.2)
    table = measure_cost.text(document)
    assert ("4 at once: c = 0.250; a copy moves 10.0 GB/s, a matrix product does 200 GFLOP/s"
            in table and "4.50" in table)
