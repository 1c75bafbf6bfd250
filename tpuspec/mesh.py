"""Logical axes to mesh axes: the only place that knows the mesh.

``data`` splits the slots; ``model`` splits heads, feed-forward and vocabulary.
"""

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tpuspec.config import T5Config, check_range
from tpuspec.decode_state import DecodeState
from tpuspec.kv_cache import DecoderCache

DATA, MODEL = "data", "model"
RULES = {"vocab": MODEL, "heads": MODEL, "mlp": MODEL, "embed": None, "buckets": None,
         "parts": None}


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """Raises ValueError if the devices are fewer than data * model."""
    check_range("data", data, 1, None)
    check_range("model", model, 1, None)
    devices = jax.devices()
    if data * model > len(devices):
        raise ValueError(f"data * model must be at most {len(devices)} (the number of "
                         f"devices), got {data} * {model}")
    return Mesh(np.asarray(devices[:data * model]).reshape(data, model), (DATA, MODEL))


def divides(config: T5Config, mesh: Mesh) -> bool:
    """Whether the model can be split over the mesh; if not it is replicated whole
    (T5-small has 6 or 8 heads)."""
    parts = mesh.shape[MODEL]
    return all(size % parts == 0
               for size in (config.num_heads, config.d_ff, config.vocab_size))


def param_shardings(params: nnx.State, config: T5Config, mesh: Mesh, *, whole: bool = False,
                    ) -> nnx.State:
    """Shardings of a model's parameters, from the logical axes each was born with; each device
    has all of them where the model cannot be split, or is to be ``whole``."""
    split = not whole and divides(config, mesh)

    def one(variable: nnx.Variable) -> nnx.Variable:
        axes = [RULES[name] if split else None for name in variable.get_metadata("logical")]
        return variable.replace(NamedSharding(mesh, PartitionSpec(*axes)))

    return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def state_shardings(state: DecodeState, target: T5Config, draft: T5Config | None,
                    mesh: Mesh) -> DecodeState:
    """Shardings of a decode state: slots over ``data``, heads over ``model``. A stacked cache
    is that of a model that every device has whole."""

    def cache(tree: DecoderCache, config: T5Config) -> DecoderCache:
        heads = MODEL if divides(config, mesh) else None
        axes = (None, DATA) if tree.stacked else (DATA, heads)
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.tree.map(lambda _: sharding, tree)

    rows = NamedSharding(mesh, PartitionSpec(DATA))
    return DecodeState(
        slots=jax.tree.map(lambda _: rows, state.slots),
        target_cache=cache(state.target_cache, target),
        draft_cache=None if draft is None or state.draft_cache is None
        else cache(state.draft_cache, draft),
        history_BT=None if state.history_BT is None else rows,
        source_BS=None if state.source_BS is None else rows)


def place[Tree](tree: Tree, shardings: Tree) -> Tree:
    """Moves arrays to where they belong; shapes learn where their arrays would be."""
    def one(x: jax.Array | jax.ShapeDtypeStruct, sharding: Sharding) -> object:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.device_put(x, sharding)

    return jax.tree.map(one, tree, shardings)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
