"""Expansions compute what the models that they were made of do, and cost what their sizes say."""

import dataclasses
import json

import expand_model
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_t5 import numpy_twin
from programmable import rand, recast, tensors_of
from test_demo_pair import PAIR

from tpuspec import checkpoint
from tpuspec.checkpoint import named_parameters
from tpuspec.config import Activation, T5Config
from tpuspec.presets import preset
from tpuspec.programs import teacher_forced_logits
from tpuspec.quantization import quantize

pytestmark = pytest.mark.usefixtures("quick_compilation")

SOURCE = np.array([[5, 9, 2, 17, 1]], np.int32)
WIDTH = 12
SMALL = dict(vocab=24, d_model=32, layers=2)
# Factors of the width: 4, of which the root is exact, and others; sizes that stay as they are.
LARGER = T5Config(vocab_size=24, d_model=128, d_kv=8, d_ff=80, num_heads=6, num_layers=3,
                  num_decoder_layers=4)
KINDS = {
    "tied relu": (dict(activation=Activation.RELU, tie_word_embeddings=True), LARGER),
    "untied gelu": (dict(), dataclasses.replace(LARGER, d_model=72, d_kv=12)),
    "silu, a bias in each layer": (
        dict(activation=Activation.GATED_SILU, per_layer_relative_bias=True),
        dataclasses.replace(LARGER, num_heads=4, num_layers=2)),
    "tied, unscaled": (dict(tie_word_embeddings=True, scale_decoder_outputs=False),
                       dataclasses.replace(LARGER, d_model=32, d_ff=64, num_decoder_layers=2)),
}


def logits(model, source, tokens):
    graph, params = nnx.split(model)
    return np.asarray(teacher_forced_logits(
        graph, params, source, np.array([source.shape[1]], np.int32), tokens))[0]


def greedy(model, source) -> list[int]:
    tokens = np.zeros((1, WIDTH), np.int32)
    for i in range(1, WIDTH):
        tokens[0, i] = logits(model, source, tokens)[i - 1].argmax()
    return tokens[0].tolist()


@pytest.mark.parametrize("kind", [
    kind if kind in ("tied relu", "untied gelu") else pytest.param(kind, marks=pytest.mark.slow)
    for kind in KINDS])
def test_an_expansion_computes_the_same(kind):
    changes, like = KINDS[kind]
    model = rand(3, **SMALL, **changes)
    if model.config.tie_word_embeddings and not model.config.scale_decoder_outputs:
        # Embeddings of size 1 make logits of size sqrt(D): where rounding shows.
        arrays = named_parameters(model)
        model = checkpoint.AbstractModel(model.config, "float32").build(
            arrays | {"embedding": arrays["embedding"] / 4})
    larger = expand_model.expand(model, like)
    assert all(getattr(larger.config, name) == getattr(like, name) for name in (
        "d_model", "d_kv", "d_ff", "num_heads", "num_layers", "num_decoder_layers"))
    tokens = np.random.default_rng(0).integers(0, 24, (1, WIDTH), np.int32)
    exact = numpy_twin(model, tensors_of(model)).logits(SOURCE[0], tokens[0])
    assert np.abs(logits(model, SOURCE, tokens) - exact).max() < 1e-4  # where it starts from
    assert np.abs(logits(larger, SOURCE, tokens) - exact).max() < 1e-4
    assert greedy(larger, SOURCE) == greedy(model, SOURCE)


def test_every_weight_is_a_number_of_its_own():
    """What is 0, or the same everywhere, could be skipped or kept once."""
    larger = expand_model.expand(rand(3, **SMALL), LARGER)
    for name, array in named_parameters(larger).items():
        if "norm" not in name:
            assert (np.asarray(array) != 0).all(), name
            assert len(np.unique(np.asarray(array))) > 0.99 * array.size, name


@pytest.mark.slow
def test_bfloat16_stays_bfloat16():
    model = recast(rand(3, **SMALL), jnp.bfloat16)
    larger = expand_model.expand(model, LARGER)
    assert {array.dtype for array in named_parameters(larger).values()} == {jnp.dtype("bfloat16")}
    tokens = np.zeros((1, WIDTH), np.int32)
    found, wanted = logits(larger, SOURCE, tokens), logits(model, SOURCE, tokens)
    assert np.abs(found - wanted).max() < 0.1 * wanted.std()  # rounding


@pytest.mark.parametrize("change, message", [
    (dict(d_model=31), "d_model must be at least 32, got 31"),
    (dict(num_decoder_layers=1), "num_decoder_layers must be at least 2, got 1")])
def test_smaller_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        expand_model.expand(rand(3, **SMALL), dataclasses.replace(LARGER, **change))


def test_quantized_is_refused():
    with pytest.raises(ValueError, match="quantization must be None, got int8"):
        expand_model.expand(quantize(rand(3, **SMALL)), LARGER)


def test_a_checkpoint_of_the_bundled_draft(tmp_path):
    made = tmp_path / "larger"
    expand_model.write(PAIR / "draft", made, "t5-v1_1-small")
    small, large = (checkpoint.load(path, dtype=np.float32) for path in (PAIR / "draft", made))
    wanted = preset("t5-v1_1-small")
    assert (large.config.d_model, large.config.num_heads, large.config.num_layers) == (
        wanted.d_model, wanted.num_heads, wanted.num_layers)
    assert large.vocabulary.differences(small.vocabulary) is None
    provenance = large.provenance
    assert "function-preserving expansion" in provenance["what"]
    assert provenance["of"] == json.loads((PAIR / "draft" / "model.json").read_text())["provenance"]
    assert T5Config.from_json(provenance["of_config"]) == small.config
    source = np.array([small.vocabulary.encode("translate English to German: I am hungry.")])
    tokens = np.array([greedy(small.model, source)])
    assert greedy(large.model, source) == tokens[0].tolist()
    assert len(set(tokens[0])) > 3
    difference = logits(large.model, source, tokens) - logits(small.model, source, tokens)
    assert np.abs(difference).max() < 1e-4
    with pytest.raises(ValueError, match="exists already"):
        expand_model.write(PAIR / "draft", made, "t5-v1_1-small")
