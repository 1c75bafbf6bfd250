"""Presets against the published parameter counts."""

import math

import pytest

from tpuspec.checkpoint import AbstractModel
from tpuspec.config import T5Config
from tpuspec.presets import PRESETS, preset

# Exact where the model card or the safetensors index of the release says so.
EXACT = {
    "t5-small": 60_506_624, "t5-base": 222_903_552, "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336, "t5-11b": 11_307_321_344,
    "t5-v1_1-small": 76_961_152, "t5-v1_1-base": 247_577_856, "t5-v1_1-large": 783_150_080,
    "t5-v1_1-xl": 2_849_757_184, "t5-v1_1-xxl": 11_135_332_352,
    "mt5-small": 300_176_768, "mt5-base": 582_401_280, "byt5-small": 299_637_760,
}
# In billions, to the digits that papers and model cards give.
ROUNDED = {
    "mt5-large": "1.23", "mt5-xl": "3.74", "mt5-xxl": "12.9",
    "byt5-base": "0.582", "byt5-large": "1.23", "byt5-xl": "3.74", "byt5-xxl": "12.9",
    "umt5-small": "0.31", "ul2": "20", "flan-ul2": "20",
    "madlad400-3b": "2.94", "madlad400-7b": "8.3", "madlad400-10b": "10.7",
}


def parameters(c: T5Config) -> int:
    attention = 4 * c.d_model * c.inner_dim + c.d_model
    feed_forward = (3 if c.activation.gated else 2) * c.d_model * c.d_ff + c.d_model
    table = c.relative_attention_num_buckets * c.num_heads
    tables = c.num_layers + c.num_decoder_layers if c.per_layer_relative_bias else 2
    embeddings = 1 if c.tie_word_embeddings else 2
    return (embeddings * c.vocab_size * c.d_model + tables * table + 2 * c.d_model
            + c.num_layers * (attention + feed_forward)
            + c.num_decoder_layers * (2 * attention + feed_forward))


@pytest.mark.parametrize("name", EXACT)
def test_parameter_count_is_that_of_the_release(name):
    assert parameters(preset(name)) == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameter_count_is_the_published_one(name):
    digits = len(ROUNDED[name].partition(".")[2])
    assert abs(parameters(preset(name)) / 1e9 - float(ROUNDED[name])) <= 0.6 * 10**-digits


@pytest.mark.parametrize("name", ["t5-small", "umt5-small", "byt5-small"])
def test_the_model_has_the_parameters_that_were_counted(name):
    leaves = AbstractModel(preset(name), "bfloat16").leaves.values()
    assert sum(math.prod(leaf.shape) for leaf in leaves) == parameters(preset(name))


def test_heads_need_not_fill_the_width():
    """The paper's draft has six heads of 64 in a width of 512."""
    assert preset("t5-v1_1-small").inner_dim == 384
    assert preset("t5-11b").inner_dim == 16384
    assert preset("madlad400-10b").inner_dim == 4096


def test_drafts_share_their_targets_vocabulary():
    for family in ("t5-v1_1", "flan-t5", "mt5", "umt5"):
        sizes = {c.vocab_size for name, c in PRESETS.items() if name.startswith(family)}
        assert len(sizes) == 1


def test_unknown_preset_is_refused_with_the_names():
    with pytest.raises(ValueError, match="t5-v1_1-xxl.*got t5-huge"):
        preset("t5-huge")
