"""Drafts that are looked up: what they are, and that outputs have the target's distribution."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programmable import chain, chain_of_logits
from test_exactness import (
    ADJUSTED,
    P_CHAIN,
    Q_CHAIN,
    SETTINGS,
    V,
    check,
    expected_sequences,
    raw_logits,
    runner,
    sample,
    sample_with_places,
    triples,
    warped,
)

from tpuspec import kernels, speculative_step
from tpuspec.config import Sampler
from tpuspec.decode_state import Slots
from tpuspec.kernels import WarpOptions
from tpuspec.logit_adjustment import SlotAdjustments
from tpuspec.ngram_drafts import agreement, look_up, one_hot
from tpuspec.sampling import SamplingParams

# ---- what is looked up -------------------------------------------------------


def plain_look_up(source: list[int], text: list[int], width: int) -> list[int]:
    """By hand: for contexts of 3, 2, 1 tokens, the text from its end, then the source."""
    for length in range(min(3, len(text)), 0, -1):
        context = text[-length:]
        for before in (text, source):
            for at in reversed(range(len(before) - length)):
                if before[at:at + length] == context:
                    following = before[at + length:]
                    if before is text:
                        following = following * width
                    return following[:width]
    return []


compiled_look_up = jax.jit(look_up, static_argnums=3)


def looked_up(rows: list[tuple[list[int], list[int]]], width: int, prompts=None) -> list[list[int]]:
    """Of (source, text) pairs, in slots whose buffers are full of what others left."""
    size, positions = 12, 24
    source = np.full((len(rows), size), 5)
    history = np.full((len(rows), positions), 5)
    for row, (before, text) in enumerate(rows):
        source[row, :len(before)] = before
        history[row, :1 + len(text)] = [0, *text]
    slots = dataclasses.replace(
        Slots.empty(len(rows), V, positions), length_B=jnp.array([1 + len(t) for _, t in rows]),
        source_length_B=jnp.array([len(s) for s, _ in rows]))
    if prompts is not None:
        adjustments = [SlotAdjustments.of([SamplingParams()], V, positions, prompt=prompt)
                       for prompt in prompts]
        slots = dataclasses.replace(slots, adjustments=dataclasses.replace(
            slots.adjustments, **{name: jnp.concatenate([getattr(one, name) for one in adjustments])
                                  for name in ("prompt_BP", "first_B")}))
    found = compiled_look_up(jnp.asarray(source, jnp.int32), jnp.asarray(history, jnp.int32),
                             slots, width)
    return [[int(i) for i in row if i >= 0] for row in np.asarray(found)]


@pytest.mark.parametrize(("source", "text", "expected"), [
    ([7, 8, 9, 1], [], []),  # the start token is no context
    ([7, 8, 9, 1], [7], [8, 9, 1]),  # no further than the source
    ([7, 8, 9, 1], [1], []),  # nothing follows
    ([1], [3, 4], []),
    ([7, 8, 7, 9], [7], [9]),  # the latest place
    ([7, 8, 7, 9], [3, 7, 3, 7], [3, 7, 3, 7, 3]),  # a repetition goes on
    ([3, 3, 4, 2], [4, 9, 3, 3], [4, 2]),  # two tokens in the source before one in the text
    ([4, 3, 2, 8, 9], [3, 2, 6, 4, 3, 2], [8, 9]),  # three before two
    ([2, 3, 8, 1], [2, 3, 9, 2, 3], [9, 2, 3, 9, 2]),  # the text before the source
    ([0, 7], [5, 7], []),  # what an earlier tenant left is not there: 5 fills the buffers
    ([8, 3], [3], [])])
def test_latest_place_of_the_longest_context(source, text, expected):
    assert plain_look_up(source, text, 5) == expected
    assert looked_up([(source, text)], 5) == [expected]


def test_random_texts_against_a_plain_search():
    rng = np.random.default_rng(0)
    for vocabulary in (2, 3, 6):
        rows = [(rng.integers(0, vocabulary, rng.integers(1, 13)).tolist(),
                 rng.integers(0, vocabulary, rng.integers(0, 20)).tolist()) for _ in range(400)]
        assert looked_up(rows, 6) == [plain_look_up(*row, 6) for row in rows]


def test_a_prompt_is_its_own_draft():
    prompt = [3, 4, 3, 9]
    found = looked_up([([3, 4, 8], prompt[:n]) for n in range(5)], 3, [prompt] * 5)
    assert found == [[3, 4, 3], [4, 3, 9], [3, 9], [9], []]


def test_agreement_counts_leading_new_tokens_alone():
    drafts = jnp.array([[3, 4, 5], [3, 4, 5], [3, -1, -1], [-1, -1, -1], [8, 4, 5]])
    tokens = jnp.array([[3, 4], [3, 4], [3, 0], [0, 0], [3, 4]])
    assert agreement(drafts, tokens, jnp.array([2, 1, 2, 2, 2])).tolist() == [2, 1, 1, 0, 0]


# ---- whole steps -------------------------------------------------------------

# Walks that the target often takes, so that a good part of what is found is accepted.
SOURCES = [[2, 3, 4, 5, 6, 2, 4, 6, 3, 5, 2, 6], [6, 5, 4, 3, 2, 6, 4, 2, 5, 3, 6, 2],
           [3, 3, 5, 5, 2, 2, 6, 6, 4, 4, 3, 5], [2, 5, 3, 6, 4, 2, 3, 5, 4, 6, 2, 2]]
SHAPES = [(γ, batch, mixed) for γ in (1, 2, 3, 4, 7) for batch in (1, 4) for mixed in (False, True)]


def slow(values, default):
    return [pytest.param(*value, marks=[] if value in default else pytest.mark.slow)
            for value in values]


def options_of(batch: int, mixed: bool) -> dict:
    """Half of the slots of a mixed batch take looked-up drafts, and the others the model's."""
    looking_up = dict(looking_up=[slot % 2 == 0 for slot in range(batch)]) if mixed else {}
    return dict(sources=SOURCES[:batch], **looking_up)


@pytest.mark.parametrize(
    ("draft_length", "batch", "mixed"), slow(SHAPES, [(3, 1, False), (4, 4, True)]))
@pytest.mark.parametrize("settings", [SETTINGS[:3], pytest.param(
    SETTINGS[3:], marks=pytest.mark.slow)], ids=["temperatures", "more"])
def test_outputs_have_the_targets_distribution(draft_length, batch, mixed, settings):
    target, draft = chain(P_CHAIN), chain(Q_CHAIN) if mixed else None
    for setting in settings:
        tokens, places = sample_with_places(target, draft, draft_length, batch, outputs=2000,
                                            **options_of(batch, mixed), **setting)
        options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | setting
        assert check(tokens, warped(P_CHAIN, **options)) > 1e-4, setting
        assert np.mean(places[:, 1:] > 0) > 0.1  # accepted drafts, and bonus tokens


@pytest.mark.parametrize(("draft_length", "batch", "mixed"), slow(SHAPES, [(4, 4, True)]))
def test_outputs_under_options_have_the_targets_adjusted_distribution(draft_length, batch, mixed):
    target = chain_of_logits(raw_logits(P_CHAIN))
    draft = chain_of_logits(raw_logits(Q_CHAIN)) if mixed else None
    for number, options in enumerate(ADJUSTED):
        tokens = sample(target, draft, draft_length, batch, outputs=2000,
                        **options_of(batch, mixed), **options)
        assert triples(tokens, expected_sequences(number)) > 1e-4, options


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_coupled_outputs_are_those_without_drafts(mixed):
    target, draft = chain(P_CHAIN), chain(Q_CHAIN) if mixed else None
    for setting in SETTINGS:
        plain, tokens = (
            sample(target, chain(Q_CHAIN) if length == 0 else draft, length, 4, outputs=2000,
                   sampler=Sampler.COUPLED, **({} if length == 0 else options_of(4, mixed)),
                   **setting) for length in (0, 4))
        np.testing.assert_array_equal(tokens, plain)


def _half_sure(drafts, vocab_size):
    """q of 1/2 in place of 1."""
    tokens, logits = one_hot(drafts, vocab_size)
    return tokens._replace(rows_B=tokens.rows_B._replace(total=2 * tokens.rows_B.total)), logits


def _elsewhere(drafts, vocab_size):
    """q one-hot of another id: drafts are always accepted, and corrections lack the wrong one."""
    return one_hot(drafts, vocab_size)[0], one_hot((drafts + 1) % V, vocab_size)[1]


@pytest.mark.parametrize("broken", [
    _half_sure, pytest.param(_elsewhere, marks=pytest.mark.slow)])
def test_a_wrong_q_would_be_seen(broken, monkeypatch):
    monkeypatch.setattr(speculative_step, "one_hot", broken)
    runner.cache_clear()
    try:
        tokens = sample(chain(P_CHAIN), None, 2, 1, **options_of(1, False))
    finally:
        runner.cache_clear()
    assert check(tokens, P_CHAIN) < 1e-12


def test_the_kernel_takes_drafts_that_are_sure_of_themselves():
    """Interpreted, against the reference: accepted with u < p, and corrected without them."""
    rng = np.random.default_rng(0)
    slots, γ, size = 64, 2, 128
    options = WarpOptions(*(jnp.tile(jnp.array(x), slots // 4) for x in (
        [0.0, 0.7, 1.0, 1.0], [0, 0, 20, 0], [1.0, 1.0, 0.9, 1.0], [0.0, 0.0, 0.0, 0.1])))
    limits = jnp.tile(jnp.array([2, 2, 1, 2]), slots // 4)
    target = jnp.asarray(rng.normal(0, 4, (slots, γ + 1, size)), jnp.float32)
    place = size - rng.choice([1, 2], (slots, γ, 1), p=[0.8, 0.2])
    drafts = np.take_along_axis(np.argsort(target[:, :γ], axis=-1), place, axis=-1)[..., 0]
    tokens, draft_logits = one_hot(jnp.asarray(drafts), size)
    coins, more = (jnp.asarray(rng.random((slots, n), np.float32)) for n in (γ, γ + 1))
    both = [jax.jit(functools.partial(
        kernels.rejection_sample, vocabulary_size=size, implementation=name,
        interpret=name == "pallas"))(tokens.token_B, draft_logits, tokens.rows_B, target, options,
                                     limits, jnp.ones(slots, bool), coins, more)
            for name in ("pallas", "xla")]
    for found, expected in zip(*both, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    accepted = np.asarray(both[0].accepted_B)
    refused = accepted < np.asarray(limits)
    at = np.minimum(accepted, γ - 1)
    assert (both[0].next_token_B != drafts[np.arange(slots), at])[refused].all()
    assert refused.sum() > 10 and (~refused).sum() > 10 and (accepted == 1).sum() > 5
