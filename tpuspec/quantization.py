"""Models with int8 weights, made of models without."""

import dataclasses
import os

import jax
import jax.numpy as jnp
from flax import nnx

from tpuspec import checkpoint
from tpuspec.checkpoint import AbstractModel, LoadedModel, Shardings, named_parameters
from tpuspec.config import Quantization, T5Config
from tpuspec.int8_weights import quantize_weight
from tpuspec.t5 import T5


def quantize(model: T5, *, dtype: jnp.dtype | None = None,
             shardings: Shardings | None = None) -> T5:
    """The same model with int8 weights.

    Works through one weight after the other, where it lies; the results go to the
    shardings asked for, so that a model on the host needs room for the small one alone
    on the devices.

    Args:
      model: not quantized yet.
      dtype: of the weights that stay whole; None keeps it.
      shardings: as in ``checkpoint.load``.

    Raises:
      ValueError: the model is quantized, or a weight, which it names, is not finite.
    """
    if model.config.quantization is not None:
        raise ValueError(f"the weights are {model.config.quantization} already, and what "
                         "rounding took from them is gone: quantize what they were made of")
    arrays = named_parameters(model)
    config = dataclasses.replace(model.config, quantization=Quantization.INT8)
    wanted = AbstractModel(config, arrays["embedding"].dtype if dtype is None else dtype,
                           shardings)
    made: dict[str, jax.Array] = {}
    for name, array in arrays.items():
        leaf = wanted.leaves[name]
        if leaf.dtype != jnp.int8:
            made[name] = jax.device_put(array.astype(leaf.dtype), leaf.sharding)
            continue
        if not jnp.isfinite(array).all():
            raise ValueError(f"{name} holds numbers that are not finite: it has no int8 form")
        steps, scale = quantize_weight(array)
        scale_name = name.removesuffix("weight") + "scale"
        made[name] = jax.device_put(steps, leaf.sharding)
        made[scale_name] = jax.device_put(scale, wanted.leaves[scale_name].sharding)
    return wanted.build(made)


def load_int8(directory: str | os.PathLike[str], *, dtype: jnp.dtype | None = None,
              shardings: Shardings | None = None) -> LoadedModel:
    """``checkpoint.load`` of a checkpoint that is int8; another is quantized, on the host."""
    if checkpoint.describe(directory).config.quantization is not None:
        return checkpoint.load(directory, dtype=dtype, shardings=shardings)
    loaded = checkpoint.load(directory, shardings=_on_host)
    model = quantize(loaded.model, dtype=dtype, shardings=shardings)
    return dataclasses.replace(loaded, model=model, config=model.config)


def _on_host(params: nnx.State, config: T5Config) -> nnx.State:
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    return jax.tree.map(lambda _: host, params)
