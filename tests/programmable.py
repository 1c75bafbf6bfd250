"""T5 models whose output distribution is known in closed form, and small random ones.

A CHAIN model is a real T5 1.1 in which every attention and feed-forward output
matrix is zero and the embedding is the identity: the decoder's state is the last
token alone, so the next-token distribution is exactly ``P[:, last]``, whatever
the source. All are float32 and deterministic.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from tpuspec.checkpoint import AbstractModel, named_parameters
from tpuspec.config import T5Config
from tpuspec.huggingface import parameter_names
from tpuspec.t5 import T5

IMPOSSIBLE = -60.0  # log-probability of what never happens; finite, so no NaN arises
UNLIKELY = -30.0  # the same for COUNT, ANTI and SPELL


def build(config: T5Config, fill: Callable[[str, tuple[int, ...]], Any]) -> T5:
    """A float32 T5 with each leaf from ``fill(dotted path, shape)``, e.g. ``lm_head.weight``."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: T5(config, rngs=nnx.Rngs(0))))
    paths, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    leaves = []
    for path, leaf in paths:
        keys = [str(getattr(k, "key", getattr(k, "idx", ""))) for k in path
                if not isinstance(k, jax.tree_util.GetAttrKey)]
        leaves.append(jnp.broadcast_to(
            jnp.asarray(fill(".".join(keys), leaf.shape), jnp.float32), leaf.shape))
    return nnx.merge(graph, jax.tree_util.tree_unflatten(treedef, leaves))


def chain_config(vocab: int = 32, **changes: Any) -> T5Config:
    """The smallest T5 1.1 that holds a CHAIN over ``vocab`` ids."""
    return T5Config(**{"vocab_size": vocab, "d_model": vocab, "d_kv": 8, "d_ff": 8, "num_heads": 1,
                       "num_layers": 1, "num_decoder_layers": 1} | changes)


def chain_of_logits(logits: np.ndarray, config: T5Config | None = None) -> T5:
    """Next-token logits ``logits[:, last]``, [V(next), V(last)]."""
    logits = np.asarray(logits, np.float64)
    config = config or chain_config(logits.shape[0])
    vocab, width = config.vocab_size, config.d_model
    if logits.shape != (vocab, vocab) or width < vocab or config.tie_word_embeddings:
        raise ValueError(f"a CHAIN of {logits.shape} does not fit {config}")
    # RMSNorm turns a one-hot row into one_hot / sqrt(1 / D + epsilon).
    head = np.zeros((vocab, width))
    head[:, :vocab] = logits * np.sqrt(1 / width + config.layer_norm_epsilon)

    def fill(path: str, shape: tuple[int, ...]) -> np.ndarray | float:
        if path == "embedding":
            return np.eye(*shape)
        if path == "lm_head.weight":
            return head
        return 1.0 if "norm" in path else 0.0

    return build(config, fill)


def chain(P: np.ndarray, config: T5Config | None = None) -> T5:
    """CHAIN: next-token probabilities ``P[:, last]``, [V(next), V(last)]."""
    with np.errstate(divide="ignore"):
        return chain_of_logits(np.maximum(np.log(np.asarray(P, np.float64)), IMPOSSIBLE), config)


def fixed(p: Mapping[int, float] | Sequence[float] | np.ndarray, vocab: int = 32,
          config: T5Config | None = None) -> T5:
    """FIXED: the same distribution after every id; a dict names ids, the rest get 0."""
    column = np.zeros(config.vocab_size if config else vocab)
    if isinstance(p, Mapping):
        column[list(p)] = list(p.values())
    else:
        column[:len(p)] = p
    return chain(np.repeat(column[:, None], column.size, axis=1), config)


def _walk(following: Sequence[int], config: T5Config | None) -> T5:
    logits = np.full((len(following), len(following)), UNLIKELY)
    logits[list(following), np.arange(len(following))] = 0.0
    return chain_of_logits(logits, config)


def count(redirect: Mapping[int, int] | None = None, vocab: int = 32,
          config: T5Config | None = None) -> T5:
    """COUNT: 0 -> 3 -> 4 -> 5 ..., the last id -> 3; ``redirect`` changes single entries."""
    vocab = config.vocab_size if config else vocab
    following = [3] + [t + 1 for t in range(1, vocab - 1)] + [3]
    for last, next_id in (redirect or {}).items():
        following[last] = next_id
    return _walk(following, config)


def anti(token: int = 2, vocab: int = 32, config: T5Config | None = None) -> T5:
    """ANTI: always ``token``, an id that the target is known never to choose."""
    return _walk([token] * (config.vocab_size if config else vocab), config)


def spell(vocabulary: Any, text: str, vocab: int | None = None) -> T5:
    """SPELL: walks through the pieces of ``text``, then EOS; after EOS comes unk (id 2)."""
    ids = vocabulary.encode(text)
    if len(set(ids)) != len(ids) or 0 in ids:
        raise ValueError(f"SPELL needs a text of different pieces, got {ids}")
    following = [2] * (vocab or vocabulary.size)
    for last, next_id in zip([0, *ids[:-1]], ids, strict=True):
        following[last] = next_id
    return _walk(following, None)


def rand(seed: int = 0, *, vocab: int = 32, d_model: int = 64, layers: int = 2,
         noise: float = 0.0, noise_seed: int = 1, bias_std: float = 3.0,
         **changes: Any) -> T5:
    """RAND: random T5 1.1 with 4 heads; outputs depend on history, position and source.

    ``noise`` adds that share of each leaf's standard deviation (a noisy copy);
    ``changes`` override fields of the configuration.
    """
    config = T5Config(**{"vocab_size": vocab, "d_model": d_model, "d_kv": d_model // 4,
                         "d_ff": 2 * d_model, "num_heads": 4, "num_layers": layers,
                         "num_decoder_layers": layers} | changes)
    weights, disturb = np.random.default_rng(seed), np.random.default_rng([seed, noise_seed])

    def fill(path: str, shape: tuple[int, ...]) -> np.ndarray | float:
        if "norm" in path:
            return 1.0
        std = shape[-1]**-0.5  # weights are stored [out, in]
        if path in ("embedding", "lm_head.weight"):
            std = 1.0
        elif "_bias." in path:
            std = bias_std
        return std * (weights.normal(size=shape) + noise * disturb.normal(size=shape))

    return build(config, fill)


def tensors_of(model: T5) -> dict[str, np.ndarray]:
    """A model's parameters under their Hugging Face names, its stacks taken apart."""
    parameters = named_parameters(model)
    tensors: dict[str, np.ndarray] = {}
    for ours, theirs in parameter_names(model.config).items():
        array = np.asarray(parameters[ours])
        tensors |= zip(theirs, array if array.ndim == 3 else [array], strict=True)
    return tensors


def recast(model: T5, dtype: Any) -> T5:
    """The same model in another dtype."""
    return AbstractModel(model.config, dtype).build(
        {name: w.astype(dtype) for name, w in named_parameters(model).items()})


def write_huggingface(path: Path, model: T5, tensors: Mapping[str, np.ndarray] | None = None,
                      **changes: Any) -> Path:
    """A directory as transformers 4 writes it; ``changes`` to config.json, None removes."""
    write_config(path, model.config, **changes)
    tensors = tensors_of(model) if tensors is None else tensors
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()},
              path / "model.safetensors")
    return path


def write_config(path: Path, config: T5Config, **changes: Any) -> None:
    """A new directory with the config.json of ``write_huggingface``."""
    path.mkdir()
    fields = {k: v for k, v in config.to_json().items()
              if k not in ("activation", "scale_decoder_outputs", "per_layer_relative_bias")}
    fields |= {"model_type": "umt5" if config.per_layer_relative_bias else "t5",
               "feed_forward_proj": str(config.activation),
               "transformers_version": "4.40.0"}
    (path / "config.json").write_text(json.dumps(
        {k: v for k, v in (fields | changes).items() if v is not None}))
