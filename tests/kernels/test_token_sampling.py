"""The kernel, interpreted, against a sorting float64 oracle and the plain reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_oracle
from scipy import stats

from tpuspec.kernels import SamplingBlocks, WarpOptions, sample_tokens, vocabulary_tiles

pytestmark = pytest.mark.usefixtures("quick_compilation")

# 19 blocks of 8 rows and one of 5, over four tiles of the vocabulary.
SLOTS, V, VOCABULARY = 157, 400, 390
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.cache
def sample(implementation):
    options = {} if implementation == "xla" else QUICK_TO_COMPILE
    return jax.jit(functools.partial(
        sample_tokens, vocabulary_size=VOCABULARY, implementation=implementation,
        interpret=implementation == "pallas"), compiler_options=options)


@pytest.fixture(autouse=True)
def _loops_over_tiles_turn_at_these_sizes(monkeypatch):
    monkeypatch.setattr(vocabulary_tiles, "TILES_PER_TURN", 2)


def mixed_options(rng) -> WarpOptions:
    """All of them mixed in the first blocks, and blocks where some are used by none."""
    temperature = rng.choice([0.0, 0.3, 1.0, 2.0], SLOTS)
    top_k, top_p = rng.choice([0, 1, 10, 200, 10**6], SLOTS), rng.choice([1.0, 0.9, 0.05], SLOTS)
    min_p = rng.choice([0.0, 0.02, 0.5], SLOTS)
    top_k[64:], top_p[64:], min_p[96:] = 0, 1.0, 0.0
    temperature[128:144] = 0.0
    return WarpOptions(jnp.asarray(temperature, jnp.float32), jnp.asarray(top_k, jnp.int32),
                       jnp.asarray(top_p, jnp.float32), jnp.asarray(min_p, jnp.float32))


@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_draws_as_sorting_does(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (SLOTS, V)).astype(np.float32)
    if seed == 3:  # ties
        logits = np.round(logits * 2) / 2
    options, uniforms = mixed_options(rng), rng.random(SLOTS, np.float32)
    actual = sample("pallas")(jnp.asarray(logits), options, jnp.asarray(uniforms))
    assert actual.sound_B.all()
    certain = 0
    for b in range(SLOTS):
        option = [x[b].item() for x in options]
        p, margin = sampling_oracle.warp(logits[b].copy(), *option, VOCABULARY)
        token, drawn = sampling_oracle.draw(p, float(uniforms[b]))
        if min(margin, drawn) < sampling_oracle.ROUNDING:
            continue
        certain += 1
        assert actual.token_B[b] == token, (b, option)
        # The figures give the whole distribution again.
        top, threshold, total = (float(x[b]) for x in actual.rows_B)
        assert top == logits[b, :VOCABULARY].max()
        if option[0] > 0:
            e = np.exp((logits[b, :VOCABULARY].astype(np.float64) - top) / np.float32(option[0]))
            again = np.where(e >= threshold * (1 - 1e-6), e, 0) / total
            np.testing.assert_allclose(again, p[:VOCABULARY], atol=2e-6)
    assert certain > 0.95 * SLOTS


def test_reference_and_kernel_agree_on_rows_that_are_not_sound():
    rng = np.random.default_rng(9)
    logits = rng.normal(0, 3, (SLOTS, V)).astype(np.float32)
    options, uniforms = mixed_options(rng), jnp.asarray(rng.random(SLOTS, np.float32))
    clean = sample("pallas")(jnp.asarray(logits), options, uniforms)
    harmed = np.arange(SLOTS) % 5 == 0
    logits[harmed, 130] = np.where(np.arange(SLOTS) % 2 == 0, np.nan, np.inf)[harmed]
    logits[:, VOCABULARY:] = np.nan  # ids that do not exist
    logits[~harmed, 131] = np.where(np.arange(SLOTS) % 2 == 0, -np.inf, logits[:, 131])[~harmed]
    untouched = ~harmed & (np.arange(SLOTS) % 2 == 1)
    for implementation in ("pallas", "xla"):
        result = sample(implementation)(jnp.asarray(logits), options, uniforms)
        np.testing.assert_array_equal(result.sound_B, ~harmed)
        np.testing.assert_array_equal(result.token_B[untouched], clean.token_B[untouched])


def test_draws_have_the_frequencies_of_their_weights():
    """A grid of uniform numbers: each id as often as its probability says, to one."""
    rng = np.random.default_rng(5)
    logits = np.full(V, -np.inf, np.float32)
    logits[rng.permutation(VOCABULARY)[:20]] = rng.normal(0, 1.5, 20)
    p, _ = sampling_oracle.warp(logits.copy(), 1.0, 0, 1.0, 0.0, VOCABULARY)
    options = WarpOptions(jnp.ones(SLOTS), jnp.zeros(SLOTS, jnp.int32), jnp.ones(SLOTS),
                          jnp.zeros(SLOTS))
    rows = jnp.broadcast_to(jnp.asarray(logits), (SLOTS, V))
    grid = (np.arange(SLOTS * 10, dtype=np.float64).reshape(10, SLOTS) + 0.5) / (SLOTS * 10)
    tokens = [sample("pallas")(rows, options, jnp.asarray(u, jnp.float32)).token_B for u in grid]
    counts = np.bincount(np.concatenate(tokens), minlength=V)
    np.testing.assert_allclose(counts, p * grid.size, atol=1.01)
    ends = jnp.asarray(np.where(np.arange(SLOTS) % 2, 1 - 2**-24, 0.0), jnp.float32)
    tokens = sample("pallas")(rows, options, ends).token_B
    live = np.flatnonzero(p)
    np.testing.assert_array_equal(tokens, np.where(np.arange(SLOTS) % 2, live[-1], live[0]))


def test_random_numbers_give_the_targets_distribution():
    rng = np.random.default_rng(6)
    logits = rng.normal(0, 2, V).astype(np.float32)
    option = (1.3, 30, 0.95, 0.01)
    p, _ = sampling_oracle.warp(logits.copy(), *option, VOCABULARY)
    options = WarpOptions(*(jnp.full(SLOTS, x, dtype) for x, dtype in zip(
        option, (jnp.float32, jnp.int32, jnp.float32, jnp.float32), strict=True)))
    rows = jnp.broadcast_to(jnp.asarray(logits), (SLOTS, V))
    tokens = [sample("pallas")(rows, options, jnp.asarray(rng.random(SLOTS, np.float32))).token_B
              for _ in range(10)]
    counts = np.bincount(np.concatenate(tokens), minlength=V)
    assert not counts[p == 0].any()
    assert stats.chisquare(counts[p > 0], p[p > 0] * counts.sum()).pvalue > 1e-3


def test_blocks_of_the_vocabulary_change_nothing():
    """Three blocks of it, the last one shorter; two blocks of rows, of which one is greedy."""
    rng, size, slots = np.random.default_rng(7), 2200, 16
    logits = jnp.asarray(rng.normal(0, 3, (slots, size)), jnp.float32)
    options = jax.tree.map(lambda x: x[:slots], mixed_options(rng))
    options = options._replace(temperature_B=options.temperature_B.at[8:].set(0.0))
    uniforms = jnp.asarray(rng.random(slots, np.float32))
    cut = jax.jit(functools.partial(
        sample_tokens, vocabulary_size=size, implementation="pallas", interpret=True,
        blocks=SamplingBlocks(tiles=8)), compiler_options=QUICK_TO_COMPILE)
    found = cut(logits, options, uniforms)
    expected = sample_tokens(logits, options, uniforms, vocabulary_size=size, implementation="xla")
    np.testing.assert_array_equal(found.token_B, expected.token_B)
    np.testing.assert_array_equal(found.rows_B.top, expected.rows_B.top)
    np.testing.assert_allclose(found.rows_B.total, expected.rows_B.total, rtol=1e-5)


@pytest.mark.parametrize(("logits", "message"), [
    (jax.ShapeDtypeStruct((4, 400), jnp.bfloat16), "float32"),
    (jax.ShapeDtypeStruct((4, 200), jnp.float32), "vocabulary")])
def test_shapes_that_the_kernel_does_not_take(logits, message):
    f32 = jax.ShapeDtypeStruct((4,), jnp.float32)
    options = WarpOptions(f32, jax.ShapeDtypeStruct((4,), jnp.int32), f32, f32)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(sample_tokens, vocabulary_size=300,
                                         implementation="pallas"), logits, options, f32)
