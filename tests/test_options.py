"""Options of a request that change its logits, on the engine; each test named after a fault."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import LONG, TINY, Job, engine_with, run, solo
from flax import nnx
from programmable import anti, chain_of_logits, count, fixed, rand
from sampling_oracle import adjust

from tpuspec.decode_state import FinishReason
from tpuspec.engine import Engine
from tpuspec.sampling import SamplingParams
from tpuspec.token_logprobs import token_logprobs

pytestmark = pytest.mark.usefixtures("quick_compilation")

RAND = dict(vocab=48)
OPTIONS = {
    "repetition": dict(repetition_penalty=2.0),
    "presence": dict(presence_penalty=2.0),
    "frequency": dict(frequency_penalty=1.0),
    "reward": dict(frequency_penalty=-0.5),
    "bias": dict(logit_bias={7: 4.0, 9: -100.0, 20: 100.0}),
    "banned": dict(banned_ids=tuple(range(10, 30))),
    "allowed": dict(allowed_ids=(3, 5, 8, 13, 21, 34)),
    "all": dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2,
                logit_bias={11: 3.0}, banned_ids=(4, 5), allowed_ids=tuple(range(3, 40))),
}
SOURCE = (5, 9, 30, 7, 1)


@functools.cache
def pair():
    return rand(0, **RAND), rand(0, noise=0.05, **RAND)


def rand_engine() -> Engine:
    return engine_with(*pair(), TINY)


def job(options: dict, **fields) -> Job:
    return Job(**{"source": SOURCE, "eos_ids": (), "sampling": SamplingParams(**options)} | fields)


@functools.cache
def teacher_forcing():
    """(params, tokens) -> logits of RAND's target on SOURCE, no cache."""
    graph = nnx.split(pair()[0])[0]
    source, size = jnp.asarray([SOURCE]), jnp.asarray([len(SOURCE)])

    @jax.jit
    def logits_of(params, tokens):
        model = nnx.merge(graph, params)
        return model.decode_teacher_forced(tokens[None], model.encode(source, size), size)[0]

    return logits_of


def target_logits(tokens: Sequence[int]) -> np.ndarray:
    """Rows beyond the tokens mean nothing."""
    padded = np.zeros(1 + TINY.max_target_length, np.int32)
    padded[:len(tokens)] = tokens
    return np.asarray(teacher_forcing()(nnx.split(pair()[0])[1], jnp.asarray(padded)))


def greedy_by_hand(options: dict, prompt: Sequence[int] = ()) -> list[int]:
    """The whole sequence again for every token, the options in numpy."""
    ids: list[int] = []
    for i in range(len(prompt), TINY.max_target_length):
        logits = target_logits([0, *prompt, *ids])[i]
        counts = np.bincount(np.asarray(ids, int), minlength=len(logits))
        ids.append(int(np.argmax(adjust(logits, counts, **options))))
    return ids


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_output_under_options_is_that_of_a_plain_loop(name):
    engine = rand_engine()
    asked = job(OPTIONS[name])
    expected = greedy_by_hand(OPTIONS[name])
    assert expected != solo(engine, job({})).ids
    for k in (0, 1, 4):
        result = solo(engine, dataclasses.replace(asked, draft_length=k))
        assert result.ids == expected
    assert result.stats.accepted > 0


def test_options_of_a_request_do_not_concern_its_neighbours():
    engine = rand_engine()
    jobs = [job({}), job(OPTIONS["all"], start=1), job({"temperature": 1.0}, seed=4),
            job(OPTIONS["presence"] | {"temperature": 1.0}, seed=5, draft_length=2, start=2)]
    together = run(engine, jobs, slots=[0, 1, 2, 3])
    assert [r.ids for r in together] == [solo(engine, one, slot).ids
                                         for slot, one in zip((3, 2, 1, 0), jobs, strict=True)]


def test_a_new_request_does_not_see_the_options_or_counts_of_the_previous_one():
    engine = rand_engine()
    plain, penalised = solo(engine, job({})).ids, solo(engine, job(OPTIONS["all"])).ids
    for _ in range(2):
        assert solo(engine, job(OPTIONS["all"])).ids == penalised
        assert solo(engine, job({})).ids == plain
    engine.insert(0, SOURCE, sampling=SamplingParams(**OPTIONS["all"]), seed=0, max_new_tokens=32,
                  eos_ids=(), draft_length=4)
    engine.step().read()
    engine.release(0)
    assert solo(engine, job(OPTIONS["all"])).ids == penalised


@pytest.mark.parametrize("draft", [count(), anti()])
def test_rejected_drafts_and_what_follows_an_end_do_not_enter_the_counts(draft):
    engine = engine_with(count({12: 1, 1: 20}), draft, LONG)
    result = solo(engine, Job(sampling=SamplingParams(presence_penalty=0.01)))
    assert result.ids == [*range(3, 13), 1]
    counts = np.asarray(engine._state.slots.adjustments.counts_BV)
    assert (counts[0] == np.bincount(result.ids, minlength=counts.shape[1])).all()
    assert not counts[1:].any()


# EOS is always the first choice, 20 the second.
EAGER = np.full((32, 32), -30.0)
EAGER[1], EAGER[20] = 0.0, -1.0


@pytest.mark.parametrize("k", range(9))
def test_minimum_length_is_counted_in_tokens_and_not_in_steps(k):
    model = chain_of_logits(EAGER)
    engine = engine_with(model, model, LONG)
    jobs = [Job(min_new_tokens=m, draft_length=k) for m in range(10)]
    for first in (0, 4, 8):
        for m, result in enumerate(run(engine, jobs[first:first + 4]), first):
            assert result.ids == [20] * m + [1]
            assert result.finish == FinishReason.EOS
    last = solo(engine, Job(min_new_tokens=5, max_new_tokens=5, draft_length=k))
    assert (last.ids, last.finish) == ([20] * 5, FinishReason.LENGTH)
    ends = solo(engine, Job(min_new_tokens=3, eos_ids=(20, 1), draft_length=k))
    assert not {1, 20} & set(ends.ids[:3]) and ends.ids[3:] == [1]


def test_options_compile_nothing_after_warm_up():
    engine = rand_engine()
    solo(engine, job({}))
    before = engine.compilations
    for options in OPTIONS.values():
        for temperature in (0.0, 1.0):
            solo(engine, job(options | {"temperature": temperature}, min_new_tokens=3,
                             eos_ids=(1, 7)))
    assert engine.compilations == before


@pytest.mark.parametrize(("options", "fields", "message"), [
    (dict(logit_bias={48: 1.0}), {}, r"logit_bias id must be in \[0, 47\], got 48"),
    (dict(banned_ids=[-1]), {}, r"banned_ids\[0\] must be in \[0, 47\], got -1"),
    (dict(allowed_ids=[3, 99]), {}, r"allowed_ids\[1\] must be in \[0, 47\], got 99"),
    (dict(banned_ids=range(48)), {}, "banned_ids must leave one of 48 ids, got all"),
    (dict(banned_ids=[3] * 49), {}, "banned_ids must have at most 48 ids, got 49"),
    (dict(banned_ids=[3, 4], allowed_ids=[4, 3]), {},
     "allowed_ids must have an id that is not one of banned_ids, got 2 ids, all banned"),
    ({}, dict(min_new_tokens=9, max_new_tokens=8), r"min_new_tokens must be in \[0, 8\], got 9"),
    ({}, dict(min_new_tokens=-1), r"min_new_tokens must be in \[0, 32\], got -1"),
    (dict(allowed_ids=[1, 7]), dict(eos_ids=[7, 1], min_new_tokens=1),
     "min_new_tokens must be 0 where banned_ids and allowed_ids leave only end ids, got 1")])
def test_options_that_leave_nothing_are_named_with_value_and_bound(options, fields, message):
    engine = rand_engine()
    with pytest.raises(ValueError, match=message):
        engine.insert(**dict(slot=0, source=[1], sampling=SamplingParams(**options), seed=0,
                             max_new_tokens=32, eos_ids=[], draft_length=0) | fields)
    assert not engine.active_slots


def test_only_end_ids_allowed_end_the_output_at_once():
    engine = rand_engine()
    for temperature in (0.0, 1.0):
        options = dict(allowed_ids=(1,), temperature=temperature)
        result = solo(engine, job(options, eos_ids=(1,)))
        assert (result.ids, result.finish) == ([1], FinishReason.EOS)
    assert set(solo(engine, job(dict(allowed_ids=(9,)), max_new_tokens=7)).ids) == {9}


def test_non_finite_logits_are_still_found_under_options():
    engine = rand_engine()
    engine.insert(0, SOURCE, sampling=SamplingParams(**OPTIONS["all"]), seed=0, max_new_tokens=32,
                  eos_ids=(), draft_length=4)
    cache = engine._state.target_cache
    engine._state = dataclasses.replace(engine._state, target_cache=dataclasses.replace(
        cache, cross_v=(cache.cross_v[0].at[0].set(jnp.nan), *cache.cross_v[1:])))
    output = engine.step().read()
    assert output.finish[0] == FinishReason.NON_FINITE and output.num_tokens[0] == 0


# ---- log-probabilities -------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0},
                                     OPTIONS["all"] | {"temperature": 0.5, "top_k": 5}])
def test_logprobs_are_the_targets_own_of_each_emitted_token(options):
    """Not the draft's, not another position's, not those after warps: against a pass over
    the finished output without a cache."""
    engine = rand_engine()
    for k in (0, 1, 4):
        asked = job(options, logprobs=True, eos_ids=(7,), min_new_tokens=9, draft_length=k, seed=3)
        found = solo(engine, asked)
        assert len(found.logprobs) == len(found.ids) >= 10
        logits = target_logits([0, *found.ids[:-1]])
        for i, token in enumerate(found.ids):
            expected = log_softmax(logits[i])
            assert abs(found.logprobs[i] - expected[token]) < 1e-4
            ids, values = zip(*found.top[i], strict=True)
            assert len(ids) == 20
            np.testing.assert_allclose(values, np.sort(expected)[::-1][:20], atol=1e-4)
            np.testing.assert_allclose(expected[list(ids)], values, atol=1e-4)


def test_logprobs_of_accepted_corrected_and_bonus_tokens_are_the_closed_form():
    p, q = {5: 0.5, 6: 0.3, 7: 0.2}, {5: 0.2, 6: 0.3, 7: 0.5}
    engine = engine_with(fixed(p), fixed(q), LONG)
    jobs = [job({"temperature": 1.0}, source=[1], logprobs=i != 1, seed=i, draft_length=k)
            for i, k in enumerate((4, 4, 0, 2))]
    results = run(engine, jobs)
    for i, result in enumerate(results):
        if i != 1:
            np.testing.assert_allclose(result.logprobs, np.log([p[t] for t in result.ids]),
                                       atol=1e-5)
            assert all([t for t, _ in top[:3]] == [5, 6, 7] for top in result.top)
    assert 0 < results[0].stats.accepted < results[0].stats.examined
    assert [r.ids for r in results] == [
        solo(engine, dataclasses.replace(one, logprobs=False)).ids for one in jobs]


def test_ids_that_do_not_exist_have_no_share_in_logprobs():
    logits = np.linspace(-3, 3, 32)
    found = token_logprobs(jnp.asarray(logits, jnp.float32)[None, None], jnp.asarray([[5]]),
                           jnp.asarray(True), 24)
    expected = log_softmax(logits[:24])
    np.testing.assert_allclose(found.tokens, expected[None, None, 5], atol=1e-5)
    np.testing.assert_allclose(found.top[0, 0], expected[:3:-1], atol=1e-5)
    assert found.top_ids[0, 0].tolist() == list(range(23, 3, -1))


def test_nothing_is_computed_where_no_running_request_asks():
    engine = rand_engine()
    solo(engine, job({}, logprobs=True))
    engine.insert(0, SOURCE, sampling=SamplingParams(), seed=0, max_new_tokens=32, eos_ids=(),
                  draft_length=4)
    output = engine.step().read()
    assert output.num_tokens[0] and not any(np.asarray(x).any() for x in output.logprobs)


# ---- decoder prompts ---------------------------------------------------------

PROMPT = (9, 4, 31, 4, 17, 2, 40, 11, 3, 3, 25)


@pytest.mark.parametrize("length", [1, 4, 5, 11])
def test_output_continues_the_decoder_prompt_as_a_plain_loop_does(length):
    """Prompts within a window, as long as it and longer; penalties see new tokens alone."""
    engine = rand_engine()
    prompt = PROMPT[:length]
    for options in ({}, OPTIONS["repetition"]):
        expected = greedy_by_hand(options, prompt)
        jobs = [job(options, decoder_prompt=prompt, max_new_tokens=32 - length, draft_length=k,
                    logprobs=k == 4) for k in (0, 4, 3, 1)]
        for result in (*run(engine, jobs), solo(engine, jobs[0]), solo(engine, jobs[1])):
            assert result.ids == expected
            assert result.stats.emitted == 32 - length == sum(s.emitted for s in result.per_step)
        logits = target_logits([0, *prompt, *expected])[length:]
        own = [log_softmax(row)[t] for row, t in zip(logits, expected, strict=False)]
        np.testing.assert_allclose(result.logprobs, own, atol=1e-4)


def test_requests_without_a_prompt_run_beside_those_with_one():
    engine = rand_engine()
    jobs = [job({}), job({"temperature": 1.0}, decoder_prompt=PROMPT, max_new_tokens=9, seed=1),
            job({"temperature": 1.0}, seed=2, start=1),
            job({}, decoder_prompt=PROMPT[:2], max_new_tokens=30, draft_length=0, start=2)]
    together = [r.ids for r in run(engine, jobs)]
    assert together == [solo(engine, one, 3).ids for one in jobs]
    assert together[0] == solo(engine, job({})).ids


def test_prompt_tokens_are_no_drafts_and_do_not_enter_alpha():
    model = count()
    result = solo(engine_with(model, model, LONG), Job(
        decoder_prompt=(3, 4, 5), max_new_tokens=8, draft_length=4, eos_ids=()))
    assert result.ids == [*range(6, 14)]
    # Windows of 5: the prompt, a draft and a bonus token; 4 drafts and a bonus token; the last.
    assert [(s.drafted, s.accepted, s.examined, s.emitted) for s in result.per_step] == [
        (1, 1, 1, 2), (4, 4, 4, 5), (4, 1, 1, 1)]
    assert [s.overlap for s in result.per_step] == pytest.approx([1, 4, 1])
    wrong = solo(engine_with(model, anti(), LONG), Job(
        decoder_prompt=(3, 4, 5), max_new_tokens=2, draft_length=4, eos_ids=()))
    assert wrong.ids == [6, 7]
    assert [(s.drafted, s.accepted, s.examined, s.emitted) for s in wrong.per_step] == [
        (1, 0, 1, 1), (4, 0, 1, 1)]


def test_prompt_may_be_what_the_model_would_never_say_and_may_hold_end_ids():
    model = count()
    engine = engine_with(model, model, LONG)
    for k in (0, 2, 8):
        result = solo(engine, Job(decoder_prompt=(20, 1, 9), max_new_tokens=3, draft_length=k,
                                  eos_ids=(1, 12), sampling=SamplingParams(banned_ids=(20, 1))))
        assert (result.ids, result.finish) == ([10, 11, 12], FinishReason.EOS)
    eager = chain_of_logits(EAGER)
    engine = engine_with(eager, eager, LONG)
    for k in (0, 2, 8):
        result = solo(engine, Job(decoder_prompt=(5, 1), min_new_tokens=3, draft_length=k,
                                  max_new_tokens=9))
        assert result.ids == [20, 20, 20, 1]


def test_prompt_and_output_reach_the_end_of_the_cache():
    engine = rand_engine()
    for size in (1, 30, 31):
        prompt = (PROMPT * 3)[:size]
        expected = greedy_by_hand({}, prompt)
        for k in (0, 4):
            result = solo(engine, job({}, decoder_prompt=prompt, max_new_tokens=32 - size,
                                      draft_length=k))
            assert (result.ids, result.finish) == (expected, FinishReason.LENGTH)


@pytest.mark.parametrize(("fields", "message"), [
    (dict(decoder_prompt=[3] * 25), r"length of decoder_prompt must be in \[0, 24\], got 25"),
    (dict(decoder_prompt=[3, 48]), r"decoder_prompt id must be in \[0, 47\], got 48")])
def test_prompts_that_do_not_fit_are_named_with_value_and_bound(fields, message):
    engine = rand_engine()
    with pytest.raises(ValueError, match=message):
        engine.insert(**dict(slot=0, source=[1], sampling=SamplingParams(), seed=0,
                             max_new_tokens=8, eos_ids=[], draft_length=0) | fields)


def test_request_that_leaves_within_its_prompt_leaves_nothing_behind():
    engine = rand_engine()
    expected = solo(engine, job({})).ids
    engine.insert(0, SOURCE, sampling=SamplingParams(), seed=0, max_new_tokens=8, eos_ids=(),
                  draft_length=4, decoder_prompt=PROMPT)
    assert engine.step().read().num_tokens[0] == 0
    engine.release(0)
    assert solo(engine, job({}), slot=1).ids == expected
    assert solo(engine, job({})).ids == expected
