"""``tpuspec batch --ray`` on a local cluster: a worker is killed, and nothing shows it."""

import json
import signal
import subprocess
import sys

import pytest
import ray_child
from programmable import rand
from tiny_vocabularies import uni_vocabulary

from tpuspec import checkpoint
from tpuspec.serving import batch
from tpuspec.serving.batch_ray import Chips
from tpuspec.serving.cli import make_parser

TINY = dict(vocab_size=320, d_model=16, layers=1, num_decoder_layers=1)
BAD = {3: "no JSON", 40: json.dumps({"id": "x40"}), 41: "",
       70: json.dumps({"input": "b", "temperature": -1})}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pair, and lines of every kind."""
    folder = tmp_path_factory.mktemp("ray")
    for name, noise in (("target", 0.0), ("draft", 0.1)):
        checkpoint.save(folder / name, rand(noise=noise, **TINY), uni_vocabulary())
    with open(folder / "in.jsonl", "w") as file:
        for n in range(120):
            print(BAD.get(n, json.dumps(
                {"id": f"r{n}", "input": "ab " * (n % 5 + 1), "temperature": n % 2,
                 "target": "ab"})), file=file)
    return folder


def flags(folder, output: str) -> list[str]:
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft"),
            "--input", str(folder / "in.jsonl"), "--output", str(folder / output), "--json",
            "--slots", "2", "--source_buckets", "16", "--max_new_tokens", "6",
            "--draft_length", "2", "--seed", "3"]


def run_on_ray(folder, output: str, victim: str, lines: int, *more: str,
               ) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ray_child.__file__, victim, str(lines), *flags(folder, output),
         "--ray", "local", *more], text=True, capture_output=True, timeout=300)


def written(folder, stem: str) -> tuple[bytes, ...]:
    return tuple((folder / f"{stem}{end}").read_bytes() for end in (".jsonl", ".errors.jsonl"))


@pytest.fixture(scope="module")
def whole(folder):
    """What one host makes of the lines."""
    assert batch.run(make_parser().parse_args(["batch", *flags(folder, "whole.jsonl")])) == 1
    return written(folder, "whole")


def test_killed_worker_is_replaced_and_the_output_is_that_of_one_host(folder, whole):
    # A block of 32 lines is on its way on each worker.
    done = run_on_ray(folder, "ray.jsonl", "worker", 20, "--workers", "2")
    assert done.returncode == 1, done.stderr  # some lines are bad
    assert written(folder, "ray") == whole
    summary = json.loads(done.stdout)
    assert (summary["ok"], summary["failed"], summary["skipped"]) == (116, 3, 1)
    assert summary["scores"]["lines"] == 116 and summary["run"]["lost_workers"] == 1
    assert "workers that were lost and replaced: 1" in done.stderr


def test_what_is_missing_is_named(folder, monkeypatch):
    def refused(*more):
        with pytest.raises(ValueError) as error:
            batch.run(make_parser().parse_args(["batch", *flags(folder, "none.jsonl"), *more]))
        return str(error.value)

    assert refused("--workers", "2") == "workers must be with ray, got 2 without"
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'tpuspec[ray]'" in refused("--ray", "auto")
    assert not (folder / "none.jsonl.job").exists()


NODES = [{"Alive": True, "Resources": {"CPU": 208.0, "TPU": 8.0}},
         {"Alive": True, "Resources": {"CPU": 8.0}},
         {"Alive": False, "Resources": {"CPU": 208.0, "TPU": 8.0}},
         {"Alive": True, "Resources": {"CPU": 112.0, "TPU": 4.0}}]


@pytest.mark.parametrize("chips, options, workers", [
    (Chips("TPU", 1), {"resources": {"TPU": 1}}, 12),
    (Chips("TPU", 8), {"resources": {"TPU": 8}}, 1),
    (Chips("CPU", 1), {"num_cpus": 1}, 3)])
def test_engines_are_as_many_as_there_are_chips_for(chips, options, workers):
    assert chips.options == options and chips.workers(NODES) == workers


def test_mesh_that_no_host_has_chips_for_is_refused():
    with pytest.raises(ValueError, match="a node with 16 TPU for mesh"):
        Chips("TPU", 16).workers(NODES)


@pytest.mark.slow
def test_killed_job_goes_on_with_other_workers_to_the_same_output(folder, whole):
    for lines, workers in ((20, "2"), (70, "1")):
        killed = run_on_ray(folder, "killed.jsonl", "self", lines, "--workers", workers)
        assert killed.returncode == -signal.SIGKILL
    refused = run_on_ray(folder, "killed.jsonl", "nothing", 0, "--temperature", "0.5")
    assert refused.returncode == 1
    assert "settings temperature was 0.0, now 0.5" in refused.stderr
    # One host ends what many began.
    assert batch.run(make_parser().parse_args(["batch", *flags(folder, "killed.jsonl")])) == 1
    assert written(folder, "killed") == whole


@pytest.mark.slow
def test_strict_job_on_ray_stops_and_goes_on(folder, whole):
    stopped = run_on_ray(folder, "strict.jsonl", "nothing", 0, "--strict")
    assert stopped.returncode == 1 and "line 4: Expecting value" in stopped.stderr
    assert run_on_ray(folder, "strict.jsonl", "nothing", 0).returncode == 1
    assert written(folder, "strict") == whole
