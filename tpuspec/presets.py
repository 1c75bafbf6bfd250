"""Configurations of the public T5 models, by name.

Flan-T5 and the LM-adapted models have the shapes of T5 1.1, Flan-UL2 those of
UL2. ``vocab_size`` is the rows of the embedding, a multiple of 128 that is at
least the tokenizer's size.

Sources: Raffel et al. 2020 (T5), Xue et al. 2021 (mT5) and 2022 (ByT5), Chung
et al. 2023 (umT5), Tay et al. 2022 (UL2), Kudugunta et al. 2023 (MADLAD-400),
and the configurations in the T5X repository.
"""

from types import MappingProxyType
from typing import Any

from tpuspec.config import Activation, T5Config


def _config(d_model: int, d_ff: int, num_heads: int, layers: tuple[int, int], *,
            vocab_size: int = 32128, d_kv: int = 64, **changes: Any) -> T5Config:
    return T5Config(vocab_size=vocab_size, d_model=d_model, d_kv=d_kv, d_ff=d_ff,
                    num_heads=num_heads, num_layers=layers[0],
                    num_decoder_layers=layers[1], **changes)


def _t5_1_0(*shape: Any, d_kv: int = 64) -> T5Config:
    return _config(*shape, d_kv=d_kv, activation=Activation.RELU, tie_word_embeddings=True)


_T5_1_1: dict[str, tuple[int, int, int, tuple[int, int]]] = {
    "small": (512, 1024, 6, (8, 8)),
    "base": (768, 2048, 12, (12, 12)),
    "large": (1024, 2816, 16, (24, 24)),
    "xl": (2048, 5120, 32, (24, 24)),
    "xxl": (4096, 10240, 64, (24, 24)),
}
_T5_1_1_CONFIGS = {size: _config(*shape) for size, shape in _T5_1_1.items()}
_UL2 = _config(4096, 16384, 16, (32, 32), d_kv=256, activation=Activation.GATED_SILU)
_MADLAD: dict[str, Any] = {"vocab_size": 256000, "eos_token_id": 2, "pad_token_id": 1}

PRESETS = MappingProxyType({
    "t5-small": _t5_1_0(512, 2048, 8, (6, 6)),
    "t5-base": _t5_1_0(768, 3072, 12, (12, 12)),
    "t5-large": _t5_1_0(1024, 4096, 16, (24, 24)),
    "t5-3b": _t5_1_0(1024, 16384, 32, (24, 24), d_kv=128),
    "t5-11b": _t5_1_0(1024, 65536, 128, (24, 24), d_kv=128),
    **{f"t5-v1_1-{size}": config for size, config in _T5_1_1_CONFIGS.items()},
    **{f"t5-lm-adapt-{size}": config for size, config in _T5_1_1_CONFIGS.items()},
    **{f"flan-t5-{size}": config for size, config in _T5_1_1_CONFIGS.items()},
    **{f"mt5-{size}": _config(*shape, vocab_size=250112) for size, shape in _T5_1_1.items()},
    **{f"umt5-{size}": _config(*_T5_1_1[size], vocab_size=256384, per_layer_relative_bias=True)
       for size in ("small", "base", "xl", "xxl")},
    "byt5-small": _config(1472, 3584, 6, (12, 4), vocab_size=384),
    "byt5-base": _config(1536, 3968, 12, (18, 6), vocab_size=384),
    "byt5-large": _config(1536, 3840, 16, (36, 12), vocab_size=384),
    "byt5-xl": _config(2560, 6720, 32, (36, 12), vocab_size=384),
    "byt5-xxl": _config(4672, 12352, 64, (36, 12), vocab_size=384),
    "ul2": _UL2,
    "flan-ul2": _UL2,
    "madlad400-3b": _config(1024, 8192, 16, (32, 32), d_kv=128, **_MADLAD),
    "madlad400-7b": _config(2048, 8192, 16, (48, 48), d_kv=128, **_MADLAD),
    "madlad400-10b": _config(2048, 16384, 16, (32, 32), d_kv=256, **_MADLAD),
})


def preset(name: str) -> T5Config:
    """Raises ValueError that lists the names."""
    if name not in PRESETS:
        raise ValueError(f"model must be one of {', '.join(PRESETS)}, got {name}")
    return PRESETS[name]


# What no array shows. The gate is named by whether there is one.
_NOT_SHAPES = ("activation", "vocab_size", "eos_token_id", "pad_token_id", "decoder_start_token_id",
               "layer_norm_epsilon", "relative_attention_max_distance", "quantization")


def same_shapes(config: T5Config) -> dict[str, T5Config]:
    """The public models whose arrays, but for the rows of the embedding, have these shapes."""

    def shapes(of: T5Config) -> dict[str, Any]:
        return of.to_json() | dict.fromkeys(_NOT_SHAPES) | {"gated": of.activation.gated}

    return {name: known for name, known in PRESETS.items() if shapes(known) == shapes(config)}


def family(config: T5Config) -> str:
    """What people call models of this kind; several kinds have the same arrays."""
    if config.per_layer_relative_bias:
        return "umT5"
    if config.activation is Activation.RELU:
        return "T5 1.0" if config.tie_word_embeddings else "T5"
    if config.activation is Activation.GATED_SILU:
        return "UL2 or Flan-UL2"
    if config.eos_token_id == 2:
        return "MADLAD-400"
    if config.vocab_size <= 512:
        return "ByT5"
    return "mT5" if config.vocab_size > 200_000 else "T5 1.1, LM-adapted or Flan-T5"
