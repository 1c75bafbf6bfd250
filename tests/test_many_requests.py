"""Random requests of all kinds through the engine loop: each gives what it gives alone."""

import dataclasses
import gc
import random

import jax
import pytest
from engines import TINY, engine_with
from programmable import rand
from traffic import Answer, Expected, Visit, expected, random_visits, visit_all

from tpuspec.engine import Engine
from tpuspec.serving.errors import ErrorCode

pytestmark = pytest.mark.usefixtures("quick_compilation")

WIDE = dataclasses.replace(TINY, slots=8, source_buckets=(32,), draft_lengths=(0, 1, 4))


LOOK_UP = dataclasses.replace(WIDE, ngram_drafts=True)


def engine_of(config) -> Engine:
    draft = None if config.ngram_drafts else rand(0, noise=0.05, vocab=48)
    return engine_with(rand(0, vocab=48), draft, config)


def check(visit: Visit, answer: Answer, alone: list[Expected]) -> None:
    """A finished sample is the solo run's, another one a beginning of it."""
    allowed = set()
    if all(sample.finish for sample in answer.samples):
        allowed = {None}
    elif visit.cancelled_after is not None:
        allowed |= {None, ErrorCode.CANCELLED}  # None: left the queue before it ran
    if visit.expires_after is not None:
        allowed.add(ErrorCode.DEADLINE_EXCEEDED)
    assert (answer.error and answer.error.code) in allowed
    for sample, one in zip(answer.samples, alone, strict=True):
        if sample.finish is None:
            assert sample.ids == one.ids[:len(sample.ids)]
            assert one.text.startswith(sample.text)
            continue
        assert (sample.ids, sample.text) == (one.ids, one.text)
        assert (sample.finish.ending, sample.finish.stop) == (one.ending, one.stop)
        assert sample.chunks[-1].stats.emitted == len(sample.ids)
        if visit.request.logprobs is not None:
            own = [token.logprob for token in sample.tokens]
            assert own == pytest.approx(one.logprobs, abs=1e-4)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain loop"])
@pytest.mark.parametrize(("config", "count"), [
    (TINY, 60), pytest.param(WIDE, 500, marks=pytest.mark.slow),
    pytest.param(LOOK_UP, 200, marks=pytest.mark.slow)], ids=["60", "500", "200 looked up"])
def test_random_requests_give_what_they_give_alone_and_leave_nothing_behind(
        config, count, overlap):
    engine = engine_of(config)
    rng = random.Random(count)
    visits = random_visits(rng, count, every=12 / config.slots, draft_lengths=4,
                           longest_source=config.max_source_length, samples=config.slots)
    alone = [[expected(engine, visit.request.sample(index), rng.randrange(config.slots))
              for index in range(visit.request.n)] for visit in visits]
    gc.collect()
    compilations, arrays = engine.compilations, len(jax.live_arrays())
    answers, load, tickets = visit_all(engine, visits, overlap=overlap)
    for visit, answer, one in zip(visits, answers, alone, strict=True):
        check(visit, answer, one)
    samples = [sample for answer in answers for sample in answer.samples]
    finished = [sample for sample in samples if sample.finish is not None]
    assert (load.active_slots, load.queued, load.queued_tokens) == (0, 0, 0)
    assert (load.failed, load.refused) == (0, 0)
    assert load.accepted == len(samples) == load.finished + load.cancelled > count
    assert load.finished == len(finished) > count / 2
    assert {sample.finish.ending.value for sample in finished} == {"eos", "length", "stop"}
    partly = [sample for sample in samples if sample.ids and sample.finish is None]
    assert len(partly) > count / 20  # left while they ran
    assert not engine.active_slots
    gc.collect()
    assert len(tickets) == 0
    assert len(jax.live_arrays()) <= arrays
    assert engine.compilations == compilations
