"""Speculative output has the target's distribution: whole steps, closed forms.

Programmable models (see ``programmable``) with known next-token distributions run
through the real step program, in batches of 1 and 4, for γ = 1..8. Single tokens at
every position and pairs of successive tokens are compared by chi-square.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from programmable import IMPOSSIBLE, chain, chain_config, chain_of_logits, fixed
from sampling_oracle import sequences
from scipy import stats

from tpuspec import kernels
from tpuspec.config import Sampler
from tpuspec.decode_state import MAX_EOS_IDS, DecodeState, Slots
from tpuspec.kernel_choice import KernelChoice
from tpuspec.kv_cache import DecoderCache
from tpuspec.logit_adjustment import SlotAdjustments
from tpuspec.sampling import SamplingParams, SlotSampling
from tpuspec.speculative_step import step

V, LENGTH = 16, 10
CONFIG = chain_config(V)
P_FIXED = {5: 0.5, 6: 0.3, 7: 0.2}
Q_FIXED = {5: 0.2, 6: 0.3, 7: 0.5}


def _random_chain(seed: int) -> np.ndarray:
    """[V(next), V(last)] over ids 2..6 alone."""
    rng = np.random.default_rng(seed)
    table = np.zeros((V, V))
    table[2:7] = rng.dirichlet(np.ones(5), V).T
    return table


P_CHAIN, Q_CHAIN = _random_chain(1), _random_chain(2)


def warped(table: np.ndarray, temperature: float, top_k: int, top_p: float,
           min_p: float) -> np.ndarray:
    """The oracle's distribution per column, by sorting, in float64."""
    result = np.zeros_like(table)
    for last in range(table.shape[1]):
        column = table[:, last]
        if temperature == 0:
            result[np.argmax(column), last] = 1
            continue
        p = np.where(column > 0, column, 0) ** (1 / temperature)
        order = np.argsort(-p, kind="stable")
        keep = np.ones(len(p), bool)
        if top_k:
            keep[order[top_k:]] = False
        p = p * keep
        if top_p < 1:
            cut = np.searchsorted(np.cumsum(p[order]), top_p * p.sum()) + 1
            p[order[cut:]] = 0
        p[p < min_p * p.max()] = 0
        result[:, last] = p / p.sum()
    return result


@functools.cache
def runner(draft_length: int, batch: int, groups: int, sampler: Sampler = Sampler.REJECTION):
    """(target params, draft params, slots, sources to look up drafts in, slots that do) ->
    tokens and their places in the block of the step they came from, both
    [groups * batch, LENGTH]; 0 after an end id."""
    graph = nnx.split(chain(P_CHAIN))[0]

    @jax.jit
    def run(target_params, draft_params, slots, source_BS=None, looking_up_B=None):
        target = nnx.merge(graph, target_params)
        draft = None if draft_params is None else nnx.merge(graph, draft_params)
        positions = LENGTH * 10 + 10

        def cache():
            return DecoderCache.zeros(CONFIG, slots=batch, positions=positions,
                                      source_positions=1, dtype=jnp.float32)

        def group(number):
            seeds = jnp.stack([jnp.full(batch, number, jnp.uint32),
                               jnp.arange(batch, dtype=jnp.uint32)], axis=1)
            state = DecodeState(
                slots=dataclasses.replace(slots, seed_B2=seeds), target_cache=cache(),
                draft_cache=None if draft is None else cache(), source_BS=source_BS,
                history_BT=None if source_BS is None else jnp.zeros((batch, positions), jnp.int32))

            def turn(carry, _):
                state, out, filled = carry
                state, output = step(target, draft, state, looking_up_B, draft_length=draft_length,
                                     target_width=draft_length + 1, source_positions=1,
                                     vocabulary_size=V, sampler=sampler)
                place = jnp.broadcast_to(jnp.arange(draft_length + 1), output.tokens.shape)
                index = jnp.where(place < output.num_tokens[:, None], filled[:, None] + place,
                                  LENGTH + 100)
                out = out.at[jnp.arange(batch)[:, None], index].set(
                    jnp.stack([output.tokens, place], axis=-1), mode="drop")
                return (state, out, filled + output.num_tokens), None

            start = (state, jnp.zeros((batch, LENGTH, 2), jnp.int32), jnp.zeros(batch, jnp.int32))
            (_, out, _), _ = lax.scan(turn, start, None, length=LENGTH)
            return out

        # Independent engines of ``batch`` slots each, side by side: fast on a CPU.
        outputs = jax.vmap(group)(jnp.arange(groups, dtype=jnp.uint32))
        return jnp.moveaxis(outputs.reshape(groups * batch, LENGTH, 2), -1, 0)

    return run


def sample(*args, **kwargs) -> np.ndarray:
    """Tokens of ``sample_with_places``."""
    return sample_with_places(*args, **kwargs)[0]


def sample_with_places(target, draft, draft_length, batch, outputs=4000, min_new_tokens=0,
                       eos_ids=(), prompt=(), sampler=Sampler.REJECTION, limit=None,
                       sources=None, looking_up=None, **options) -> np.ndarray:
    """``draft`` None looks all drafts up, ``looking_up`` those of these slots, in ``sources``
    (one a slot, of one length) and in the text."""
    params = [SamplingParams(**{"temperature": 1.0} | options)] * batch
    ends = [*eos_ids, *[-1] * (MAX_EOS_IDS - len(eos_ids))]
    slots = dataclasses.replace(
        Slots.empty(batch, V, LENGTH), active_B=jnp.ones(batch, bool),
        max_length_B=jnp.full(batch, 1000, jnp.int32),
        draft_limit_B=jnp.full(batch, draft_length if limit is None else limit, jnp.int32),
        eos_ids_BE=jnp.tile(jnp.asarray(ends, jnp.int32), (batch, 1)),
        sampling=SlotSampling.of(params),
        adjustments=SlotAdjustments.of(params, V, LENGTH, min_new_tokens=min_new_tokens,
                                       prompt=prompt))
    if sources is not None:
        sources = jnp.asarray(sources, jnp.int32)
        slots = dataclasses.replace(slots, source_length_B=jnp.full(batch, sources.shape[1]))
    run = runner(draft_length, batch, outputs // batch, sampler)
    return np.asarray(run(
        nnx.split(target)[1], None if draft is None else nnx.split(draft)[1], slots, sources,
        None if looking_up is None else jnp.asarray(looking_up)))


def pvalue(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts against probabilities; 0 if the impossible happened."""
    counts, expected = counts.ravel(), expected.ravel() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    live = expected > 0
    if live.sum() == 1:
        return 1.0
    rare = live & (expected < 5)  # pooled, as the test assumes no rare cells
    cells = [(counts[i], expected[i]) for i in np.flatnonzero(live & ~rare)]
    if rare.any() and expected[rare].sum() >= 1:
        cells.append((counts[rare].sum(), expected[rare].sum()))
    observed, wanted = np.array(cells, np.float64).T
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


def check(tokens: np.ndarray, table: np.ndarray) -> float:
    """Smallest p-value over singles at each position and pairs of neighbours."""
    one = table[:, 0]  # the start id is 0
    worst = 1.0
    for position in range(LENGTH):
        worst = min(worst, pvalue(np.bincount(tokens[:, position], minlength=V), one))
        if position + 1 < LENGTH:
            pairs = np.zeros((V, V))
            np.add.at(pairs, (tokens[:, position], tokens[:, position + 1]), 1)
            worst = min(worst, pvalue(pairs, table.T * one[:, None]))
        one = table @ one
    return worst


SETTINGS = [dict(temperature=t) for t in (0.0, 0.7, 1.0)] + [
    dict(temperature=1.0, top_k=2), dict(temperature=1.0, top_p=0.75),
    dict(temperature=0.7, top_k=3, top_p=0.9), dict(temperature=1.0, min_p=0.3)]


# Each takes half a minute, most of it compilation.
@pytest.mark.parametrize(("draft_length", "batch"), [
    pytest.param(γ, batch, marks=[] if (γ, batch) in {(1, 4), (2, 1), (5, 4), (8, 1)}
                 else pytest.mark.slow)
    for γ in range(1, 9) for batch in (1, 4)])
def test_outputs_of_a_chain_have_the_targets_distribution(draft_length, batch):
    target, draft = chain(P_CHAIN), chain(Q_CHAIN)
    for setting in SETTINGS:
        tokens = sample(target, draft, draft_length, batch, outputs=2000, **setting)
        options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | setting
        assert check(tokens, warped(P_CHAIN, **options)) > 1e-4, setting


@pytest.mark.parametrize("limit", range(1, 8))
def test_a_request_that_takes_fewer_drafts_has_the_targets_distribution(limit):
    tokens, places = sample_with_places(chain(P_CHAIN), chain(Q_CHAIN), 8, 1, outputs=2000,
                                        limit=limit)
    assert places.max() == limit
    assert check(tokens, P_CHAIN) > 1e-4


@pytest.mark.parametrize(("setting", "frequencies"), [
    (dict(top_k=2), (0.625, 0.375, 0.0)), (dict(top_p=0.75), (0.625, 0.375, 0.0)),
    (dict(min_p=0.5), (0.625, 0.375, 0.0)),
    (dict(temperature=0.5), (0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38))])
def test_q_in_the_accept_ratio_is_the_distribution_the_draft_was_sampled_from(
        setting, frequencies):
    target, draft = (fixed(x, V) for x in (P_FIXED, Q_FIXED))
    tokens = sample(target, draft, 4, 4, outputs=20_000, **setting)
    found = [(tokens == i).mean() for i in (5, 6, 7)]
    np.testing.assert_allclose(found, frequencies, atol=0.005)
    if frequencies[2] == 0:
        assert not (tokens == 7).any()


def test_every_place_in_a_block_has_the_targets_frequencies():
    """First and later places, the bonus, and what follows a rejection, apart."""
    target, draft = (fixed(x, V) for x in (P_FIXED, Q_FIXED))
    γ = 4
    tokens, places = sample_with_places(target, draft, γ, 4, outputs=20_000)
    before, after = places[:, :-1], places[:, 1:]
    groups = {"first": places == 0, "later": (places > 0) & (places < γ), "bonus": places == γ}
    follows = np.zeros_like(groups["first"])
    follows[:, 1:] = (after == 0) & (before < γ)
    for name, chosen in (groups | {"after a rejection": follows}).items():
        found = np.bincount(tokens[chosen], minlength=V)
        assert found.sum() > 10_000, name
        expected = np.array([P_FIXED.get(i, 0.0) for i in range(V)])
        assert pvalue(found, expected) > 1e-4, name
        np.testing.assert_allclose(found / found.sum(), expected, atol=0.015, err_msg=name)


def test_greedy_is_the_targets_argmax_and_never_the_drafts_favourite():
    target = fixed({5: 0.40, 6: 0.45, 7: 0.15}, V)
    draft = fixed({5: 0.38, 6: 0.32, 7: 0.30}, V)
    assert (sample(target, draft, 4, 4, temperature=0.0, outputs=20_000) == 6).all()


def test_greedy_ties_are_broken_alike_everywhere():
    target = fixed({5: 0.5, 6: 0.5}, V)
    assert (sample(target, fixed({6: 1.0}, V), 4, 4, temperature=0.0, outputs=20_000) == 5).all()


def _half_in_place_of_the_coin(*args, **options):
    """A greedy accept rule: raw p/q ≥ 1/2."""
    *first, coins, next_coins = args
    return kernels.rejection_sample(*first, jnp.full_like(coins, 0.5), next_coins, **options)


def _no_residual(*args, **options):
    """The correction of the first draft comes from p instead of the residual."""
    *first, limit, active, coins, next_coins = args
    good = kernels.rejection_sample(*args, **options)
    plain = kernels.rejection_sample(*first, jnp.zeros_like(limit), active, coins, next_coins,
                                     **options)
    return good._replace(next_token_B=jnp.where(
        good.accepted_B == 0, plain.next_token_B, good.next_token_B))


@pytest.mark.parametrize("broken", [_half_in_place_of_the_coin, _no_residual])
def test_a_wrong_accept_rule_would_be_seen(broken, monkeypatch):
    monkeypatch.setattr(KernelChoice, "rejection_sample",
                        lambda self, *args, **options: broken(*args, **options))
    runner.cache_clear()
    try:
        tokens = sample(chain(P_CHAIN), chain(Q_CHAIN), 4, 4)
    finally:
        runner.cache_clear()
    assert check(tokens, P_CHAIN) < 1e-12


# ---- lenience ----------------------------------------------------------------


def lenient(p: np.ndarray, q: np.ndarray, lenience: float) -> np.ndarray:
    """What comes at a place with a draft: kept with min(1, p / (l q)), else of the residual."""
    kept = np.minimum(q, p / lenience)
    residual = np.maximum(p - q, 0)
    return kept + (1 - kept.sum()) * residual / residual.sum()


@pytest.mark.parametrize("lenience", [0.3, *(
    pytest.param(x, marks=pytest.mark.slow) for x in (0.7, 0.05))])
def test_lenience_has_the_distribution_of_the_papers_appendix_and_its_bound(lenience):
    p, q = (np.array([x.get(i, 0.0) for i in range(V)]) for x in (P_FIXED, Q_FIXED))
    target, draft = (fixed(x, V) for x in (P_FIXED, Q_FIXED))
    γ = 4
    tokens, places = sample_with_places(target, draft, γ, 4, outputs=20_000, lenience=lenience)
    drafted, bonus = places < γ, places == γ
    for chosen, expected in ((drafted, lenient(p, q, lenience)), (bonus, p)):
        found = np.bincount(tokens[chosen], minlength=V)
        assert found.sum() > 10_000
        assert pvalue(found, expected) > 1e-4
        # No id comes more than 1 / lenience times as often as under the target.
        assert (found / found.sum() <= p / lenience + 0.01).all()
    assert pvalue(np.bincount(tokens[drafted], minlength=V), p) < 1e-12


@pytest.mark.parametrize(("lenience", "id_"), [(0.95, 6), (0.85, 5)])
def test_greedy_drafts_that_are_nearly_the_most_likely_are_accepted(lenience, id_):
    """The draft's favourite has .40 and the best id .45: 0.89 of it."""
    target, draft = fixed({5: 0.40, 6: 0.45, 7: 0.15}, V), fixed({5: 0.9, 7: 0.1}, V)
    tokens, places = sample_with_places(target, draft, 4, 4, outputs=20_000, temperature=0.0,
                                        lenience=lenience)
    assert (tokens[places < 4] == id_).all()
    assert (tokens[places == 4] == 6).all()  # a bonus has no draft
    assert (places == 4).any() == (id_ == 5)


# ---- penalties, biases, bans -------------------------------------------------


def raw_logits(table: np.ndarray) -> np.ndarray:
    """Of both signs, which a repetition penalty treats differently."""
    return np.log(np.maximum(table, np.exp(IMPOSSIBLE))) + 1.5


ADJUSTED = [
    dict(repetition_penalty=1.8), dict(presence_penalty=0.9, frequency_penalty=0.6),
    dict(frequency_penalty=-0.5, temperature=0.7), dict(logit_bias={3: 1.5, 5: -2.0}),
    dict(banned_ids=(4,), allowed_ids=(2, 3, 4, 5)), dict(min_new_tokens=3, eos_ids=(6, 3)),
    dict(temperature=0.8, top_k=4, top_p=0.95, min_p=0.05, repetition_penalty=1.2,
         presence_penalty=0.5, frequency_penalty=0.3, logit_bias={6: 1.0}, banned_ids=(3,),
         min_new_tokens=2, eos_ids=(6,)),
    dict(prompt=(5, 8, 3), presence_penalty=0.8, min_new_tokens=2, eos_ids=(4, 5))]
SEQUENCE = 6


def triples(tokens: np.ndarray, expected: dict[tuple[int, ...], float]) -> float:
    """Smallest p-value over three successive tokens, from every position: what comes
    depends on all tokens before."""
    worst = 1.0
    for first in range(SEQUENCE - 2):
        found = collections.Counter(map(tuple, tokens[:, first:first + 3].tolist()))
        wanted: collections.Counter = collections.Counter()
        for sequence, probability in expected.items():
            wanted[sequence[first:first + 3]] += probability
        cells = sorted(set(found) | set(wanted))
        worst = min(worst, pvalue(np.array([found[c] for c in cells]),
                                  np.array([wanted[c] for c in cells])))
    return worst


@functools.cache
def expected_sequences(number: int) -> dict[tuple[int, ...], float]:
    options = dict(ADJUSTED[number])
    *_, start = (0, *options.pop("prompt", ()))
    return sequences(raw_logits(P_CHAIN), SEQUENCE, start=start, **options)


@pytest.mark.parametrize(("draft_length", "batch"), [(2, 1), (4, 4)] + [
    pytest.param(*shape, marks=pytest.mark.slow)
    for shape in ((1, 1), (1, 4), (2, 4), (3, 1), (3, 4), (4, 1))])
def test_outputs_under_options_have_the_targets_adjusted_distribution(draft_length, batch):
    target, draft = chain_of_logits(raw_logits(P_CHAIN)), chain_of_logits(raw_logits(Q_CHAIN))
    for number, options in enumerate(ADJUSTED):
        tokens = sample(target, draft, draft_length, batch, outputs=2000, **options)
        assert triples(tokens, expected_sequences(number)) > 1e-4, options


def test_penalties_that_miss_the_drafts_before_a_row_would_be_seen(monkeypatch):
    adjust = SlotAdjustments.adjust
    monkeypatch.setattr(SlotAdjustments, "adjust", lambda self, logits, positions, before, ends: (
        adjust(self, logits, positions, jnp.full_like(before, -1), ends)))
    options = dict(presence_penalty=0.9, frequency_penalty=0.6)
    runner.cache_clear()
    try:
        tokens = sample(chain_of_logits(raw_logits(P_CHAIN)), chain_of_logits(raw_logits(Q_CHAIN)),
                        4, 4, **options)
    finally:
        runner.cache_clear()
    assert triples(tokens, expected_sequences(ADJUSTED.index(options))) < 1e-12
