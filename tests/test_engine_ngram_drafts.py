"""Looked-up drafts as the engine runs them: without a draft model, and beside one."""

import dataclasses

import numpy as np
import pytest
from engines import Job, engine_with, run, solo
from programmable import count, rand

from tpuspec import mesh as mesh_lib
from tpuspec.config import EngineConfig, Sampler
from tpuspec.decode_state import FinishReason
from tpuspec.draft_lengths import DraftLengths, Step
from tpuspec.engine import Engine
from tpuspec.kernel_choice import XLA, KernelChoice
from tpuspec.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compilation")

ALONE = EngineConfig(slots=3, source_buckets=(8,), max_target_length=60, draft_lengths=(0, 4),
                     draft_length=4, ngram_drafts=True)
BESIDE = dataclasses.replace(ALONE, draft_length=None)
SHAPE = dict(vocab=48, layers=1, bias_std=1.0)
REPEATS = rand(0, vocab=48, layers=1)  # its greedy outputs soon go in circles
TARGET, NOISY = rand(0, **SHAPE), rand(0, noise=0.05, **SHAPE)
GREEDY, RANDOM = SamplingParams(), SamplingParams(temperature=1.0)


def jobs(**fields) -> list[Job]:
    fields = dict(eos_ids=(), max_new_tokens=40, sampling=RANDOM) | fields
    return [Job(source=[5, 9, 7, 1], seed=1, **fields),
            Job(source=[11, 30, 11, 30, 1], seed=2, start=7, **fields),
            Job(source=[8], seed=3, decoder_prompt=(4, 30, 4, 9, 4), start=2, **fields),
            Job(source=[40, 4, 1], seed=4, start=30, **fields)]


SLOTS = [0, 1, 2, 2]


# ---- without a draft model ---------------------------------------------------


def test_a_target_alone_gives_the_ids_of_plain_decoding_and_drafts():
    engine = engine_with(REPEATS, None, ALONE)
    plain = run(engine, jobs(sampling=GREEDY, draft_length=0), SLOTS)
    assert sum(result.stats.drafted for result in plain) == 0
    results = run(engine, jobs(sampling=GREEDY), SLOTS)
    assert [result.ids for result in results] == [result.ids for result in plain]
    for result in results:
        assert result.stats.accepted > 5 and result.stats.steps < 36
        # Where nothing is found nothing is tried.
        assert any(step.drafted == step.examined == 0 for step in result.per_step)
    sampled = run(engine, jobs(), SLOTS)
    assert [result.ids for result in sampled] == [solo(engine, job).ids for job in jobs()]


def test_an_output_that_copies_its_source_and_ends_with_it():
    """The end id, and the length limit, in the middle of a block."""
    target = count({6: 1}, vocab=48)  # 3 4 5 6, then the end
    engine = engine_with(target, None, ALONE)
    job = Job(source=[9, 3, 4, 5, 6, 1], draft_length=4)
    results = run(engine, [job, dataclasses.replace(job, eos_ids=(1, 5)),
                           dataclasses.replace(job, eos_ids=(), max_new_tokens=3)])
    assert [result.ids for result in results] == [[3, 4, 5, 6, 1], [3, 4, 5], [3, 4, 5]]
    assert [result.finish for result in results] == [
        FinishReason.EOS, FinishReason.EOS, FinishReason.LENGTH]
    for result, accepted in zip(results, (4, 2, 2), strict=True):
        assert [step.emitted for step in result.per_step] == [1, len(result.ids) - 1]
        assert result.stats.accepted == result.stats.examined == accepted


def test_who_takes_over_a_source_looks_drafts_up_in_it_and_nobody_in_an_earlier_one():
    target = count(vocab=48)
    engine = engine_with(target, None, ALONE)
    job = Job(source=[20, 3, 4, 5, 6, 7, 8, 1], eos_ids=(), max_new_tokens=6, draft_length=4)
    ran = []
    run_key, engine._run = engine._run, lambda key, *args: ran.append(key[0]) or run_key(key, *args)
    try:
        results = run(engine, [job, job, dataclasses.replace(job, start=3)], [0, 1, 0])
        assert ran.count("copy") == 2
        for result in results:
            assert [step.accepted for step in result.per_step] == [0, 4]
        other = solo(engine, dataclasses.replace(job, source=[20]))
    finally:
        del engine._run
    assert other.ids == results[0].ids and other.stats.drafted == 0


def test_what_an_engine_without_a_draft_takes():
    target = TARGET
    with pytest.raises(ValueError, match=r"\(0,\) without a draft model and ngram_drafts, got"):
        Engine(target, None, dataclasses.replace(ALONE, ngram_drafts=False), vocabulary_size=48)
    with pytest.raises(ValueError, match="must be chosen .* beside a draft model, got 4"):
        Engine(target, target, ALONE, vocabulary_size=48)


def test_a_target_alone_chooses_how_many_to_look_up():
    """From measured times; a greedy output that repeats itself, and one that cannot."""
    engine = engine_with(REPEATS, None, BESIDE)
    engine._lengths = DraftLengths({0: 1.0}, {4: 1.3})
    engine._lengths.timed = lambda *_: None  # by the table, not by this machine's clock
    for sampling, pays in ((GREEDY, True), (SamplingParams(temperature=3.0), False)):
        wanted = jobs(draft_length=None, sampling=sampling)[0]
        for _ in range(3):
            late = solo(engine, wanted).per_step
        drafted = np.mean([step.drafted for step in late])
        assert (drafted > 1) if pays else (drafted < 1), drafted


def test_an_end_that_was_looked_up_is_no_gain():
    """It is accepted, but nothing comes after it: plain steps are as many."""
    engine = engine_with(count({6: 1}, vocab=48), None, BESIDE)
    engine._lengths = DraftLengths({0: 1.0}, {4: 1.1})
    engine._lengths.timed = lambda *_: None
    job = Job(source=[6, 1], draft_length=None)
    for _ in range(20):
        result = solo(engine, job)
    assert result.ids == [3, 4, 5, 6, 1] and len(result.per_step) == 5
    assert solo(engine, dataclasses.replace(job, draft_length=4)).stats.accepted == 1
    running = [engine._lengths.newcomer("", 4)]
    assert running[0].found > 0.1 and running[0].looked_up(4)[1] < 1.2


# ---- beside one --------------------------------------------------------------


class Script(DraftLengths):
    """Stretches of plain steps, of looking up, of drafting and of both, whatever is accepted."""

    def __init__(self, seed: int, length: int = 4):
        super().__init__({0: 1.0, length: 1.0}, {length: 1.0})
        self._rng = np.random.default_rng(seed)
        self._kinds_of_steps = [Step(0), Step(length), Step(length), Step(length, looks_up=True)]
        # At first over more than a window of 8.
        self._steps = [Step(length), *[Step(length, looks_up=True)] * 6]
        self.asked: list[Step] = []
        self.mixed = self.examined = 0
        self.refused = 0

    def choose(self, running, shortest=0):
        if not self._steps:
            kind = self._kinds_of_steps[self._rng.integers(4)]
            self._steps = [kind] * int(self._rng.choice([1, 2, 5]))
        step = self._steps.pop(0)
        self.asked.append(Step(shortest) if shortest else step)
        return self.asked[-1]

    def looking_up(self, running, step):
        chosen = [drafting.chosen and bool(self._rng.random() < 0.5) for drafting in running]
        self.mixed += sum(chosen)
        return chosen

    def record(self, kind, drafting, *, accepted, examined, ended=False):
        self.examined += examined
        self.refused += examined - accepted


def scripted(target, draft, seed: int, config=BESIDE) -> Engine:
    engine = engine_with(target, draft, config)
    engine._lengths = Script(seed)
    return engine


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "sampled"])
def test_the_drafts_cache_is_whole_after_looked_up_steps_and_slots(seed, sampling):
    """A draft that is the target is always accepted, if it has read all of the text."""
    target = TARGET
    engine = scripted(target, target, seed)
    before = engine.compilations
    results = run(engine, jobs(sampling=sampling, draft_length=None), SLOTS)
    script = engine._lengths
    assert set(script.asked) == {Step(0), Step(4), Step(4, looks_up=True)}
    assert script.mixed > 3 and script.examined > 15 and script.refused == 0
    assert sum(result.stats.examined for result in results) > script.examined  # looked up, too
    assert engine.compilations == before


def test_greedy_ids_do_not_depend_on_where_drafts_come_from():
    target, draft = TARGET, NOISY
    plain = run(engine_with(target, draft, BESIDE), jobs(sampling=GREEDY, draft_length=0), SLOTS)
    for seed in range(3):
        chosen = run(scripted(target, draft, seed), jobs(sampling=GREEDY, draft_length=None), SLOTS)
        assert [result.ids for result in chosen] == [result.ids for result in plain]


def test_requests_that_name_a_draft_length_take_the_models_drafts():
    """A seed then gives the same output whatever the neighbours choose."""
    target, draft = TARGET, NOISY
    named = [dataclasses.replace(job, draft_length=length)
             for job, length in zip(jobs(), (3, None, 0, None), strict=True)]
    alone = [solo(engine_with(target, draft, BESIDE), named[i]).ids for i in (0, 2)]
    engine = scripted(target, draft, 0)
    results = run(engine, named, SLOTS)
    assert engine._lengths.mixed > 0
    assert [results[0].ids, results[2].ids] == alone
    assert results[2].stats.drafted == 0
    assert max(step.drafted for step in results[0].per_step) == 3


@pytest.mark.slow
def test_coupled_ids_do_not_depend_on_where_drafts_come_from():
    target, draft = TARGET, NOISY
    config = dataclasses.replace(BESIDE, sampler=Sampler.COUPLED)
    plain = run(engine_with(target, draft, config), jobs(draft_length=0), SLOTS)
    for seed in range(3):
        chosen = run(scripted(target, draft, seed, config), jobs(draft_length=None), SLOTS)
        assert [result.ids for result in chosen] == [result.ids for result in plain]


@pytest.mark.slow
def test_interpreted_kernels_take_looked_up_drafts_too():
    """All of them; the draft, which is the target, reads by one kernel what was looked up."""
    target = rand(0, **SHAPE, d_model=128, d_kv=64, num_heads=2)
    config = dataclasses.replace(BESIDE, slots=2, max_target_length=24, draft_lengths=(0, 3))
    wanted = [dataclasses.replace(job, max_new_tokens=16, start=0, draft_length=None)
              for job in (jobs(sampling=GREEDY)[0], jobs(sampling=RANDOM)[2])]
    found = []
    for kernels in (XLA, KernelChoice(implementation="pallas", interpret=True)):
        engine = Engine(target, target, config, vocabulary_size=48, kernels=kernels)
        engine.compile()
        engine._lengths = Script(0, length=3)
        found.append([result.ids for result in run(engine, wanted)])
        assert engine._lengths.mixed > 0 and engine._lengths.refused == 0
    assert found[0] == found[1]


def test_a_measured_engine_runs_by_its_own_choice():
    target = TARGET
    engine = engine_with(target, rand(5, **SHAPE), BESIDE)
    cost = engine.measure()
    assert set(cost.step_ms) == {0, 4} and set(cost.look_up_ms) == {4}
    before = engine.compilations
    plain = run(engine, jobs(sampling=GREEDY, draft_length=0), SLOTS)
    results = run(engine, jobs(sampling=GREEDY, draft_length=None), SLOTS)
    assert [result.ids for result in results] == [result.ids for result in plain]
    assert engine.compilations == before


@pytest.mark.slow
def test_slots_that_are_split_over_devices_look_drafts_up():
    target, draft = TARGET, NOISY
    config = dataclasses.replace(BESIDE, slots=4)
    found = []
    for mesh in (None, mesh_lib.make_mesh(2, 2)):
        engine = Engine(target, draft, config, vocabulary_size=48, mesh=mesh)
        engine.compile()
        engine._lengths = Script(1)
        results = run(engine, jobs(sampling=GREEDY, draft_length=None))
        assert engine._lengths.mixed > 0
        found.append([result.ids for result in results])
    assert found[0] == found[1]
