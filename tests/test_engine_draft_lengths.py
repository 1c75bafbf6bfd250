"""Draft lengths that change from step to step, as the engine runs them."""

import dataclasses

import numpy as np
import pytest
from engines import Job, engine_with, run, solo
from programmable import rand

from tpuspec.config import EngineConfig
from tpuspec.draft_lengths import DraftLengths, Step
from tpuspec.engine import Engine
from tpuspec.kernel_choice import KernelChoice
from tpuspec.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = EngineConfig(slots=3, source_buckets=(8,), max_target_length=60, draft_lengths=(0, 1, 4),
                      draft_length=None)
GREEDY, RANDOM = SamplingParams(), SamplingParams(temperature=1.0)
JOBS = [Job(source=[5, 9, 7, 1], eos_ids=(), max_new_tokens=60, draft_length=None),
        Job(source=[11, 30, 1], eos_ids=(), max_new_tokens=58, draft_length=None, start=23),
        Job(source=[8, 1], eos_ids=(), max_new_tokens=20, draft_length=None, start=2),
        Job(source=[40, 4, 1], eos_ids=(), max_new_tokens=30, draft_length=None, start=30)]
SLOTS = [0, 1, 2, 2]


class Script(DraftLengths):
    """Stretches of plain and of drafting steps, whatever is accepted."""

    def __init__(self, seed: int):
        super().__init__(dict.fromkeys(CONFIG.draft_lengths, 1.0))
        rng = np.random.default_rng(seed)
        self.lengths = [4] + [0] * 21  # over more than a window of 8
        for _ in range(100):
            self.lengths += [int(rng.choice([0, 1, 4]))] * int(rng.choice([1, 2, 5]))
        self.asked: list[int] = []

    def choose(self, running, shortest=0):
        self.asked.append(max(self.lengths.pop(0), shortest))
        return Step(self.asked[-1])


def scripted(target, draft, seed: int):
    engine = engine_with(target, draft, CONFIG)
    engine._lengths = Script(seed)
    return engine


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "sampled"])
def test_the_drafts_cache_is_whole_after_any_number_of_plain_steps(seed, sampling):
    """A draft that is the target is always accepted, if it has read all of the text."""
    target = rand(0, vocab=48, bias_std=1.0)
    engine = scripted(target, target, seed)
    results = run(engine, [dataclasses.replace(job, sampling=sampling, seed=place)
                           for place, job in enumerate(JOBS)], SLOTS)
    asked = engine._lengths.asked
    assert {0, 1, 4} <= set(asked[22:])
    assert sum(result.stats.examined for result in results) > 30
    for result in results:
        assert result.stats.accepted == result.stats.examined


@pytest.mark.slow
def test_the_decoder_kernel_catches_up_too():
    """Interpreted: the draft's passes and what it reads after plain steps are one kernel."""
    target = rand(0, vocab=48, d_model=128, d_kv=64, num_heads=2, bias_std=1.0)
    config = dataclasses.replace(CONFIG, slots=2, max_target_length=24)
    engine = Engine(target, target, config, vocabulary_size=48,
                    kernels=KernelChoice(implementation="pallas", interpret=True))
    assert engine._state.draft_cache.stacked
    engine.compile()
    engine._lengths = Script(0)
    engine._lengths.lengths = [4, *[0] * 10, 4, 0, 1, 0, 0, 4, *[1] * 50]
    jobs = [dataclasses.replace(job, max_new_tokens=24, start=start)
            for job, start in zip(JOBS, (0, 3), strict=False)]
    results = run(engine, jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.stats.accepted == result.stats.examined > 5
        plain = solo(engine_with(target, target, CONFIG), dataclasses.replace(
            job, draft_length=0))
        assert result.ids == plain.ids


def test_greedy_ids_do_not_depend_on_the_choice():
    target, draft = rand(0, vocab=48), rand(0, noise=0.05, vocab=48)
    plain = run(engine_with(target, draft, CONFIG),
                [dataclasses.replace(job, draft_length=0) for job in JOBS], SLOTS)
    for seed in range(3):
        chosen = run(scripted(target, draft, seed), JOBS, SLOTS)
        assert [result.ids for result in chosen] == [result.ids for result in plain]


def test_requests_that_name_a_draft_length_keep_it():
    target, draft = rand(0, vocab=48), rand(0, noise=0.05, vocab=48)
    engine = scripted(target, draft, 0)
    jobs = [dataclasses.replace(JOBS[0], sampling=RANDOM, draft_length=length)
            for length in (1, None, 0)]
    alone = [run(scripted(target, draft, 0), [job])[0].ids for job in jobs]
    results = run(engine, jobs)
    assert min(engine._lengths.asked) >= 1  # one request asks for 1
    assert [result.ids for result in results][::2] == alone[::2]
    assert results[2].stats.drafted == 0
    assert max(step.drafted for step in results[0].per_step) == 1
    assert max(step.drafted for step in results[1].per_step) == 4


def test_a_timed_engine_finds_out_what_pays():
    """From measured times; the draft is right about everything or about nothing."""
    target = rand(0, vocab=48)
    for draft, pays in ((target, True), (rand(5, vocab=48), False)):
        engine = engine_with(target, draft, CONFIG)
        engine._lengths = DraftLengths({0: 1.0, 1: 1.3, 4: 1.9})
        engine._lengths.timed = lambda *_: None  # by the table, not by this machine's clock
        job = dataclasses.replace(JOBS[0], sampling=RANDOM)
        run(engine, [job] * 3)  # what is learned stays with the label
        late = run(engine, [job])[0].per_step
        drafted = np.mean([step.drafted for step in late])
        assert (drafted > 3) if pays else (drafted < 1), drafted


def test_a_choice_needs_times_and_an_engine_that_chooses():
    target = rand(0, vocab=48)
    engine = engine_with(target, target, CONFIG)
    engine._lengths = None
    options = dict(sampling=GREEDY, seed=0, max_new_tokens=4, eos_ids=(), draft_length=None)
    with pytest.raises(RuntimeError, match="measure must run before a draft length"):
        engine.insert(0, [1], **options)
    fixed = Engine(target, target, dataclasses.replace(CONFIG, draft_length=4),
                   vocabulary_size=48)
    with pytest.raises(ValueError, match="draft_length must be a number"):
        fixed.insert(0, [1], **options)
    with pytest.raises(ValueError, match="ladder to choose from must be at least 1, got 0"):
        EngineConfig(draft_lengths=(0,), draft_length=None)
