"""The bundled pair in batches: the README's example, and whole jobs as users run them."""

import json
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import time

import pytest

from tpuspec.serving import local

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPTS = (ROOT / "tests" / "data" / "demo_prompts.txt").read_text().splitlines()
# What the slow jobs run with; TPUSPEC_BATCH_LINES=10000 is the full size.
LINES = int(os.environ.get("TPUSPEC_BATCH_LINES", "1000"))
FLAGS = ("--seed", "5", "--max_new_tokens", "32", "--source_buckets", "32", "--slots", "16")


def test_example_of_the_readme_prints_what_plain_decoding_gives(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    example, = (block for block in blocks if "open_engine" in block)
    exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    with local.open_engine(slots=2, source_buckets=(32,), max_new_tokens=32) as engine:
        sources = ["translate English to German: " + text
                   for text in ("I am hungry.", "Can you help me?")]
        plain = [answer.text for answer in engine.generate(sources, draft_length=0)]
    assert [line.rsplit(" ", 2)[0] for line in lines] == plain
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["eos", "eos"]
    assert all(0 <= float(line.split()[-2]) <= 1 for line in lines)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A folder with an input of LINES lines, greedy and sampled."""
    folder = tmp_path_factory.mktemp("jobs")
    with open(folder / "in.jsonl", "w") as file:
        for n in range(LINES):
            print(json.dumps({"id": n, "input": PROMPTS[n % len(PROMPTS)],
                              "temperature": n % 2}), file=file)
    return folder


def start(folder, output: str, *flags: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", "from tpuspec.serving.cli import main; main()", "batch",
         "--input", str(folder / "in.jsonl"), "--output", str(folder / output), "--json",
         *FLAGS, *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def finish(process: subprocess.Popen) -> dict:
    out, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(out)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_sixteen_slots_are_twice_as_fast_as_one_and_give_the_same_lines(jobs):
    many = finish(start(jobs, "out.jsonl"))
    one = finish(start(jobs, "one.jsonl", "--slots", "1"))
    print(json.dumps({"many": many["run"], "one": one["run"]}))
    assert many["ok"] == one["ok"] == LINES
    assert many["run"]["lines_per_second"] > 2 * one["run"]["lines_per_second"]
    a, b = ((jobs / name).read_text().splitlines() for name in ("out.jsonl", "one.jsonl"))
    # Programs of other shapes round otherwise: a rare tie may fall to the other side.
    assert sum(x != y for x, y in zip(a, b, strict=True)) <= LINES // 100


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_real_job_killed_at_random_gives_the_same_output(jobs):
    kills = int(os.environ.get("TPUSPEC_BATCH_KILLS", "5"))
    if not (jobs / "out.jsonl").exists():
        finish(start(jobs, "out.jsonl"))
    rng, killed = random.Random(0), 0
    while killed < kills:
        process = start(jobs, "killed.jsonl")
        done = len(list(jobs.glob("killed.jsonl.job/records-*")))
        wait = rng.choice(["start", "records"])
        while process.poll() is None and wait == "records" and len(
                list(jobs.glob("killed.jsonl.job/records-*"))) <= done:
            time.sleep(0.05)
        time.sleep(rng.random() * 3)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:
            break  # it was complete before the signal came
        killed += 1
    summary = finish(start(jobs, "killed.jsonl"))
    print(json.dumps({"killed": killed, "ok": summary["ok"]}))
    assert killed and summary["ok"] == LINES
    assert (jobs / "killed.jsonl").read_bytes() == (jobs / "out.jsonl").read_bytes()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_lines(tmp_path, monkeypatch):
    """Around the fake engine; the largest resident size, in KiB, of two jobs."""
    code = ("import sys, pathlib, batch_child, resource; "
            "folder = pathlib.Path(sys.argv[1]); batch_child.install(setattr, folder); "
            "batch_child.batch_job._MOST_RECORDS = 1000; "
            "batch_child.run('--input', str(folder / 'in.jsonl'), '--output', "
            "str(folder / 'out.jsonl')); "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
    largest = {}
    for count in (5000, 20_000):
        folder = tmp_path / str(count)
        folder.mkdir()
        with open(folder / "in.jsonl", "w") as file:
            for n in range(count):
                print(json.dumps({"id": f"line {n}", "token_ids": [10, 2] + [5] * (n % 90),
                                  "target": "w11 w12", "eos_ids": [12]}), file=file)
        done = subprocess.run([sys.executable, "-c", code, str(folder)], text=True, check=True,
                              capture_output=True,
                              env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
        largest[count] = int(done.stdout)
        assert (folder / "out.jsonl").read_bytes().count(b"\n") == count
    print(largest, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert largest[20_000] < 1.03 * largest[5000]
