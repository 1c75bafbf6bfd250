"""The model's equations against a numpy oracle in float64, and faults seen in other systems."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_t5
import pytest
from flax import nnx
from numpy_t5 import numpy_twin
from programmable import (
    anti,
    chain,
    chain_config,
    count,
    fixed,
    rand,
    recast,
    spell,
    tensors_of,
)
from tiny_vocabularies import uni_vocabulary

from tpuspec.config import Activation, T5Config
from tpuspec.kv_cache import DecoderCache
from tpuspec.t5 import T5
from tpuspec.t5_layers import relative_buckets

pytestmark = pytest.mark.usefixtures("quick_compilation")


def ids(seed: int, *shape: int, vocab: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, vocab, shape).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph, params, source, lengths, target):
    model = nnx.merge(graph, params)
    encoded = model.encode(source, lengths)
    return encoded, model.decode_teacher_forced(target, encoded, lengths)


def run(model: T5, source, lengths, target) -> tuple[np.ndarray, np.ndarray]:
    """Encoder states and teacher-forced logits of a padded batch."""
    encoded, logits = _forward(*nnx.split(model), jnp.asarray(source),
                               jnp.asarray(lengths, jnp.int32), jnp.asarray(target))
    return np.asarray(encoded.astype(jnp.float32)), np.asarray(logits)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _windows(graph, positions, source_positions, width, params, source, lengths, target, starts):
    model = nnx.merge(graph, params)
    cross = model.cross_keys_values(model.encode(source, lengths))
    cache = DecoderCache.zeros(model.config, slots=source.shape[0], positions=positions,
                               source_positions=source_positions, dtype=jnp.float32)
    cache = dataclasses.replace(cache, cross_k=tuple(k for k, _ in cross),
                                cross_v=tuple(v for _, v in cross))

    def window(cache, start):
        at = start[:, None] + jnp.arange(width)[None, :]
        logits, cache = model.decode(jnp.take_along_axis(target, at, 1), start, lengths, cache)
        return cache, logits

    return jax.lax.scan(window, cache, starts)[1]


def cached(model: T5, source, lengths, target, *, source_positions: int, positions: int,
           width: int, starts) -> np.ndarray:
    """Logits [windows, B, width, V] through the cache; ``starts`` [windows, B] of each row."""
    graph, params = nnx.split(model)
    return np.asarray(_windows(
        graph, positions, source_positions, width, params, jnp.asarray(source),
        jnp.asarray(lengths, jnp.int32), jnp.asarray(target), jnp.asarray(starts)))


def oracle(model: T5) -> numpy_t5.NumpyT5:
    return numpy_twin(model, tensors_of(model))


@pytest.mark.parametrize("bidirectional, first", [
    (False, {**{d: d for d in range(16)}, 16: 16, 17: 19, 18: 21, 19: 24, 20: 27, 21: 31,
             22: 35, 23: 40, 24: 46, 25: 52, 26: 59, 27: 67, 28: 77, 29: 87, 30: 99, 31: 113}),
    (True, {**{d: d for d in range(8)}, 8: 8, 9: 12, 10: 16, 11: 23, 12: 32, 13: 46, 14: 64,
            15: 91})])
def test_first_distance_of_each_relative_bucket(bidirectional, first):
    distances = np.arange(4096)
    buckets = relative_buckets(distances, bidirectional=bidirectional, num_buckets=32,
                               max_distance=128)
    assert {int(b): int(distances[buckets == b][0]) for b in np.unique(buckets)} == first
    right = relative_buckets(-distances[1:], bidirectional=bidirectional, num_buckets=32,
                             max_distance=128)
    np.testing.assert_array_equal(right, buckets[1:] + 16 if bidirectional else 0)


def test_buckets_of_other_sizes_agree_with_the_oracle():
    for buckets, farthest, bidirectional in ((8, 20, True), (8, 20, False), (64, 300, True)):
        distances = np.arange(-400, 400)
        wanted = [numpy_t5.bucket(-d, bidirectional, buckets, farthest) for d in distances]
        np.testing.assert_array_equal(wanted, relative_buckets(
            distances, bidirectional=bidirectional, num_buckets=buckets, max_distance=farthest))


@pytest.mark.parametrize("changes", [
    {"activation": Activation.RELU, "tie_word_embeddings": True, "num_heads": 3},
    {"activation": Activation.GATED_GELU, "num_layers": 3},
    {"activation": Activation.GATED_SILU, "per_layer_relative_bias": True,
     "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
], ids=["t5-1.0", "t5-1.1", "umt5-silu"])
def test_logits_match_the_oracle(changes):
    model = rand(3, d_model=32, **changes)
    source, target = ids(1, 1, 40), ids(2, 1, 50)
    encoded, logits = run(model, source, [40], target)
    twin = oracle(model)
    scale = np.abs(logits).max()
    np.testing.assert_allclose(encoded[0], twin.encode(source[0]), rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits[0], twin.logits(source[0], target[0]), rtol=0,
                               atol=1e-5 * scale)


def test_relative_bias_stays_right_once_a_cache_is_used():
    """Rows at different lengths, single tokens and windows of 5, beyond the farthest bucket."""
    model = rand()
    source, lengths, target = ids(3, 3, 20), [20, 3, 11], ids(4, 3, 206)
    _, forced = run(model, source, lengths, target)
    twin = oracle(model)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(forced[row], twin.logits(source[row, :length], target[row]),
                                   rtol=0, atol=2e-4)
    for width, starts in (
            (1, np.repeat(np.arange(206)[:, None], 3, 1)),
            # Rows 1 and 2 fall back and go on from there: a rejection each.
            (5, np.concatenate([np.arange(0, 150, 5)[:, None] + [0, 0, 0],
                                np.arange(0, 55, 5)[:, None] + [150, 97, 31]]))):
        logits = cached(model, source, lengths, target, source_positions=20, positions=210,
                        width=width, starts=starts)
        rows = np.arange(3)[:, None]
        for start, window in zip(starts, logits, strict=True):
            wanted = forced[rows, start[:, None] + np.arange(width)]
            np.testing.assert_allclose(window, wanted, rtol=0, atol=2e-4)
            np.testing.assert_array_equal(window.argmax(-1), wanted.argmax(-1))


def test_source_padding_does_not_change_the_answer():
    """Id 0 is padding, the start id and a real id: masks come from lengths alone."""
    model = rand(5)
    lengths = [1, 7, 31, 64]
    target = ids(6, 4, 12)
    sources = [ids(7 + n, n) for n in lengths]
    sources[1][3] = sources[2][0] = 0
    twin = oracle(model)
    for width, filler in ((64, 0), (96, 0), (96, 9)):
        padded = np.full((4, width), filler, np.int32)
        for row, source in zip(padded, sources, strict=True):
            row[:source.size] = source
        encoded, logits = run(model, padded, lengths, target)
        for row, source in enumerate(sources):
            alone = run(model, source[None], [source.size], target[row:row + 1]) if (
                source.size == 7 and filler == 0) else None
            if alone is not None:
                np.testing.assert_allclose(encoded[row, :7], alone[0][0], rtol=0, atol=1e-5)
                np.testing.assert_allclose(logits[row], alone[1][0], rtol=0, atol=1e-4)
            np.testing.assert_allclose(encoded[row, :source.size], twin.encode(source),
                                       rtol=0, atol=5e-5)
            np.testing.assert_allclose(logits[row], twin.logits(source, target[row]),
                                       rtol=0, atol=5e-4)


def test_encoder_and_decoder_capacities_are_independent():
    model = rand(8, d_model=32, layers=1)
    for source_positions, positions in ((96, 16), (16, 96)):
        source, target = ids(9, 1, source_positions), ids(10, 1, positions)
        _, forced = run(model, source, [source_positions], target)
        starts = np.arange(0, positions, 16)[:, None]
        logits = cached(model, source, [source_positions], target, width=16, starts=starts,
                        source_positions=source_positions, positions=positions)
        np.testing.assert_allclose(logits.reshape(1, positions, -1), forced, rtol=0, atol=1e-4)
        source[0, -1] ^= 1
        _, changed = run(model, source, [source_positions], target)
        assert np.abs(changed - forced).max() > 1e-3  # the last source token counts


def test_no_relative_bias_in_cross_attention():
    """Encoder states have no order there, however strong the bias tables are."""
    model = rand(11, bias_std=30.0)
    lengths = jnp.asarray([9])
    graph, params = nnx.split(model)

    @jax.jit
    def logits(params, encoded, target):
        return nnx.merge(graph, params).decode_teacher_forced(target, encoded, lengths)

    encoded = np.random.default_rng(12).normal(size=(1, 9, 64)).astype(np.float32)
    target = jnp.asarray(ids(13, 1, 10))
    swapped = encoded.copy()
    swapped[0, [2, 7]] = encoded[0, [7, 2]]
    one, other = (np.asarray(logits(params, jnp.asarray(e), target)) for e in (encoded, swapped))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


def test_programmable_models_follow_their_tables():
    probabilities = np.random.default_rng(0).dirichlet(np.ones(32), 32).T
    target = np.asarray([[0, 3, 5, 31, 5]], np.int32)
    _, logits = run(chain(probabilities), ids(1, 1, 5), [5], target)
    np.testing.assert_allclose(logits[0], np.log(probabilities[:, target[0]].T), atol=1e-4)
    _, logits = run(fixed({5: 0.5, 6: 0.5}), ids(1, 1, 5), [5], target)
    assert (logits[0, :, 5] == logits[0, :, 6]).all()  # a tie is exactly a tie
    vocabulary = uni_vocabulary()
    *pieces, eos = vocabulary.encode("one two three four")
    for model, wanted in ((count({5: 1}), [3, 4, 1, 3, 1]), (anti(2), [2] * 5)):
        assert run(model, ids(1, 1, 5), [5], target)[1][0].argmax(-1).tolist() == wanted
    walk = np.asarray([[0, *pieces]], np.int32)
    spelled = run(spell(vocabulary, "one two three four"), ids(1, 1, 5), [5], walk)[1]
    assert spelled[0].argmax(-1).tolist() == [*pieces, eos]


def test_a_draft_of_another_width_has_its_own_encoder():
    target, draft = count(config=chain_config(32, d_model=64)), count()
    tokens, source = ids(14, 1, 6), ids(15, 1, 5)
    encoded, wide = run(target, source, [5], tokens)
    _, narrow = run(draft, source, [5], tokens)
    np.testing.assert_array_equal(wide.argmax(-1), narrow.argmax(-1))
    with pytest.raises(TypeError):
        draft.cross_keys_values(jnp.asarray(encoded))


def test_bfloat16_follows_float32():
    model = rand(16, bias_std=0.5)
    source, target = ids(17, 1, 8), ids(18, 1, 16)
    _, wanted = run(model, source, [8], target)
    _, logits = run(recast(model, jnp.bfloat16), source, [8], target)
    assert logits.dtype == np.float32
    assert np.sqrt(np.mean((logits - wanted)**2)) < 0.05 * wanted.std()
    assert (logits.argmax(-1) == wanted.argmax(-1)).mean() > 0.8


def test_activations_beyond_half_precision_survive_in_bfloat16():
    """A feed-forward output near 1e5, as large T5s have; float16 is refused instead."""
    model = rand(19, bias_std=0.5)
    for stack in (model.encoder_layers, model.decoder_layers):
        weight = stack[0].mlp.wo.weight
        weight[...] = weight[...] * 1e5
    source, target = ids(20, 1, 8), ids(21, 1, 16)
    _, wanted = run(model, source, [8], target)
    _, logits = run(recast(model, jnp.bfloat16), source, [8], target)
    assert np.isfinite(wanted).all() and np.isfinite(logits).all()
    assert (logits.argmax(-1) == wanted.argmax(-1)).mean() > 0.8
    tiny: T5Config = chain_config()
    with pytest.raises(ValueError, match="overflow in float16.*got float16"):
        T5(tiny, dtype=jnp.float16, rngs=nnx.Rngs(0))
