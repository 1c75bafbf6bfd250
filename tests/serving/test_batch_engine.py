"""Many requests on one engine from plain code: order, seeds, what runs together."""

import contextlib
import dataclasses

import pytest
from fake_engine import CONFIG, FakeEngine, FakeVocabulary, sampled_id

from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving import batch_engine
from tpuspec.serving.batch_engine import BatchEngine, line_seed
from tpuspec.serving.client import make_request
from tpuspec.serving.errors import RequestError
from tpuspec.serving.records import Failure
from tpuspec.serving.request import Ending


@contextlib.contextmanager
def running(engine: FakeEngine | None = None):
    it = BatchEngine(engine or FakeEngine(), FakeVocabulary(), eos_id=1)
    it.start()
    try:
        yield it
    finally:
        it.stop()


def test_answers_come_in_order_and_whole():
    with running() as engine:
        answers = list(engine.generate([[10, 2 + n % 9] for n in range(60)]))
    assert [answer.token_ids for answer in answers] == [
        (*range(11, 13 + n % 9), 1) for n in range(60)]
    assert {answer.finish.ending for answer in answers} == {Ending.EOS}
    assert answers[1].text == "w11 w12 w13" and answers[1].stats.alpha == 1.0
    assert answers[0].request.draft_length == CONFIG.draft_length


def test_seed_of_a_source_is_its_own_and_depends_on_its_place_only():
    def ids(engine, count):
        return [answer.token_ids for answer in engine.generate(
            [[10, 5]] * count, temperature=1.0, seed=7)]

    with running() as engine:
        many = ids(engine, 30)
        assert many[:3] == ids(engine, 3)
        assert many == [(*(sampled_id(line_seed(7, n), p) for p in range(5)), 1)
                        for n in range(1, 31)]
        fresh = [answer.request.seed for answer in engine.generate([[10, 5]] * 20)]
    assert len(set(fresh)) == 20
    assert len({line_seed(7, n) for n in range(1000)} | {line_seed(8, 1)}) == 1001
    assert all(0 <= line_seed(7, n) < 2**53 for n in range(100))


def test_bad_source_is_named_when_its_turn_comes():
    with running() as engine:
        answers = engine.generate(["zero", [], "ten"], max_new_tokens=2)
        assert next(answers).text == "one two"
        with pytest.raises(ValueError, match="source 2: token_ids must have at least 1 id"):
            next(answers)
        with pytest.raises(RequestError, match="source 1: the model gave non-finite logits"):
            next(engine.generate([[13, 5]]))
        assert next(engine.generate(["zero"], max_new_tokens=1)).text == "one"


def test_bad_requests_do_not_concern_their_neighbours():
    requests = [make_request([10, 3]), make_request([5] * 999), Failure("INVALID_ARGUMENT", "x"),
                make_request([17, 3]), make_request([13, 9]), make_request([20, 2])]
    with running() as engine:
        results = list(engine.results(requests))
    assert [getattr(r, "token_ids", None) or r.code for r in results] == [
        (11, 12, 13, 1), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "INTERNAL", "INTERNAL",
        (21, 22, 1)]
    assert "at most 64 tokens" in results[1].message


def test_iteration_that_is_left_early_frees_the_engine():
    with running(FakeEngine(step_seconds=0.001)) as engine:
        answers = engine.generate([[10, 5]] * 400)
        next(answers)
        with pytest.raises(RuntimeError, match="another iteration"):
            next(engine.generate([[10, 5]]))
        answers.close()
        assert [answer.token_ids for answer in engine.generate([[20, 2]] * 30)] == [
            (21, 22, 1)] * 30


def test_engine_that_fails_ends_the_iteration_and_not_line_by_line():
    with running(FakeEngine(fail_at_step=40)) as engine:
        done = []
        with pytest.raises(RequestError, match="the fake device is gone"):
            for result in engine.results(make_request([10, 5]) for _ in range(500)):
                done.append(result)
        assert len(done) < 500 and not [r for r in done if isinstance(r, Failure)]
        with pytest.raises(RequestError, match="the fake device is gone"):
            next(engine.generate([[10, 5]]))


def test_an_engine_that_fails_when_a_slot_is_given_back_leaves_nobody_waiting():
    class Broken(FakeEngine):
        def release(self, slot: int) -> None:
            raise RuntimeError("device lost")

    with running(Broken()) as engine, pytest.raises(RequestError, match="device lost"):
        list(engine.generate([[10, 2]]))


class _Watched(FakeEngine):
    """Notes the programs that every step's requests would choose alone."""

    def __init__(self):
        super().__init__(dataclasses.replace(CONFIG, slots=4))
        self.programs = []
        self.busy = []

    def step(self):
        live = [row for row in self.rows.values() if row.position >= 0]
        self.programs.append({(self.config.rung(row.draft_length),
                               self.config.source_bucket(len(row.source))) for row in live})
        self.busy.append(len(live))
        return super().step()


def test_only_requests_of_one_program_run_together_and_the_slots_are_full():
    """Else an output would depend on its neighbours, by rounding, and so on a resume."""
    requests = [make_request([10, 9, *[5] * (n % 40)], draft_length=n % 4, eos_ids=[16],
                             max_new_tokens=30) for n in range(400)]
    watched = _Watched()
    with running(watched) as engine:
        results = list(engine.results(requests))
    assert not [r for r in results if isinstance(r, Failure)]
    assert all(len(programs) <= 1 for programs in watched.programs)
    assert len(set().union(*watched.programs)) == 6  # rungs 0, 1, 3, and both buckets
    assert sum(watched.busy) / len(watched.busy) > 2.5


def test_sources_are_read_no_further_ahead_than_a_few_windows(monkeypatch):
    monkeypatch.setattr(batch_engine, "_LOOK_AHEAD", 4)
    engine = FakeEngine()
    window = 4 * engine.config.slots
    read = []

    def requests():
        for place in range(300):
            read.append(place)
            # The first takes a hundred steps and all others, one each, wait for it.
            yield make_request([10], max_new_tokens=1 if place else 100, draft_length=0)

    with running(engine) as it:
        ahead = [len(read) - place for place, _ in enumerate(it.results(requests()))]
    assert len(ahead) == 300
    assert batch_engine._HELD * window <= max(ahead) <= (batch_engine._HELD + 1) * window


def test_messages_without_a_source_are_failures():
    with running() as engine:
        result, = engine.results([pb.GenerateRequest()])
    assert result == Failure("INVALID_ARGUMENT", "source must be set: text or token_ids")
