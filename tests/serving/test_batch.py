"""``tpuspec batch`` around the fake engine: files in, files out, and what may go wrong."""

import gzip
import json
import pathlib
import re

import batch_child
import fsspec
import pytest
from fake_engine import FakeEngine, FakeVocabulary, sampled_id
from tiny_vocabularies import byte_vocabulary

from tpuspec.serving import batch_engine, batch_job, batch_report, models, scores, storage
from tpuspec.serving.batch_engine import line_seed
from tpuspec.serving.service import ModelInfo

# In a strict job on one slot, the second line ends it after the first is done.
BROKEN = [{"input": "zero", "max_new_tokens": 2}, {"token_ids": [17, 5]}]


@pytest.fixture
def engines(monkeypatch, tmp_path):
    return batch_child.install(monkeypatch.setattr, tmp_path)


@pytest.fixture
def job(engines, tmp_path, capsys):
    """Runs the command on lines; gives exit code, output records and error records."""
    def run(lines: list | bytes, *flags: str, output: str = "out.jsonl"):
        source = tmp_path / "in.jsonl"
        if not isinstance(lines, bytes):
            lines = "".join(json.dumps(line) + "\n" for line in lines).encode()
        source.write_bytes(lines)
        code = batch_child.run("--input", str(source), "--output", str(tmp_path / output), *flags)
        return code, records(tmp_path / output), records(tmp_path / "out.errors.jsonl")

    return run


def records(path: pathlib.Path) -> list:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def many(count: int = 90) -> list:
    """Lines of every kind that have an answer."""
    return [{"id": f"r{n}", "token_ids": [10 * (n % 7 + 1), 2 + n % 11], "draft_length": n % 4,
             "temperature": n % 2, **({"seed": n} if n % 5 == 0 else {})} for n in range(count)]


def test_lines_are_answered_in_order_with_what_was_asked(job, engines):
    code, out, errors = job([{"id": "a", "input": "zero", "max_new_tokens": 3},
                             {"token_ids": [30, 2], "draft_length": 0},
                             {"id": 7, "input": "zero five", "stop": ["two"], "seed": 9}], "--ids")
    assert (code, errors) == (0, [])
    assert out == [
        {"id": "a", "text": "one two three", "token_ids": [31, 32, 33], "finish_reason": "length",
         "source_tokens": 2, "new_tokens": 3, "seed": out[0]["seed"], "draft_length": 3,
         "alpha": 1.0, "tokens_per_target_run": 3.0},
        {"id": 2, "text": "one two", "token_ids": [31, 32, 1], "finish_reason": "eos",
         "source_tokens": 3, "new_tokens": 3, "seed": out[1]["seed"], "draft_length": 0,
         "alpha": None, "tokens_per_target_run": 1.0},
        {"id": 7, "text": "one ", "token_ids": [31, 32], "finish_reason": "stop",
         "source_tokens": 3, "new_tokens": 2, "seed": 9, "draft_length": 3,
         "alpha": 1.0, "tokens_per_target_run": 2.0}]
    assert engines[0].config.draft_lengths == (0, 3) and engines[0].config.slots == 16


def test_bad_lines_have_a_record_of_their_own_and_the_job_goes_on(job):
    good = [json.dumps(line).encode() + b"\r\n" for line in many(500)]
    bad = {2: b'{"id": "x2", "input"\n', 30: b'{"id": "x30"}\n',
           60: b'{"id": "long", "token_ids": [' + b"5, " * 600 + b"5]}\n",
           61: b'{"id": "r7", "input": "zero"}\n', 62: b"   \n", 63: b"[]\n", 64: b"[" * 100000,
           65: b'\n{"input": "\xff"}\n', 66: b'{"input": "\\ud800"}\n', 67: b'{"input": null}\n',
           68: b'{"id": [1], "input": "zero"}\n', 69: b'{"input": "zero", "temperature": NaN}\n',
           70: b'{"input": "zero", "top_p": 7}\n', 71: b'{"input": "zero", "text": "one"}\n',
           72: b'{"token_ids": []}\n', 73: b'{"id": "t", "input": "zero", "target": 3}\n',
           74: b'{"id": "\\udfff", "input": "zero"}\n', 75: b'{"token_ids": [5000]}\n',
           76: b'{"id": 5, "input": "zero", "seed": -1}\n'}
    lines = b"\xef\xbb\xbf" + b"".join(
        bad.get(n, good[n]) for n in range(500)).rstrip(b"\r\n")
    code, out, errors = job(lines, "--seed", "1")
    assert code == 1
    assert len(out) + len(errors) == 500 - 1  # one line of the bad ones is blank
    assert [r["id"] for r in out] == [f"r{n}" for n in range(500) if n not in bad]
    number = {at: at + 1 for at in bad} | {64: 65}
    messages = {r["line"]: r["error"]["message"] for r in errors}
    assert {r["error"]["code"] for r in errors} == {"INVALID_ARGUMENT"}
    for at, said in {
            2: "line 3: Expecting ':'", 30: "must have exactly one of input, text and token_ids",
            60: "token_ids must have at most 512 tokens", 63: "must be a JSON object",
            61: "id must be new, got 'r7' as on line 8"}.items():
        assert said in messages[number[at]], messages
    assert len({r["line"] for r in errors}) == len(errors) == len(bad) - 1
    by_id = {r["id"]: r for r in errors}
    assert by_id["x30"]["line"] == 31 and by_id["long"]["line"] == 61


def test_bad_lines_and_a_record_cut_in_half_cost_nothing(job, tmp_path, monkeypatch):
    """500 lines with every fault of a line, a kill half-way, and half of the last record lost."""
    good = [json.dumps(line).encode() + b"\r\n" for line in many(500)]
    bad = {3: b'{"input"\n', 99: b'{"id": "none"}\n', 150: b"\r\n",
           210: json.dumps({"token_ids": [5] * 600}).encode() + b"\n",
           333: b'{"id": "r7", "input": "zero"}\n'}
    lines = b"\xef\xbb\xbf" + b"".join(
        bad.get(n, line) for n, line in enumerate(good)).rstrip(b"\r\n")
    flags = ("--seed", "1", "--slots", "4")
    assert job(lines, *flags, output="whole.jsonl")[0] == 1
    append = batch_job.Job.append

    def until_half(self, record):
        append(self, record)
        if self.done == 250:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(batch_job.Job, "append", until_half)
        assert job(lines, *flags)[0] == 1
    last = sorted((tmp_path / "out.jsonl.job").glob("records-*"))[-1]
    last.write_bytes(last.read_bytes()[:-len(last.read_bytes().splitlines()[-1]) // 2])
    code, out, errors = job(lines, *flags)
    assert (code, len(out), len(errors)) == (1, 495, 4)
    assert len({r["id"] for r in out}) == 495 and [r["line"] for r in errors] == [4, 100, 211, 334]
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_empty_sources_of_every_kind_have_an_answer_or_a_reason(job):
    lines = [{"input": ""}, {"input": " "}, {"input": "\n\n"}, {"token_ids": []},
             {"token_ids": [1]}, {"token_ids": [0, 0, 0]}, {"input": "zero"}]
    code, out, errors = job([line | {"max_new_tokens": 2} for line in lines])
    assert (code, [r["id"] for r in out]) == (1, [1, 2, 3, 5, 6, 7])
    assert [r["id"] for r in errors] == [4] and out[-1]["text"] == "one two"


def test_output_does_not_depend_on_slots_window_order_or_neighbours(job, tmp_path, monkeypatch):
    _, out, _ = job(many(), "--seed", "4")
    by_id = {r["id"]: r for r in out}
    assert by_id["r1"]["text"] == " ".join(
        f"w{sampled_id(line_seed(4, 'r1'), n)}" for n in range(3))
    monkeypatch.setattr(batch_engine, "_LOOK_AHEAD", 2)
    _, again, _ = job(many()[::-1], "--seed", "4", "--slots", "3", output="again.jsonl")
    assert {r["id"]: r for r in again} == by_id
    _, alone, _ = job(many()[31:32], "--seed", "4", "--slots", "1", output="alone.jsonl")
    assert alone == [by_id["r31"]]
    _, other, _ = job(many(), "--seed", "5", output="other.jsonl")
    assert other != out


def test_job_without_a_seed_keeps_the_one_it_drew(job, engines, tmp_path, capsys):
    lines = [{"token_ids": [10, 9], "temperature": 1}] * 3
    assert job(lines, "--json")[0] == 0
    seed = json.loads(capsys.readouterr().out)["seed"]
    first = (tmp_path / "out.jsonl").read_bytes()
    assert job(lines, output="second.jsonl")[0] == 0
    assert (tmp_path / "second.jsonl").read_bytes() != first
    assert job(lines, "--seed", str(seed), output="third.jsonl")[0] == 0
    assert (tmp_path / "third.jsonl").read_bytes() == first


def test_summary_is_one_document_and_counts_everything(job, capsys):
    lines = [{"input": "zero", "max_new_tokens": 2, "target": "one two"},
             {"input": "ten", "max_new_tokens": 2, "target": "eleven twelve thirteen"},
             {"input": "ten", "max_new_tokens": 2}, {"input": "ten", "max_new_tokens": 0}]
    code, *_ = job("\n".join(map(json.dumps, lines)).encode() + b"\n\n\n", "--json", "--seed", "3")
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert code == 1
    assert (summary["ok"], summary["failed"], summary["skipped"]) == (3, 1, 2)
    assert summary["finish_reasons"] == {"length": 3} and summary["seed"] == 3
    assert (summary["new_tokens"], summary["target_runs"], summary["alpha"]) == (6, 3, 1.0)
    assert summary["scores"]["lines"] == 2
    assert summary["scores"]["rougeL"] == pytest.approx(100 * (1 + 0.8) / 2)
    assert 0 < summary["scores"]["chrf"] < 100
    assert summary["output"].endswith("/out.jsonl")
    assert summary["errors"] == summary["output"].replace("out.jsonl", "out.errors.jsonl")
    assert summary["run"]["lines"] == 6 and summary["run"]["lines_per_second"] > 0
    assert "3 ok, 1 failed, 2 skipped (blank)" in err and "2 lines with a target: bleu" in err
    assert "\r" not in err  # no progress bar without a terminal


def test_targets_without_sacrebleu_are_refused_before_any_work(job, engines, tmp_path, monkeypatch):
    monkeypatch.setattr(scores.importlib.util, "find_spec", lambda name: None)
    lines = [{"input": "zero"}, {"input": "say \"target\""}, {"input": "a", "target": "b"}]
    with pytest.raises(ValueError, match="line 3 has a target and sacrebleu is not installed"):
        job(lines)
    assert not engines and not (tmp_path / "out.jsonl.job").exists()
    assert job(lines[:2], "--max_new_tokens", "2")[0] == 0


def test_strict_stops_at_the_first_bad_line_and_the_rest_can_follow(job, tmp_path, capsys):
    lines = [*many(30), {"token_ids": [17, 2]}, *({"id": f"s{n}", "input": "zero"}
                                                  for n in range(3)), {"id": "bad"}]
    code, out, errors = job(lines[:-1], "--strict", "--seed", "1", "--slots", "2")
    assert (code, out, errors) == (1, [], [])
    err = capsys.readouterr().err
    assert "tpuspec batch: line 31: the fake engine does not like 17" in err
    assert re.search(r"[1-9]\d? of 34 lines are done", err)
    code, out, errors = job(lines[:-1], "--seed", "1")
    assert (code, len(out), errors[0]["line"]) == (1, 33, 31)
    code, out, _ = job(lines, "--strict", output="other.jsonl")
    assert (code, out) == (1, [])
    assert "line 35: must have exactly one" in capsys.readouterr().err


def test_text_and_gzip_in_and_out(engines, tmp_path):
    source, out = tmp_path / "in.txt.gz", tmp_path / "out.txt.gz"
    source.write_bytes(gzip.compress(b"\xef\xbb\xbfzero\r\n\n\xff\nten"))
    flags = ("--max_new_tokens", "2", "--seed", "0")
    assert batch_child.run("--input", str(source), "--output", str(out), *flags) == 1
    assert gzip.decompress(out.read_bytes()) == b"one two\nw2 w3\n\neleven twelve\n"
    assert records(tmp_path / "out.errors.jsonl")[0]["line"] == 3
    first = out.read_bytes()
    out.unlink()
    for path in (tmp_path / "out.txt.gz.job").iterdir():
        path.unlink()
    (tmp_path / "out.errors.jsonl").unlink()
    batch_child.run("--input", str(source), "--output", str(out), *flags)
    assert out.read_bytes() == first  # no time and no name in the gzip header


def test_lines_of_text_stay_lines(tmp_path, engines, monkeypatch):
    vocabulary = byte_vocabulary()
    text = vocabulary.decode(vocabulary.encode("a\nb c")[:-1])
    assert "\n" in text
    entry = {"line": 1, "output": {"text": text, "finish_reason": "eos"}, "counts": [0] * 5}
    folder = tmp_path / "folder"
    folder.mkdir()
    batch_report._write([entry], folder, storage.File(str(tmp_path / "x.txt")))
    assert (folder / "output").read_text() == "a b c\n"


def test_store_of_objects_in_and_out(engines):
    store = fsspec.filesystem("memory")
    store.pipe_file("/bucket/in.jsonl", b'{"input": "zero"}\n' * 3 + b"{}\n")
    args = ("--input", "memory://bucket/in.jsonl", "--output", "memory://bucket/out.jsonl.gz",
            "--max_new_tokens", "2")
    assert batch_child.run(*args) == 1
    out = gzip.decompress(store.cat_file("/bucket/out.jsonl.gz")).splitlines()
    assert [json.loads(line)["text"] for line in out] == ["one two"] * 3
    assert json.loads(store.cat_file("/bucket/out.errors.jsonl"))["line"] == 4
    assert [path.rsplit("/")[-1] for path in store.ls("/bucket/out.jsonl.gz.job", detail=False)
            ] == ["job.json"]
    assert batch_child.run(*args) == 1 and len(engines) == 1  # complete already


def test_second_writer_of_an_object_is_refused(engines, monkeypatch):
    store = fsspec.filesystem("memory")
    store.pipe_file("/two/in.jsonl", b'{"input": "zero"}\n' * 3)
    first = f"records-{1:012d}-{3:012d}.jsonl"
    args = ("--input", "memory://two/in.jsonl", "--output", "memory://two/out.jsonl")

    def meanwhile(*_, **__):  # the other one is a little faster
        storage.Folder(storage.File("memory://two/out.jsonl.job")).create(first, b"")
        return models.Served(engine=FakeEngine(), vocabulary=FakeVocabulary(),
                             info=ModelInfo(name="count"))

    monkeypatch.setattr(models, "load", meanwhile)
    with pytest.raises(ValueError, match="another process is writing memory://two/out.jsonl.job"):
        batch_child.run(*args)
    assert not store.exists("/two/out.jsonl")


@pytest.mark.parametrize("flag, value, said", [
    ("--temperature", "0.5", "settings temperature was 0.0, now 0.5"),
    ("--seed", "6", "settings seed was 5, now 6"),
    ("--source_buckets", "32", r"settings source_buckets was \[32, 128, 512\], now \[32\]"),
    ("--dtype", "bfloat16", "model dtype was 'float32', now 'bfloat16'")])
def test_other_settings_are_refused_by_name(job, flag, value, said):
    assert job(BROKEN, "--strict", "--seed", "5", "--slots", "1")[0] == 1
    with pytest.raises(ValueError, match=said):
        job(BROKEN, flag, value)
    assert job(BROKEN, "--slots", "2")[0] == 1


def test_other_input_or_model_is_refused_by_name(job, tmp_path):
    assert job(BROKEN, "--strict", "--slots", "1")[0] == 1
    with pytest.raises(ValueError, match="input sha256 was"):
        job([{"input": "zero"}, {"input": ""}])
    (tmp_path / "draft" / "weights").write_text("DRAFT")
    with pytest.raises(ValueError, match=r"begun with something else: model draft was .* Run it"):
        job(BROKEN)


def test_output_that_is_not_the_jobs_is_never_overwritten(job, tmp_path):
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(ValueError, match="out.jsonl exists and is not of this job"):
        job([{"input": "zero"}])
    assert (tmp_path / "out.jsonl").read_text() == "precious"
    assert not (tmp_path / "out.jsonl.job").exists()


def test_complete_job_is_not_run_again(job, engines, tmp_path, capsys):
    assert job(many(5))[0] == 0
    assert job(many(5), "--json")[0] == 0
    assert len(engines) == 1 and json.loads(capsys.readouterr().out)["ok"] == 5
    assert [path.name for path in (tmp_path / "out.jsonl.job").iterdir()] == ["job.json"]
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(ValueError, match="was made and is gone"):
        job(many(5))


def test_job_goes_on_after_a_failure_of_the_engine(monkeypatch, tmp_path, job):
    assert job(many(300), "--seed", "2", output="whole.jsonl")[0] == 0
    engines = batch_child.install(monkeypatch.setattr, tmp_path, fail_at_step=40)
    runs = 0
    while job(many(300), "--seed", "2")[0] == 1:
        runs += 1
        assert runs < 30
    assert runs > 1 and len(engines) == runs + 1
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("moment", ["published", "completed", "unpublished"])
def test_job_that_ends_while_it_writes_its_output_writes_it_again(
        monkeypatch, job, engines, tmp_path, moment):
    lines = [*many(), {"id": "bad"}]
    assert job(lines, "--seed", "2", output="whole.jsonl")[0] == 1
    (tmp_path / "whole.errors.jsonl").rename(tmp_path / "whole.errors")

    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        owner, name = {"published": (batch_job.Job, "complete"),
                       "completed": (storage.Folder, "remove"),
                       "unpublished": (storage.File, "publish")}[moment]
        if moment == "completed":  # the first call of a fresh job finds nothing to remove
            patch.setattr(owner, name, lambda self, names: killed() if names else None)
        else:
            patch.setattr(owner, name, killed)
        with pytest.raises(Killed):
            job(lines, "--seed", "2")
    assert job(lines, "--seed", "2")[0] == 1
    assert len(engines) == 2  # no line was answered twice
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert (tmp_path / "out.errors.jsonl").read_bytes() == (tmp_path / "whole.errors").read_bytes()
    assert [path.name for path in (tmp_path / "out.jsonl.job").iterdir()] == ["job.json"]


@pytest.mark.parametrize("damage", ["cut", "lost", "garbled", "stray", "forgotten"])
def test_records_that_are_torn_or_missing_are_made_again(job, tmp_path, monkeypatch, damage):
    lines = [*many(), {"id": "bad"}]
    assert job(lines, "--seed", "2", output="whole.jsonl")[0] == 1
    with monkeypatch.context() as patch:
        patch.setattr(storage.File, "publish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job(lines, "--seed", "2")
    files = sorted((tmp_path / "out.jsonl.job").glob("records-*"))
    assert len(files) == 5
    if damage == "cut":
        files[-1].write_bytes(files[-1].read_bytes()[:-40])
    elif damage == "lost":
        files[2].unlink()
    elif damage == "garbled":
        files[1].write_bytes(b"\0" * 19 + b"\n" * 20)
    elif damage == "forgotten":
        (tmp_path / "out.jsonl.job" / "job.json").unlink()
    else:
        (tmp_path / "out.jsonl.job" / f"records-{92:012d}-{99:012d}.jsonl.draft").write_text("{")
        (tmp_path / "out.jsonl.job" / "draft-abc").mkdir()
    (tmp_path / "out.errors.jsonl").unlink(missing_ok=True)
    assert job(lines, "--seed", "2")[0] == 1
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_missing_record_is_never_passed_over(job, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(batch_job.Job, "complete", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job(many(20))
    file, = (tmp_path / "out.jsonl.job").glob("records-*")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:-1], lines[0]]))  # one twice, one not at all
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(ValueError, match="is damaged: it lacks the record of line "):
        job(many(20))
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("args, said", [
    (("in.jsonl", "out.csv"), "out.csv must end in .txt, .jsonl"),
    (("in.parquet", "out.jsonl"), "in.parquet must end in"),
    (("none.jsonl", "out.jsonl"), "none.jsonl"),
    (("in.jsonl", "in.jsonl"), "in.jsonl exists and is not of this job"),
    (("torn.txt.gz", "out.txt"), "torn.txt.gz is not a whole gzip file"),
    (("nothing.txt.gz", "out.txt"), "nothing.txt.gz is not a whole gzip file: it is empty"),
    (("in.jsonl", "foo://out.jsonl"), "Protocol not known: foo")])
def test_files_that_will_not_do_are_one_clear_line(engines, tmp_path, monkeypatch, args, said):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("in.jsonl").write_text('{"input": "zero"}\n')
    pathlib.Path("nothing.txt.gz").touch()
    pathlib.Path("torn.txt.gz").write_bytes(gzip.compress(b"zero\n" * 99)[:-9])
    with pytest.raises((ValueError, OSError), match=said):
        batch_child.run("--input", args[0], "--output", args[1])
    assert not engines


def test_flags_no_line_can_do_with_are_refused_at_once(job, tmp_path):
    with pytest.raises(ValueError, match="sampling.top_p must be in"):
        job(many(3), "--top_p", "0")
    assert job(many(3))[0] == 0  # nothing was done: the job may be begun again


def test_line_without_an_end_takes_little_memory(job, monkeypatch):
    monkeypatch.setattr(storage, "MAX_LINE", 1000)
    monkeypatch.setattr("tpuspec.serving.batch_input.MAX_LINE", 1000)
    lines = b'{"input": "' + b"a " * 3000 + b'"}\n{"input": "zero"}\n'
    code, out, errors = job(lines, "--max_new_tokens", "1")
    assert (code, [r["text"] for r in out], [r["line"] for r in errors]) == (1, ["one"], [1])
    assert "line 1: must have at most 1000 bytes" in errors[0]["error"]["message"]


def test_empty_input_gives_an_empty_output(job, engines, tmp_path):
    assert job(b"") == (0, [], [])
    assert (tmp_path / "out.jsonl").read_bytes() == b"" and not engines


def test_lines_that_ask_for_them_have_log_probabilities(job):
    code, out, _ = job([{"token_ids": [30, 2], "logprobs": 0}, {"token_ids": [30, 2]},
                        {"token_ids": [30], "max_new_tokens": 2, "logprobs": 2}])
    assert code == 0 and "logprob" not in out[1]
    assert out[0]["logprob"] == -0.375 and out[0]["token_logprobs"] == [0.0, -0.125, -0.25]
    assert "top_logprobs" not in out[0]
    assert out[2]["top_logprobs"] == [[[31, 0.0], [32, -1.0]], [[32, -0.125], [33, -1.125]]]


def test_job_that_goes_on_without_the_flag_still_has_log_probabilities(job, engines):
    flags = ("--logprobs", "1", "--logit_bias", "5:1.5")
    lines = [*BROKEN, {"token_ids": [40, 5], "max_new_tokens": 2}]
    assert job(lines, "--strict", "--slots", "1", *flags)[:2] == (1, [])
    code, out, errors = job(lines, "--slots", "1", *flags[2:])
    assert (code, len(errors)) == (1, 1)
    assert [len(line["top_logprobs"]) for line in out] == [2, 2]
    assert len(engines) == 2


def test_options_of_a_line_are_those_of_the_request(job):
    code, out, errors = job([
        {"input": "zero", "logit_bias": {"5": 1.5}, "banned_ids": [3], "max_new_tokens": 2},
        {"input": "zero", "allowed_ids": [3], "banned_ids": [3]},
        {"input": "zero", "logit_bias": {"five": 1}}])
    assert (code, len(out)) == (1, 1)
    assert "allowed_ids must have an id that is not one of banned_ids" in (
        errors[0]["error"]["message"])
    assert "five" in errors[1]["error"]["message"]
