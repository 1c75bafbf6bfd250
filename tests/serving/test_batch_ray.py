"""``tpuspec batch --ray`` on a local cluster: a worker is killed, and nothing shows it."""

import collections
import dataclasses
import json
import random
import signal
import subprocess
import sys
import types

import pytest
import ray_child
from programmable import rand
from tiny_vocabularies import uni_vocabulary

from tpuspec import checkpoint
from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving import batch
from tpuspec.serving.batch_job import checkpoint_identity
from tpuspec.serving.batch_ray import Chips, RayEngine
from tpuspec.serving.batch_worker import Place, Setup, Worker
from tpuspec.serving.cli import make_parser
from tpuspec.serving.client import make_request
from tpuspec.serving.errors import RequestError
from tpuspec.serving.records import Failure

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


SETUP = Setup(target=None, draft=None, identity={}, platform=None, options={"slots": 1})


class Gone(Exception):
    pass


@dataclasses.dataclass(eq=False)
class Call:
    actor: "FakeActor"
    name: str
    arguments: tuple


class FakeActor:
    def __init__(self):
        self.dead = False
        self.calls: list[Call] = []  # that have not ended

    def __getattr__(self, name):
        def remote(*arguments):
            self.calls.append(Call(self, name, arguments))
            return self.calls[-1]

        return types.SimpleNamespace(remote=remote)


class FakeRay:
    """Ray as far as ``RayEngine`` uses it: calls end in any order, a worker's own in theirs.

    Answers are the requests' first ids; ``dies`` says what a worker does not survive.
    """

    exceptions = types.SimpleNamespace(RayError=Gone, RayTaskError=type("Task", (Gone,), {}))

    def __init__(self, rng, *, dies, starts=True):
        self._rng, self._dies, self._starts = rng, dies, starts
        self.lost = 0

    def remote(self, **options):
        return lambda _: types.SimpleNamespace(remote=lambda setup: FakeActor())

    def wait(self, calls, num_returns):
        ready = [call for call in calls if call.actor.dead or call.actor.calls[0] is call]
        return [self._rng.choice(ready)], None

    def get(self, call):
        if not call.actor.dead and (not self._starts if call.name == "start"
                                    else self._dies(*call.arguments)):
            call.actor.dead = True
            self.lost += 1
        if call.actor.dead:
            raise Gone("gone")
        call.actor.calls.remove(call)
        if call.name == "start":
            return Place(host="here", pid=0)
        return [(n, pb.GenerateRequest.FromString(one).token_ids.ids[0])
                for n, one in reversed(list(enumerate(*call.arguments)))]

    def kill(self, worker):
        worker.dead = True


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
    assert chips.options == options | {"scheduling_strategy": "SPREAD"}
    assert chips.workers(NODES) == workers


def test_mesh_that_no_host_has_chips_for_is_refused():
    with pytest.raises(ValueError, match="a node with 16 TPU for mesh"):
        Chips("TPU", 16).workers(NODES)


def test_host_with_other_weights_is_refused(folder):
    target, draft = folder / "target", folder / "draft"
    setup = Setup(target=str(target), draft=str(draft), platform=None, options={}, identity={
        "target": checkpoint_identity(target), "draft": checkpoint_identity(target)})
    with pytest.raises(ValueError, match="draft must be the job's on every host, got other files"):
        Worker(setup).start()


@pytest.mark.parametrize("seed", range(10))
def test_every_request_is_answered_once_whoever_is_lost_and_when(seed):
    rng = random.Random(seed)
    lost = collections.Counter()

    def dies(requests):
        dead = rng.random() < 0.3 and lost[requests[0]] < 2
        lost[requests[0]] += dead
        return dead

    ray = FakeRay(rng, dies=dies)
    engine = RayEngine(ray, SETUP, Chips("CPU", 1), workers=3)
    read = 0
    first_missing = 0

    def messages():
        nonlocal read
        for n in range(400):
            # What was read and has no answer is bounded: blocks of 16, 4 for each worker.
            assert n - first_missing <= 16 * 4 * 3 + 16
            read = n + 1
            yield Failure("INVALID_ARGUMENT", "bad") if n % 7 == 3 else make_request([n + 1])

    engine.start()
    found = {}
    for place, answer in engine.completed(messages()):
        assert place not in found
        found[place] = answer
        while first_missing in found:
            first_missing += 1
    assert read == 400 and ray.lost == engine.lost > 2
    assert found == {n: Failure("INVALID_ARGUMENT", "bad") if n % 7 == 3 else n + 1
                     for n in range(400)}


def test_lines_that_cost_three_workers_end_the_job():
    ray = FakeRay(random.Random(0), dies=lambda requests: any(
        pb.GenerateRequest.FromString(one).token_ids.ids == [40] for one in requests))
    engine = RayEngine(ray, SETUP, Chips("CPU", 1), workers=2)
    engine.start()
    found = []
    with pytest.raises(RequestError, match="lost 3 workers at the same work; the last one: gone"):
        for place, _ in engine.completed(make_request([n]) for n in range(1, 100)):
            found.append(place)
    assert ray.lost == 3 and 38 not in found and set(range(16)) <= set(found)


def test_workers_that_never_start_end_the_job():
    engine = RayEngine(FakeRay(random.Random(0), dies=lambda _: False, starts=False), SETUP,
                       Chips("CPU", 1), workers=2)
    with pytest.raises(RequestError, match="lost 3 workers at the same work"):
        engine.start()


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
