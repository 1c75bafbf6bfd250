"""A larger T5 that computes the same function: the price of a large model, the text of a small one.

    tools/expand_model.py tpuspec/demo_pair/target DIR --like t5-v1_1-large

What speculation gains depends on what the target costs and on how often drafts are accepted.
With random weights of a large model's size the second means nothing; with an expansion of a
model that was trained it is that model's own. Every weight is there and is read from memory.

How: the model's weights are a corner of the larger ones, layers first. Whatever else writes to
the residual stream (embedding, attention and feed-forward outputs: of further dimensions, heads,
units and layers) is 1e-20 of a random weight, which a float forgets beside numbers near 1;
whatever only reads is random. A norm over D' dimensions of which D are not 0 sees D/D' of the
mean square: its weights are multiplied by sqrt(D/D'), and its epsilon by D/D'. Logits agree to
rounding: in float32 to some 1e-5 of their size. In bfloat16 sums in another order round to other
numbers, as they do between any two programs, and a factor that is no power of two adds to it.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np

from tpuspec import checkpoint, presets  # before JAX: it keeps libtpu from looking for a TPU
from tpuspec.checkpoint import AbstractModel, named_parameters
from tpuspec.config import T5Config, check_range
from tpuspec.t5 import T5

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip

NEXT_TO_NOTHING = 1e-20  # not 0: equal weights could be stored once
_SIZES = ("d_model", "d_kv", "d_ff", "num_heads", "num_layers", "num_decoder_layers")


def expanded_config(config: T5Config, like: T5Config) -> T5Config:
    """The configuration of ``expand``: sizes of ``like``, all else of ``config``.

    Raises:
      ValueError: a size of ``like`` is below the model's, or the model is quantized.
    """
    if config.quantization is not None:
        raise ValueError(f"quantization must be None, got {config.quantization}: expand what the "
                         "weights were made of")
    sizes = {name: getattr(like, name) for name in _SIZES}
    for name, size in sizes.items():
        check_range(name, size, getattr(config, name), None)
    epsilon = config.layer_norm_epsilon * config.d_model / like.d_model
    return dataclasses.replace(config, **sizes, layer_norm_epsilon=epsilon)


def expand(model: T5, like: T5Config, *, seed: int = 0) -> T5:
    """A model of the sizes of ``like`` with the logits of ``model``, up to rounding.

    Args:
      model: not quantized.
      seed: of the weights that have no effect.

    Raises:
      ValueError: as ``expanded_config``.
    """
    old, new = model.config, expanded_config(model.config, like)
    parameters = named_parameters(model)
    wanted = AbstractModel(new, parameters["embedding"].dtype)
    key, made = jax.random.key(seed), {}
    for number, (name, leaf) in enumerate(wanted.leaves.items()):
        made[name] = _expanded(jax.random.fold_in(key, number), name, leaf,
                               parameters.get(name), old, new)
    return wanted.build(made)


def _expanded(key: jax.Array, name: str, leaf: jax.ShapeDtypeStruct, weight: jax.Array | None,
              old: T5Config, new: T5Config) -> jax.Array:
    """One parameter; ``weight`` is None in a layer that the model has not."""
    if "norm" in name:
        whole = jnp.ones(leaf.shape, leaf.dtype)
        if weight is None:
            return whole
        factor = (old.d_model / new.d_model)**0.5
        if name == "decoder_norm.weight" and old.scale_decoder_outputs:
            factor = 1.0  # logits are scaled by D'^-0.5 in place of D^-0.5 already
        return whole.at[:old.d_model].set((weight.astype(jnp.float32) * factor).astype(leaf.dtype))
    std = leaf.shape[-1]**-0.5
    if name == "embedding" or name.endswith((".o.weight", ".wo.weight")):
        std = NEXT_TO_NOTHING
    whole = jnp.asarray(std, leaf.dtype) * jax.random.normal(key, leaf.shape, leaf.dtype)
    if weight is None:
        return whole
    whole, corner = _by_head(name, whole, new), _by_head(name, weight, old)
    if name.endswith("attention.qkv.weight") and new.d_kv > old.d_kv:
        # Further dimensions of a head must not change its products of query and key.
        whole = whole.at[0, :, old.d_kv:].multiply(NEXT_TO_NOTHING)
    elif name.endswith("attention.q.weight") and new.d_kv > old.d_kv:
        whole = whole.at[:, old.d_kv:].multiply(NEXT_TO_NOTHING)
    at = tuple(slice(0, size) for size in corner.shape)
    return whole.at[at].set(corner).reshape(leaf.shape)


def _by_head(name: str, weight: jax.Array, config: T5Config) -> jax.Array:
    """With N * H as two axes, so that a head's dimensions stay together."""
    heads = (config.num_heads, config.d_kv)
    if name.endswith((".qkv.weight", ".kv.weight", ".q.weight")):
        return weight.reshape(*weight.shape[:-2], *heads, weight.shape[-1])
    return weight.reshape(-1, *heads) if name.endswith(".o.weight") else weight


def write(source: pathlib.Path, directory: pathlib.Path, like: str) -> Mapping[str, T5Config]:
    """A float32 checkpoint of ``source``'s expansion, vocabulary included, that says what it is.

    Args:
      like: name of a public model, for its sizes.

    Returns:
      Both configurations, by "from" and "to".

    Raises:
      ValueError: as ``expanded_config``, ``checkpoint.load`` and ``checkpoint.save``.
    """
    sizes = presets.preset(like)
    expanded_config(checkpoint.describe(source).config, sizes)  # before anything is loaded
    # In bfloat16 a factor that is no power of two would round the weights of every norm.
    loaded = checkpoint.load(source, dtype=jnp.dtype("float32"))
    larger = expand(loaded.model, sizes)
    checkpoint.save(directory, larger, loaded.vocabulary, provenance={
        "made_by": "tools/expand_model.py",
        "what": f"a function-preserving expansion to the sizes of {like}: it computes what the "
                "model below does, at the price of the larger one; it knows no more",
        "of": loaded.provenance, "of_config": loaded.config.to_json()})
    return {"from": loaded.config, "to": larger.config}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path, help="a checkpoint of ours")
    parser.add_argument("directory", type=pathlib.Path, help="a new one")
    parser.add_argument("--like", default="t5-v1_1-large", help="public model, for its sizes")
    args = parser.parse_args()
    try:
        made = write(args.source, args.directory, args.like)
    except ValueError as error:
        parser.error(str(error))
    for name, config in made.items():
        count = sum(int(np.prod(leaf.shape))
                    for leaf in AbstractModel(config, "float32").leaves.values())
        print(f"{name:<5}{count:>14,} parameters")


if __name__ == "__main__":
    main()
