"""Coupled sampling: one output for a seed whatever the draft and γ, and the target's distribution.

The same programs as in ``test_exactness``, and the engine on models whose outputs depend on all
that went before.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from engines import TINY, Job, engine_with, run, solo
from programmable import chain, chain_of_logits, fixed, rand
from scipy import stats
from test_exactness import (
    ADJUSTED,
    P_CHAIN,
    P_FIXED,
    Q_CHAIN,
    Q_FIXED,
    SEQUENCE,
    SETTINGS,
    V,
    check,
    expected_sequences,
    pvalue,
    raw_logits,
    sample,
    triples,
    warped,
)

from tpuspec.config import EngineConfig, Sampler
from tpuspec.coupled_sampling import accept_equal, arrivals, choose
from tpuspec.kernels import WarpOptions
from tpuspec.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compilation")

COUPLED = dict(sampler=Sampler.COUPLED)
ENGINE = dataclasses.replace(TINY, sampler=Sampler.COUPLED)


def options(temperature, top_k=0, top_p=1.0, min_p=0.0, rows=1) -> WarpOptions:
    return WarpOptions(jnp.full(rows, temperature), jnp.full(rows, top_k, jnp.int32),
                       jnp.full(rows, top_p), jnp.full(rows, min_p))


# ---- the numbers and the choice ------------------------------------------------


def test_arrivals_are_exponential_and_independent():
    seeds = jnp.stack([jnp.zeros(200, jnp.uint32), jnp.arange(200, dtype=jnp.uint32)], axis=1)
    positions = jnp.broadcast_to(jnp.arange(3), (200, 3))
    found = np.asarray(arrivals(seeds, positions, options(1.0, rows=200), 101))
    assert found.shape == (200, 3, 101) and (found > 0).all() and np.isfinite(found).all()
    assert stats.kstest(found.ravel(), "expon").pvalue > 1e-3
    for a, b in ((found[:-1], found[1:]), (found[:, :-1], found[:, 1:]),
                 (found[..., :50], found[..., 50:100]), (found[..., :-1], found[..., 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
    other = np.asarray(arrivals(seeds[5:6], positions[:1] + 1, options(1.0), 101))
    np.testing.assert_array_equal(other[0, :2], found[5, 1:])  # by seed, position and id alone


@pytest.mark.parametrize("setting", [dict(temperature=1.0), dict(temperature=0.5, top_p=0.95)])
def test_choice_has_the_frequencies_of_the_warped_distribution(setting):
    """Small probabilities too: they are where noise of few bits would show."""
    p = np.array([0.4, 0.3, 0.2, 0.05, 0.03, 0.015, 0.004, 0.001])
    outputs = 100_000
    seeds = jnp.stack([jnp.full(outputs, 3, jnp.uint32),
                       jnp.arange(outputs, dtype=jnp.uint32)], axis=1)
    rows = options(**setting, rows=outputs)
    times = arrivals(seeds, jnp.ones((outputs, 1), jnp.int32), rows, 8)
    logits = jnp.broadcast_to(jnp.asarray(np.log([*p, 1.0]), jnp.float32), (outputs, 1, 9))
    tokens, sound = choose(logits, rows, times, 8)  # the ninth id does not exist
    expected = warped(p[:, None], **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | setting)[:, 0]
    assert sound.all() and pvalue(np.bincount(tokens[:, 0], minlength=8), expected) > 1e-4


def test_greedy_rows_take_the_lowest_of_the_largest_and_unsound_ones_are_reported():
    logits = jnp.asarray([[[1, 5, 5, 0], [0, jnp.nan, 1, 2], [jnp.inf, 0, 0, 0]]], jnp.float32)
    times = jnp.asarray([[[9, 9, 0.1, 1]] * 3], jnp.float32)
    for temperature in (0.0, 1.0):
        tokens, sound = choose(logits, options(temperature), times, 4)
        assert sound.tolist() == [[True, False, False]]
        assert int(tokens[0, 0]) == (1 if temperature == 0 else 2)
        assert (np.asarray(tokens) < 4).all()


def test_drafts_are_accepted_up_to_the_first_that_is_not_the_targets_own():
    """By hand: greedy, so that the own choices are 3, 4, 5."""
    logits = jnp.asarray(np.eye(8)[[3, 4, 5]], jnp.float32)[None].repeat(5, 0)
    drafts = jnp.asarray([[3, 4], [3, 7], [7, 4], [3, 4], [3, 4]])
    found = accept_equal(drafts, logits, options(0.0, rows=5), jnp.ones((5, 3, 8)),
                         jnp.asarray([2, 2, 2, 1, 2]), jnp.asarray([True] * 4 + [False]), 8)
    assert found.accepted_B.tolist() == [2, 1, 0, 1, 0]
    assert found.next_token_B.tolist() == [5, 4, 3, 4, 0]
    assert found.overlap_Bγ.tolist() == [[1, 1], [1, 0], [0, 0], [1, 0], [0, 0]]


# ---- whole steps ---------------------------------------------------------------


@pytest.mark.parametrize("batch", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_plain_outputs_have_the_targets_distribution(batch):
    target = chain(P_CHAIN)
    for setting in SETTINGS:
        tokens = sample(target, target, 0, batch, outputs=2000, **COUPLED, **setting)
        expected = warped(P_CHAIN, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | setting)
        assert check(tokens, expected) > 1e-4, setting


@pytest.mark.slow
@pytest.mark.parametrize(("draft_length", "batch"), [(1, 1), (1, 4), (4, 1), (4, 4)])
def test_outputs_with_drafts_are_those_without_one_by_one(draft_length, batch):
    target = chain(P_CHAIN)
    for setting in SETTINGS:
        plain = sample(target, target, 0, batch, outputs=2000, **COUPLED, **setting)
        for draft in (chain(Q_CHAIN), fixed({3: 0.9, 9: 0.1}, V)):
            tokens = sample(target, draft, draft_length, batch, outputs=2000, **COUPLED, **setting)
            np.testing.assert_array_equal(tokens, plain)
    for number, chosen in enumerate(ADJUSTED):
        target, draft = chain_of_logits(raw_logits(P_CHAIN)), chain_of_logits(raw_logits(Q_CHAIN))
        # As many steps of each are not as many tokens, where a prompt comes first.
        plain, tokens = (
            sample(target, draft, length, batch, outputs=2000, **COUPLED, **chosen)[:, :SEQUENCE]
            for length in (0, draft_length))
        np.testing.assert_array_equal(tokens, plain)
        assert triples(tokens, expected_sequences(number)) > 1e-4, chosen


def test_acceptance_is_that_of_two_races_with_the_same_arrivals():
    """Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x): less than Σ min(p, q)."""
    p, q = (np.array([x[i] for i in (5, 6, 7)]) for x in (P_FIXED, Q_FIXED))
    chance = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(3))
    assert 0.5 < chance < np.minimum(p, q).sum() - 0.05
    rows = options(1.0, rows=50_000)
    seeds = jnp.stack([jnp.full(50_000, 8, jnp.uint32), jnp.arange(50_000, dtype=jnp.uint32)], 1)
    times = arrivals(seeds, jnp.ones((50_000, 1), jnp.int32), rows, 3)
    own, drafts = (choose(jnp.broadcast_to(jnp.log(jnp.asarray(x, jnp.float32)), (50_000, 1, 3)),
                          rows, times, 3)[0] for x in (p, q))
    assert float(np.mean(np.asarray(own) == np.asarray(drafts))) == pytest.approx(chance, abs=0.01)


# ---- on the engine -------------------------------------------------------------


def jobs(**fields) -> list[Job]:
    mixed = [dict(temperature=1.0), dict(temperature=0.7, top_k=8), dict(temperature=0.0),
             dict(temperature=1.0, top_p=0.9, presence_penalty=0.8, frequency_penalty=0.3)]
    return [Job(source=[5 + i, 9, 30, 1], sampling=SamplingParams(**one), seed=i, eos_ids=(7,),
                decoder_prompt=(4, 3) if i == 1 else (), max_new_tokens=28, **fields)
            for i, one in enumerate(mixed)]


def check_engine(config: EngineConfig, drafts: list, lengths: tuple[int, ...]) -> None:
    target = rand(0, vocab=48)
    plain = [solo(engine_with(target, drafts[0], config), job).ids for job in jobs(draft_length=0)]
    for draft in drafts:
        engine = engine_with(target, draft, config)
        for length in lengths:
            asked = jobs(draft_length=length)
            assert [solo(engine, job).ids for job in asked] == plain
            if config.slots >= len(asked):
                results = run(engine, asked)
                assert [result.ids for result in results] == plain
                assert all(r.stats.overlap == r.stats.accepted for r in results)
    assert len({tuple(ids) for ids in plain}) == len(plain)


def test_seed_gives_one_output_whatever_the_draft_the_draft_length_and_the_neighbours():
    check_engine(ENGINE, [rand(0, noise=0.05, vocab=48), rand(5, vocab=48)], (0, 1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 4])
def test_the_same_with_programs_of_their_own_for_each_draft_length(slots):
    config = dataclasses.replace(ENGINE, slots=slots, draft_lengths=(0, 1, 4))
    check_engine(config, [rand(0, noise=0.05, vocab=48), rand(5, vocab=48)], (0, 1, 4))


def test_draft_that_is_the_target_is_always_accepted():
    target = rand(0, vocab=48)
    for result in run(engine_with(target, rand(0, vocab=48), ENGINE), jobs()):
        assert result.stats.alpha == 1 and result.stats.examined > 0


def test_lenience_is_refused():
    target = rand(0, vocab=48)
    engine = engine_with(target, target, ENGINE)
    with pytest.raises(ValueError, match="lenience must be 1 with coupled sampling.*, got 0.5"):
        engine.insert(0, [1], sampling=SamplingParams(lenience=0.5), seed=0, max_new_tokens=4,
                      eos_ids=(), draft_length=4)
    assert not engine.active_slots
