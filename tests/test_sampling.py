"""One warp function against a sort-based float64 oracle, and the inverse-CDF draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tpuspec.kernels import WarpOptions
from tpuspec.kernels.sampling_reference import draw, warp
from tpuspec.sampling import Purpose, SamplingParams, SlotSampling, seed_words, uniforms


def options(temperature, top_k, top_p) -> WarpOptions:
    return SlotSampling.of([SamplingParams(temperature=t, top_k=k, top_p=p) for t, k, p in zip(
        temperature, top_k, top_p, strict=True)]).options()


def oracle(logits: np.ndarray, temperature: float, top_k: int, top_p: float,
           vocabulary: int) -> np.ndarray:
    """Sorts; float64."""
    logits = logits[:vocabulary].astype(np.float64)
    if temperature == 0:
        p = (np.arange(vocabulary) == np.argmax(logits)).astype(np.float64)
        return np.pad(p, (0, 0))
    p = np.exp((logits - logits.max()) / temperature)
    if top_k:
        p[p < np.sort(p)[::-1][min(top_k, vocabulary) - 1]] = 0
    if top_p < 1:
        order = np.sort(p)[::-1]
        enough = np.searchsorted(np.cumsum(order), top_p * p.sum())
        p[p < order[enough]] = 0
    return p / p.sum()


@pytest.mark.parametrize("vocabulary", [300, 384])
def test_warp_equals_the_sorting_oracle_for_every_mix_of_options(vocabulary):
    rng = np.random.default_rng(0)
    settings = [(t, k, p) for t in (0.0, 0.3, 0.7, 1.0, 2.5) for k in (0, 1, 3, 40, 10_000)
               for p in (1.0, 0.9, 0.5, 0.01)]
    logits = rng.normal(0, 3, (len(settings), 3, 384)).astype(np.float32)
    probs, _, sound = jax.jit(warp, static_argnums=2)(
        jnp.asarray(logits), options(*zip(*settings, strict=True)), vocabulary)
    assert sound.all()
    for row, (t, k, p) in enumerate(settings):
        for g in range(3):
            expected = oracle(logits[row, g], t, k, p, vocabulary)
            np.testing.assert_allclose(probs[row, g, :vocabulary], expected, atol=2e-6)
            assert not np.asarray(probs[row, g, vocabulary:]).any()


def test_ids_the_tokenizer_does_not_have_get_probability_zero_even_when_largest():
    logits = jnp.full((1, 1, 8), -5.0).at[0, 0, 6:].set(50.0)
    for temperature in (0.0, 2.0):
        probs, *_ = warp(logits, options([temperature], [0], [1.0]), 6)
        assert np.asarray(probs)[0, 0, 6:].sum() == 0
        assert np.asarray(probs).sum() == pytest.approx(1)


def test_greedy_ties_go_to_the_lowest_id():
    probs, *_ = warp(jnp.zeros((1, 1, 8)), options([0.0], [0], [1.0]), 8)
    assert np.argmax(probs) == 0 and np.max(probs) == 1


def test_non_finite_logits_are_reported_per_row():
    logits = jnp.zeros((1, 4, 8)).at[0, 1, 3].set(jnp.nan).at[0, 2, 0].set(jnp.inf)
    logits = logits.at[0, 3, 5].set(-jnp.inf)
    *_, sound = warp(logits, options([1.0], [0], [1.0]), 8)
    assert sound.tolist() == [[True, False, False, True]]
    wide = jnp.zeros((2, 2, 700)).at[0, 1, 650].set(jnp.nan).at[1, 0, 3].set(jnp.nan)
    *_, sound = jax.jit(warp, static_argnums=2)(wide, options([1.0] * 2, [0] * 2, [1.0] * 2), 700)
    assert sound.tolist() == [[True, False], [False, True]]


def test_logits_are_cast_to_float32_before_the_temperature():
    logits = jnp.asarray([[[1.0, 0.9, -2.0, 0.0]]], jnp.bfloat16)
    probs, *_ = warp(logits, options([0.7], [0], [1.0]), 4)
    expected = oracle(np.asarray(logits, np.float32)[0, 0], 0.7, 0, 1.0, 4)
    np.testing.assert_allclose(probs[0, 0], expected, atol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.5, 1 - 2**-24])
def test_draw_never_returns_an_id_of_weight_zero(uniform):
    weights = jnp.asarray([[0, 0, 1e-7, 0, 3, 0, 0], [0, 0, 0, 5, 0, 0, 0],
                           [1, 0, 0, 0, 0, 0, 1e-30]], jnp.float32)
    ids = np.asarray(draw(weights, jnp.full((3,), uniform, jnp.float32)))
    assert (np.asarray(weights)[np.arange(3), ids] > 0).all()


def test_draw_has_the_frequencies_of_its_weights():
    weights = np.array([0.5, 0.0, 1.5, 3.0], np.float32)
    grid = (np.arange(20_000) + 0.5) / 20_000
    ids = np.asarray(draw(jnp.broadcast_to(jnp.asarray(weights), (20_000, 4)),
                          jnp.asarray(grid, jnp.float32)))
    np.testing.assert_allclose(np.bincount(ids, minlength=4) / 20_000, weights / 5, atol=2e-4)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 700])
def test_draw_searches_blocks_as_a_plain_cumulative_sum_would(size):
    rng = np.random.default_rng(size)
    weights = rng.exponential(size=(64, size)) * (rng.random((64, size)) < 0.3)
    weights[:, rng.integers(size)] += 0.1
    uniform = np.append(rng.random(62), [0.0, 1 - 2**-24])
    cumulative = np.cumsum(weights.astype(np.float32).astype(np.float64), axis=1)
    goal = uniform.astype(np.float32) * cumulative[:, -1]
    ids = np.asarray(draw(jnp.asarray(weights, jnp.float32), jnp.asarray(uniform, jnp.float32)))
    clear = np.abs(cumulative - goal[:, None]).min(axis=1) > 1e-5 * cumulative[:, -1]
    assert clear[:-2].mean() > 0.9
    np.testing.assert_array_equal(ids[clear], (cumulative <= goal[:, None]).sum(axis=1)[clear])


def test_random_numbers_depend_on_seed_position_and_purpose_alone():
    seeds = jnp.asarray([[0, 7], [0, 8], [0, 7]], jnp.uint32)
    positions = jnp.asarray([[1, 2], [1, 2], [2, 9]], jnp.int32)
    coins = np.asarray(uniforms(seeds, positions))
    u = coins[Purpose.ACCEPT]
    assert u[0, 1] == u[2, 0]
    assert len(set(coins.ravel().tolist())) == 15
    u = coins
    assert ((u >= 0) & (u < 1)).all()


@pytest.mark.parametrize(("field", "value", "bound"), [
    ("temperature", -1.0, "[0.0, 100.0]"), ("temperature", float("nan"), "[0.0, 100.0]"),
    ("temperature", 1e-9, "at least 0.001"), ("top_k", -1, "[0, 2147483647]"),
    ("top_p", 0.0, "(0, 1]"), ("top_p", 1.5, "(0, 1]"), ("top_p", float("nan"), "(0, 1]"),
    ("min_p", -0.1, "[0.0, 1.0]"), ("min_p", 1.5, "[0.0, 1.0]"),
    ("min_p", float("nan"), "[0.0, 1.0]")])
def test_bad_sampling_parameters_are_named_with_value_and_bound(field, value, bound):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    assert field in str(error.value) and str(value) in str(error.value)
    assert bound in str(error.value)


def test_seed_words_cover_64_bits():
    assert seed_words(2**64 - 1) == (2**32 - 1, 2**32 - 1)
    with pytest.raises(ValueError, match="seed"):
        seed_words(2**64)


def test_random_numbers_are_uniform_and_independent_of_their_neighbours():
    seeds = jnp.stack([jnp.zeros(500, jnp.uint32), jnp.arange(500, dtype=jnp.uint32)], axis=1)
    u = np.asarray(uniforms(seeds, jnp.broadcast_to(jnp.arange(100)[None, :], (500, 100))))
    for flat in u.reshape(3, -1):
        assert stats.kstest(flat, "uniform").pvalue > 1e-3
    assert np.abs(np.corrcoef(u.reshape(3, -1)) - np.eye(3)).max() < 0.02
    assert abs(np.corrcoef(u[0, :, :-1].ravel(), u[0, :, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(u[0, :-1].ravel(), u[0, 1:].ravel())[0, 1]) < 0.02
