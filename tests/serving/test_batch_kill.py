"""kill -9 at random moments, in real processes: the output is that of an undisturbed run."""

import contextlib
import json
import multiprocessing
import random
import time

import batch_child
import pytest

from tpuspec.serving import batch_job, storage

LINES = 300


@pytest.fixture(scope="module")
def context():
    """Processes that begin with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tpuspec.serving.batch"])
    return context


def write_input(path) -> None:
    with open(path, "w") as file:
        for n in range(LINES):
            line = {"id": f"r{n}", "token_ids": [10, 2 + n % 23], "temperature": n % 2,
                    "draft_length": n % 3}
            print("not JSON" if n % 50 == 7 else json.dumps(line), file=file)


def run_and_kill(context, folder, args, rng) -> bool:
    """Kills it after a few more files of records, or while it ends; False if it was late."""
    child = context.Process(target=batch_child.main, args=(folder.parent, args))
    parts = set(folder.glob("records-*")) if folder.exists() else set()
    wanted = rng.randint(0, 4)
    child.start()
    while child.is_alive():
        with contextlib.suppress(FileNotFoundError):
            if len(set(folder.glob("records-*")) - parts) >= wanted:
                break
        time.sleep(0.001)
    time.sleep(rng.random() * 0.05)
    child.kill()
    child.join()
    return child.exitcode == -9


def kill_often(context, tmp_path, kills: int, output: str) -> None:
    source, folder = tmp_path / "in.jsonl", tmp_path / f"{output}.job"
    write_input(source)
    with pytest.MonkeyPatch.context() as patch:
        batch_child.install(patch.setattr, tmp_path)
        whole = tmp_path / output.replace("out", "whole")
        assert batch_child.run("--input", str(source), "--output", str(whole),
                               "--seed", "3") == 1
    args = ("--input", str(source), "--output", str(tmp_path / output), "--seed", "3")
    rng, killed = random.Random(kills), 0
    for _ in range(3 * kills):
        if run_and_kill(context, folder, args, rng):
            killed += 1
            if killed == kills:
                break
        else:  # it was complete before: once more from the start
            for path in (tmp_path / output, tmp_path / "out.errors.jsonl", *folder.iterdir()):
                path.unlink(missing_ok=True)
    assert killed == kills
    last = context.Process(target=batch_child.main, args=(tmp_path, args))
    last.start()
    last.join()
    assert last.exitcode == 1  # some lines are bad
    assert (tmp_path / output).read_bytes() == whole.read_bytes()
    assert (tmp_path / "out.errors.jsonl").read_bytes() == (
        tmp_path / "whole.errors.jsonl").read_bytes()
    if output.endswith(".jsonl"):
        ids = [json.loads(line)["id"] for line in (tmp_path / output).read_text().splitlines()]
        assert ids == [f"r{n}" for n in range(LINES) if n % 50 != 7]


@pytest.mark.parametrize("output", ["out.jsonl", "out.jsonl.gz"])
def test_killed_job_goes_on_to_the_same_output(context, tmp_path, output):
    kill_often(context, tmp_path, 3, output)


@pytest.mark.slow
def test_job_killed_twenty_times_gives_the_same_output(context, tmp_path):
    kill_often(context, tmp_path, 20, "out.jsonl")


def test_second_process_on_the_same_output_is_refused(tmp_path, monkeypatch):
    batch_child.install(monkeypatch.setattr, tmp_path)
    write_input(tmp_path / "in.jsonl")
    args = ("--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"))
    held = storage.Folder(storage.File(str(tmp_path / "out.jsonl.job")))
    assert held.lock()
    with pytest.raises(ValueError, match="another process is writing .*out.jsonl"):
        batch_child.run(*args)
    held.unlock()
    assert batch_child.run(*args) == 1
    assert batch_job._MOST_RECORDS == 20  # the child's files of records are small, too
