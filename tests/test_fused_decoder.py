"""Drafts whose decoder pass is one kernel: their weights, and their logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programmable import rand

from tpuspec.config import Quantization
from tpuspec.fused_decoder import FusedT5, StackedLayers, stacked_layers
from tpuspec.kernel_choice import KernelChoice
from tpuspec.kv_cache import DecoderCache
from tpuspec.memory import abstract_model
from tpuspec.presets import preset

pytestmark = pytest.mark.usefixtures("quick_compilation")

KERNELS = KernelChoice(implementation="pallas", interpret=True)
SLOTS, WINDOW = 2, 2


def model(**changes):
    shape = dict(vocab=48, d_model=128, d_kv=64, num_heads=2, bias_std=1.0) | changes
    return rand(0, **shape)


def cache(model, *, stacked: bool, tiled: bool = True) -> DecoderCache:
    return DecoderCache.zeros(model.config, slots=SLOTS, positions=20, source_positions=8,
                              dtype=jnp.float32, tiled=tiled, stacked=stacked)


def test_layers_are_kept_once_and_come_back_as_they_were():
    t5 = model()
    leaves = jax.tree.leaves(nnx.state(t5))
    layers = StackedLayers(t5)
    arrays = layers.stack(leaves)
    assert len(layers.names) == len(arrays)
    back, weights = layers.unstack(arrays)
    for leaf, again in zip(leaves, back, strict=True):
        np.testing.assert_array_equal(leaf, again)
    assert weights.qkv.shape == (2, 3 * 128, 128)
    # The table of biases by distance and the last norm are there twice.
    twice = sum(x.nbytes for x in (weights.bias, weights.last_norm))
    assert sum(x.nbytes for x in arrays) == sum(x.nbytes for x in leaves) + twice


def test_logits_are_those_of_xla():
    t5 = model()
    layers = StackedLayers(t5)
    _, weights = layers.unstack(layers.stack(jax.tree.leaves(nnx.state(t5))))
    fused = FusedT5(t5, weights)
    source, lengths_B = jnp.array([[5, 9, 7, 1], [3, 1, 0, 0]]), jnp.array([4, 2])
    keys_values = t5.cross_keys_values(t5.encode(source, lengths_B))
    mine, plain = cache(t5, stacked=True), cache(t5, stacked=False, tiled=False)
    for slot in range(SLOTS):
        rows = jax.tree.map(lambda x, slot=slot: x[slot:slot + 1], keys_values)
        mine, plain = (c.insert_source(jnp.int32(slot), rows) for c in (mine, plain))
    for turn, start_B in enumerate((jnp.array([0, 0]), jnp.array([2, 1]))):
        tokens = jnp.array([[7, 30 + turn], [11, 2 + turn]])
        found, mine = fused.decode(tokens, start_B, lengths_B, mine, None, KERNELS)
        expected, plain = t5.decode(tokens, start_B, lengths_B, plain)
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
        one, _ = fused.decode(tokens, start_B, lengths_B, mine, jnp.array([1, 0]), KERNELS)
        np.testing.assert_allclose(one[:, 0], expected[jnp.arange(2), jnp.array([1, 0])],
                                   atol=1e-4, rtol=0)


@pytest.mark.parametrize("changes", [
    dict(per_layer_relative_bias=True), dict(d_model=64), dict(d_ff=192),
    dict(quantization=Quantization.INT8)])
def test_other_models_keep_to_their_layers(changes):
    t5 = model()
    shapes = jax.eval_shape(lambda: cache(t5, stacked=True))
    assert stacked_layers(t5, shapes, WINDOW, KERNELS) is not None
    other = abstract_model(dataclasses.replace(t5.config, **changes), "float32")
    assert stacked_layers(other, shapes, WINDOW, KERNELS) is None


def test_a_model_whose_layers_are_too_large_keeps_to_them():
    t5 = abstract_model(preset("t5-v1_1-xxl"), "bfloat16")
    shapes = jax.eval_shape(lambda: DecoderCache.zeros(
        t5.config, slots=1, positions=128, source_positions=128, dtype="bfloat16", tiled=True,
        stacked=True))
    assert stacked_layers(t5, shapes, WINDOW, KERNELS) is None
