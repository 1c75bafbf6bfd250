"""What an engine holds on a device, before anything is loaded."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tpuspec import mesh as mesh_lib
from tpuspec.config import EngineConfig, T5Config
from tpuspec.decode_state import DecodeState
from tpuspec.kernel_choice import KernelChoice
from tpuspec.programs import Programs
from tpuspec.t5 import T5

_GIB = 2**30


def abstract_model(config: T5Config, dtype: Any) -> T5:
    """A model of shapes alone."""
    return nnx.eval_shape(lambda: T5(config, dtype=dtype, rngs=nnx.Rngs(0)))


def bytes_on_device(tree: Any) -> int:
    """Of arrays or shapes, on the device that holds most."""
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None
                           else leaf.shape)) * leaf.dtype.itemsize
               for leaf in jax.tree.leaves(tree))


def passes_that_read(name: str, tied: bool) -> tuple[str, ...]:
    """"encode" or "decode", if such a pass reads the weight of this name as a whole.

    Args:
      tied: whether the embedding gives the logits.
    """
    if "encoder" in name or "cross_attention" in name and "kv" in name:
        return ("encode",)
    if "decoder" in name or "lm_head" in name or ("embedding" in name and tied):
        return ("decode",)
    return ()  # an embedding of which a few rows are read


def abstract_state(programs: Programs, mesh: Mesh | None) -> DecodeState:
    """An engine's state as shapes, with their shardings on a mesh."""
    state: DecodeState = jax.eval_shape(programs.new_state)
    return state if mesh is None else mesh_lib.place(state, programs.state_shardings(state))


def check_fits(models: Sequence[T5Config], config: EngineConfig, *, dtype: Any,
               mesh: Mesh | None, available: int | None) -> None:
    """Refuses what cannot fit, before it is loaded.

    Args:
      models: target, and draft if there is one.
      dtype: of weights and caches.
      available: bytes of one device; None, where it is not known, passes.

    Raises:
      ValueError: with the sum. Programs take some more, which is not known here.
    """
    if available is None:
        return
    abstract = [abstract_model(model, dtype) for model in models]
    programs = Programs(abstract[0], abstract[1] if len(abstract) == 2 else None, config,
                        vocabulary_size=min(model.vocab_size for model in models), mesh=mesh,
                        kernels=KernelChoice.default(mesh))
    weights = bytes_on_device(programs.weights(*abstract))
    caches = bytes_on_device(abstract_state(programs, mesh))
    if weights + caches > available:
        raise ValueError(
            f"weights of {weights / _GIB:.2f} GiB and caches of {caches / _GIB:.2f} GiB "
            f"({config.slots} slots, {config.max_source_length} source and "
            f"{config.target_positions} target positions) are "
            f"{(weights + caches) / _GIB:.2f} GiB on each device, which has "
            f"{available / _GIB:.2f} GiB: fewer slots, shorter texts or more devices "
            "(--mesh) are needed")


def device_memory(device: jax.Device) -> int | None:
    """Bytes of a device, or of the machine's memory for the CPU; None if not known."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform == "cpu" and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
