"""Reads the Hugging Face layout: config.json with safetensors or pytorch_model.bin, one
file or shards.

Names are resolved explicitly. The embedding is ``shared.weight`` or, where that
is absent, the encoder's and decoder's copies of it; the output head is
``lm_head.weight``. Two different tensors for one role are an error, and nothing
stands in for one that is missing.

Tied or not: before transformers 5 the configuration says (``tie_word_embeddings``,
true if absent). Since then it always says true, and the file decides: a head of
its own, different from the embedding, is untied.
"""

import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from tpuspec.checkpoint import AbstractModel, LoadedModel, Shardings, check_leaves
from tpuspec.checkpoint_writer import checksum
from tpuspec.config import Activation, T5Config
from tpuspec.lazy_tensor import Tensor
from tpuspec.safetensors_files import open_safetensors
from tpuspec.tensor_source import Part, Source
from tpuspec.torch_files import open_torch
from tpuspec.vocabulary_files import find_vocabulary

CONFIG_FILE = "config.json"
_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_HEAD = "lm_head.weight"
_MODEL_TYPES = ("t5", "mt5", "umt5")
# T5 1.0 saves one bias in cross-attention that no T5 ever used.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
# In the order of choice: repositories often hold the same weights in several forms.
_WEIGHTS = (("model.safetensors", open_safetensors), ("pytorch_model.bin", open_torch))


def import_huggingface(directory: str | os.PathLike[str], *, dtype: jnp.dtype | str | None = None,
                       shardings: Shardings | None = None) -> LoadedModel:
    """``open_huggingface`` and ``Source.load`` in one."""
    return open_huggingface(directory).load(dtype=dtype, shardings=shardings)


def open_huggingface(directory: str | os.PathLike[str]) -> Source:
    """Reads what a directory says of itself, and of the tensors no more than names it has
    twice.

    Raises:
      ValueError: naming what is missing, unexpected, misshaped, ambiguous,
        contradictory or of a type that is not supported.
    """
    path = Path(directory).expanduser().absolute()
    if not (path / CONFIG_FILE).is_file():
        raise ValueError(f"no Hugging Face checkpoint at {path}: there is no {CONFIG_FILE}")
    try:
        fields = dict(json.loads((path / CONFIG_FILE).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path / CONFIG_FILE} is damaged: {error}") from error
    tensors = _Roles(_open_weights(path))
    embedding = tensors.one_of(_EMBEDDINGS, "the embedding")
    tied = _tied(fields, tensors, embedding)
    config = _config(fields, tied)
    names = parameter_names(config) | {"embedding": (embedding,)}
    ignored = {*_EMBEDDINGS, _UNUSED} - {embedding} | ({_HEAD} if tied else set())
    leaves = AbstractModel(config, jnp.dtype(jnp.float32)).leaves
    check_leaves({n: tensor.shape for n, tensor in tensors.items() if n not in ignored},
                 {part: leaf.shape[-2:] for n, leaf in leaves.items() for part in names[n]},
                 str(path))
    return Source(
        path=path, layout="huggingface", config=config, tensors=tensors,
        parts={name: tuple(Part(part) for part in names[name]) for name in leaves},
        vocabulary=find_vocabulary(path, rows=config.vocab_size),
        provenance={"imported_from": path.name, "layout": "huggingface"})


def parameter_names(config: T5Config) -> dict[str, tuple[str, ...]]:
    """Our dotted parameter name -> the tensors in the Hugging Face layout that are
    its parts, in order along its first axis."""
    names: dict[str, tuple[str, ...]] = {"embedding": _EMBEDDINGS[:1]}
    if not config.tie_word_embeddings:
        names["lm_head.weight"] = (_HEAD,)
    wide = ("wi_0", "wi_1") if config.activation.gated else ("wi",)
    own, cross = ("qkv", "o"), ("q", "kv", "o")  # a letter is a tensor of theirs
    stacks: dict[str, tuple[int, list[tuple[str, str, tuple[str, ...]]]]] = {
        "encoder": (config.num_layers, [("attention", "SelfAttention", own)]),
        "decoder": (config.num_decoder_layers, [
            ("self_attention", "SelfAttention", own),
            ("cross_attention", "EncDecAttention", cross)])}
    for stack, (layers, attentions) in stacks.items():
        names[f"{stack}_norm.weight"] = (f"{stack}.final_layer_norm.weight",)
        for i in range(layers):
            ours, theirs = f"{stack}_layers.{i}.", f"{stack}.block.{i}.layer."
            for j, (attention, class_name, maps) in enumerate(attentions):
                for letters in maps:
                    names[f"{ours}{attention}.{letters}.weight"] = tuple(
                        f"{theirs}{j}.{class_name}.{letter}.weight" for letter in letters)
                norm = attention.removesuffix("attention") + "norm"
                norm = "attention_norm" if norm == "norm" else norm
                names[f"{ours}{norm}.weight"] = (f"{theirs}{j}.layer_norm.weight",)
            last = f"{theirs}{len(attentions)}."
            for name, parts in (("wi", wide), ("wo", ("wo",))):
                names[f"{ours}mlp.{name}.weight"] = tuple(
                    f"{last}DenseReluDense.{part}.weight" for part in parts)
            names[f"{ours}mlp_norm.weight"] = (f"{last}layer_norm.weight",)
            if i == 0 or config.per_layer_relative_bias:
                names[f"{stack}_bias.{i}.weight"] = (
                    f"{theirs}0.SelfAttention.relative_attention_bias.weight",)
    return names


def _open_weights(path: Path) -> dict[str, Tensor]:
    for single, read in _WEIGHTS:
        index = path / f"{single}.index.json"
        if not index.is_file():
            if (path / single).is_file():
                return read(path / single)
            continue
        try:
            promised = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is damaged: {error!r}") from error
        files = sorted(set(promised.values()))
        if (path / single).is_file() and single not in files:
            raise ValueError(f"{path} has two candidates for its weights: {single} and the shards "
                             f"of {index.name}; move one of them away")
        tensors: dict[str, Tensor] = {}
        for name in files:
            if Path(name).name != name:
                raise ValueError(f"{index.name} names a shard outside of its folder: {name}")
            shard = read(path / name)
            if twice := sorted(tensors.keys() & shard.keys()):
                raise ValueError(f"{twice[0]} is in two files")
            tensors |= shard
        if lost := sorted(promised.keys() - tensors.keys()):
            raise ValueError(f"{index.name} names tensors that no shard holds: {lost[:12]}")
        return tensors
    raise ValueError(f"no weights at {path}: neither "
                     + " nor ".join(f"{name}, {name}.index.json" for name, _ in _WEIGHTS))


class _Roles(dict[str, Tensor]):
    """Tensors of which several may stand for the same thing."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__(tensors)
        self._sums: dict[str, str] = {}

    def equal(self, one: str, other: str) -> bool:
        """By sums, so that never two of them are in memory."""
        return (self[one].shape == self[other].shape and self[one].dtype == self[other].dtype
                and self._sum(one) == self._sum(other))

    def _sum(self, name: str) -> str:
        if name not in self._sums:
            self._sums[name] = checksum(self[name].read())
        return self._sums[name]

    def one_of(self, names: tuple[str, ...], role: str) -> str:
        """The first name that is there; all that are there must hold the same."""
        present = [name for name in names if name in self]
        if not present:
            raise ValueError(f"{role} is missing: there is none of {', '.join(names)}")
        for other in present[1:]:
            if not self.equal(present[0], other):
                raise ValueError(f"{present[0]} and {other} differ; {role} must be one")
        return present[0]


def _tied(fields: Mapping[str, Any], tensors: _Roles, embedding: str) -> bool:
    differs = _HEAD in tensors and not tensors.equal(_HEAD, embedding)
    if _since_v5(fields):
        if _HEAD not in tensors and fields.get("tie_word_embeddings") is False:
            raise ValueError(f"{_HEAD} is missing, and tie_word_embeddings is false")
        return not differs
    if not fields.get("tie_word_embeddings", True):
        if _HEAD not in tensors:
            raise ValueError(f"{_HEAD} is missing, and tie_word_embeddings is false")
        return False
    if differs:
        raise ValueError(f"tie_word_embeddings is true, but {_HEAD} and {embedding} differ")
    return True


def _since_v5(fields: Mapping[str, Any]) -> bool:
    major = str(fields.get("transformers_version", "")).split(".")[0]
    return major.isdigit() and int(major) >= 5


def _config(fields: Mapping[str, Any], tied: bool) -> T5Config:
    model_type = fields.get("model_type", "t5")
    if model_type not in _MODEL_TYPES:
        raise ValueError(f"model_type must be one of {', '.join(_MODEL_TYPES)}, "
                         f"got {model_type}")
    known = {f.name for f in dataclasses.fields(T5Config)} - {
        "activation", "tie_word_embeddings", "scale_decoder_outputs", "per_layer_relative_bias",
        "quantization"}
    chosen = {name: value for name, value in fields.items()
              if name in known and value is not None}
    chosen.setdefault("num_decoder_layers", chosen.get("num_layers"))
    # Since version 5 only T5 1.0 scales, and its configuration says so.
    scale = fields.get("scale_decoder_outputs", tied and not _since_v5(fields))
    return T5Config.from_json(chosen | {
        "activation": _activation(fields), "tie_word_embeddings": tied,
        "scale_decoder_outputs": scale, "per_layer_relative_bias": model_type == "umt5"})


def _activation(fields: Mapping[str, Any]) -> Activation:
    """``feed_forward_proj`` decides. Fields that repeat it are used where it is
    absent, make a bare "gelu" or "silu" gated, and are warned about where they
    contradict it. Every GELU of a T5 is the tanh form."""
    gated = fields.get("is_gated_act")
    function = fields.get("dense_act_fn")
    named = fields.get("feed_forward_proj")
    if named is None and function is not None:
        named = (f"gated-{function}" if gated else function).replace("gelu_new", "gelu")
    elif named is None:
        named = "relu" if fields.get("model_type", "t5") == "t5" else "gated-gelu"
    meant = f"gated-{named}" if gated and named in ("gelu", "gelu_new", "silu") else named
    meant = meant.replace("gelu_new", "gelu")
    if meant not in set(Activation):
        raise ValueError(f"feed_forward_proj must be one of {', '.join(Activation)}, "
                         f"got {named}")
    activation = Activation(meant)
    usual = {Activation.RELU: ["relu"], Activation.GATED_GELU: ["gelu_new"],
             Activation.GATED_SILU: ["silu", "swish"]}[activation]
    if (named != meant or gated not in (None, activation.gated)
            or function not in (None, *usual)):
        warnings.warn(
            f"feed_forward_proj {named}, is_gated_act {gated} and dense_act_fn {function} "
            f"contradict each other; read as {activation}", stacklevel=4)
    return activation
