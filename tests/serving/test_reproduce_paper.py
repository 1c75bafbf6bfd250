"""The paper's experiment as one run: what it asks for, how it goes on, and its tables."""

import json
import pathlib

import paper_prompts
import paper_tables
import pytest
import reproduce_paper
from report_documents_by_hand import made
from reproduce_paper import main

from tpuspec.paper import TABLE_3, TABLE_4

SPEEDUP, COST = made()["speedup"], made()["cost"]


def alpha_document(names: list[str]) -> dict:
    return {"target": "xxl", "dtype": "float32", "impossible_tokens": 0, "rows": [
        {"temperature": temperature, "draft": name, "alpha": 0.5, "alpha_low": 0.4,
         "alpha_high": 0.6, "tokens": 100, "prompts": 4, "tokens_per_target_run": []}
        for temperature in (0, 1) for name in names]}


@pytest.fixture
def commands(monkeypatch):
    """Calls of ``tpuspec``, answered by hand; the number after which one is interrupted."""
    calls: list[tuple[str, ...]] = []
    interrupt_at: list[int] = []

    def command(*words: str) -> str:
        if len(calls) in interrupt_at:
            interrupt_at.clear()
            raise KeyboardInterrupt
        calls.append(words)
        if words[0] == "report":
            pathlib.Path(words[2]).write_text("page")
            return ""
        drafts = [pathlib.Path(words[i + 1]).name
                  for i, word in enumerate(words) if word == "--draft"]
        return json.dumps({"alpha": alpha_document(drafts), "speedup": SPEEDUP,
                           "cost": COST}[words[1]])

    monkeypatch.setattr(reproduce_paper, "command", command)
    return calls, interrupt_at


@pytest.fixture
def arguments(tmp_path):
    for name in ("wmt.jsonl", "cnn.txt"):
        lines = [json.dumps({"input": f"source {i}"}) if name.endswith("l") else f"source {i}"
                 for i in range(5)]
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    return [str(tmp_path / "run"), "--target", "xxl", "--draft", "small=/models/t5-small",
            "--draft", "large=/models/t5-large", "--translation", str(tmp_path / "wmt.jsonl"),
            "--summarization", str(tmp_path / "cnn.txt"), "--prompts", "4"]


def test_every_measurement_of_the_paper_is_made_once(commands, arguments, tmp_path, capsys):
    calls, _ = commands
    assert main(arguments) == 0
    kinds = [" ".join(words[:2]) for words in calls if words[0] == "measure"]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "measure alpha": 2, "measure speedup": 4, "measure cost": 2}
    alpha = next(words for words in calls if words[1] == "alpha")
    assert [alpha[i + 1] for i, word in enumerate(alpha) if word == "--draft"] == [
        "/models/t5-small", "/models/t5-large", "bigram", "unigram"]
    assert alpha[alpha.index("--tokens") + 1] == "10000"
    timed = (tmp_path / "run" / "prompts-summarization.jsonl").read_text().splitlines()
    assert [json.loads(line)["input"] for line in timed] == [f"source {i}" for i in range(4)]
    printed = capsys.readouterr().out
    assert (tmp_path / "run" / "tables.txt").read_text() in printed
    assert len(list((tmp_path / "run").glob("report-*.html"))) == 4
    assert main(arguments) == 0  # nothing is missing: nothing is measured again
    assert sum(words[0] == "measure" for words in calls) == 8


def test_an_interrupted_run_goes_on_and_other_settings_are_refused(commands, arguments, tmp_path,
                                                                   capsys):
    calls, interrupt_at = commands
    interrupt_at.append(3)
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    assert not (tmp_path / "run" / "tables.txt").exists()
    assert main([*arguments, "--repeats", "2"]) == 1
    told = capsys.readouterr().err
    assert "repeats must be 3, with which" in told and "got 2" in told
    prompts = tmp_path / "cnn.txt"
    kept = prompts.read_text()
    prompts.write_text(kept.replace("source 0", "another"))
    assert main(arguments) == 1
    assert "sha256 must be" in capsys.readouterr().err
    prompts.write_text(kept)
    before = list(calls)
    assert main(arguments) == 0
    measured = [words for words in calls if words[0] == "measure"]
    assert len(measured) == len(set(measured)) == 8 and calls[:3] == before


def test_the_papers_rows_stand_beside_those_of_the_same_draft(commands, arguments, capsys):
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    best = {temperature: paper_tables._best(SPEEDUP, temperature)
            for temperature in {row["temperature"] for row in SPEEDUP["rows"]}}
    for row in TABLE_4:
        of = [line for line in lines if line.split()[:3] == [
            row.task, row.draft, str(row.temperature)]]
        assert f"{row.expected:.2f}x" in of[0] and f"{row.measured:.2f}x" in of[0]
        ours = best.get(row.temperature) if row.draft != "base" else None
        assert len(of) == (1 if ours is None else 2)
        if ours is not None:
            assert of[1].split()[3:5] == ["here", str(ours["gamma"])]
            assert f"{ours['observed_speedup']:.2f}x" in of[1]
    assert any(line.startswith("  translation   small") and line.endswith(
        f"100 tokens; paper {TABLE_3['translation', 'small', 1]:.2f}") for line in lines)
    assert any("bigram" in line and "paper 0.20" in line for line in lines)


def test_the_draft_length_is_the_one_that_the_formula_chooses():
    row = dict(SPEEDUP["rows"][0], temperature=0)
    rows = [row | dict(gamma=1, predicted_speedup=1.4, observed_speedup=9.0),
            row | dict(gamma=3, predicted_speedup=2.0, observed_speedup=1.0),
            row | dict(gamma=5, predicted_speedup=None)]
    assert paper_tables._best({"rows": rows}, 0)["gamma"] == 3
    assert paper_tables._best({"rows": rows}, 1) is None


@pytest.mark.parametrize("change, complaint", [
    (["--prompts", "6"], "prompts must be at most 5"),
    (["--tokens", "0"], "tokens must be at least 1, got 0"),
    (["--draft", "small=/other"], "draft must have a name of its own, got small=/other"),
    (["--summarization", "missing.txt"], "missing.txt")])
def test_wrong_settings(commands, arguments, capsys, change, complaint):
    assert main([*arguments, *change]) == 1
    assert complaint in capsys.readouterr().err and not commands[0]


def test_what_must_be_named(commands, arguments, capsys):
    directory, target, drafts, tasks = (arguments[0], arguments[1:3], arguments[3:7],
                                        arguments[7:])
    for rest, complaint in (([*drafts, *tasks], "target must be named"),
                            ([*target, *tasks], "draft must be named")):
        assert main([directory, *rest]) == 1
        assert complaint in capsys.readouterr().err
    assert main(arguments[:7]) == 1
    assert "translation must be named without --demo, or summarization" in capsys.readouterr().err


def test_a_command_that_fails_is_named():
    with pytest.raises(ValueError, match="tpuspec measure alpha --tokens 0 .*ended with exit"):
        reproduce_paper.command("measure", "alpha", "--tokens", "0")


def test_the_demo_is_the_bundled_pair_and_its_expansion(commands, tmp_path, capsys):
    (tmp_path / "run" / "expanded-t5-v1_1-large").mkdir(parents=True)  # as if it had been made
    assert main([str(tmp_path / "run"), "--demo"]) == 0
    calls, _ = commands
    alphas = [words for words in calls if words[1] == "alpha"]
    assert [words.count("--draft") for words in alphas] == [3, 3]  # not of the expansion
    assert all(pathlib.Path(words[3]).name == "target" for words in alphas)
    assert sum(words[1] == "speedup" for words in calls) == 4
    assert capsys.readouterr().out.startswith("This is the bundled pair")


def test_prompts_of_the_papers_tasks(monkeypatch, tmp_path, capsys):
    asked = []

    class Datasets:
        @staticmethod
        def load_dataset(name, configuration, split):
            assert split == "test"
            return {"wmt/wmt14": [{"translation": {"en": "A house.", "de": "Ein Haus."}}],
                    "abisee/cnn_dailymail": [{"article": "News."}]}[name]

    file = tmp_path / "p.jsonl"
    class TensorflowDatasets:
        @staticmethod
        def load(name, split):
            asked.append(name)
            return {"wmt14_translate/de-en": [{"en": b"A house.", "de": b"Ein Haus."}],
                    "cnn_dailymail": [{"article": b"News."}]}[name]

        @staticmethod
        def as_numpy(rows):
            return rows

    def only(loader):
        def import_module(name):
            if name != loader:
                raise ImportError(name)
            return {"datasets": Datasets, "tensorflow_datasets": TensorflowDatasets}[name]
        monkeypatch.setattr(paper_prompts.importlib, "import_module", import_module)

    for loader in ("tensorflow_datasets", "datasets"):
        only(loader)
        for task, prompt in (("translation", "translate English to German: A house."),
                             ("summarization", "summarize: News.")):
            assert paper_prompts.main([str(file), "--task", task, "--count", "1"]) == 0
            assert json.loads(file.read_text())["input"] == prompt
    assert asked == ["wmt14_translate/de-en", "cnn_dailymail"]
    assert paper_prompts.main([str(file), "--task", "translation"]) == 1
    assert "count must be at most 1, got 1000" in capsys.readouterr().err
    only("neither")
    assert paper_prompts.main([str(file), "--task", "translation"]) == 1
    told = capsys.readouterr().err
    assert "pip install datasets" in told and '{"input": "translate English to German: ' in told


@pytest.mark.slow
def test_a_toy_pair_from_end_to_end(tiny_pair, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("one two\nthree four\nfive six\nseven\n")
    assert main([str(tmp_path / "run"), "--target", str(tiny_pair / "target"), "--draft",
                 str(tiny_pair / "draft"), "--translation", str(file), "--prompts", "2",
                 "--tokens", "40", "--repeats", "1", "--draft_lengths", "1,2", "--max_new_tokens",
                 "8"]) == 0
    printed = capsys.readouterr().out
    assert "  translation   draft         0    here" in printed
    assert "<svg" in (tmp_path / "run" / "report-translation-draft.html").read_text()
