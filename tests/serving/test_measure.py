"""``tpuspec measure`` on a pair of tiny models: what its documents say, and its tables."""

import json

import pytest

from tpuspec import checkpoint, theory
from tpuspec.serving import measure_alpha
from tpuspec.serving.cli import make_parser


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
