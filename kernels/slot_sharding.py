"""Functions of slots on a mesh: each device takes some of them, whole."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def by_slots(function: Callable[..., Any], mesh: jax.sharding.Mesh, slots: str | tuple[str, ...],
             ) -> Callable[..., Any]:
    """``function`` with axis 0 of all arguments and results, B, split over axes of a mesh.

    Slots that are missing for equal shares are made up of zeros and dropped again.
    """
    axes = (slots,) if isinstance(slots, str) else slots
    parts = math.prod(mesh.shape[axis] for axis in axes)
    split = jax.shard_map(function, mesh=mesh, in_specs=jax.P(axes), out_specs=jax.P(axes),
                          check_vma=False)

    def call(*arguments: Any) -> Any:
        count = len(jax.tree.leaves(arguments)[0])
        missing = -count % parts

        def pad(x: jax.Array) -> jax.Array:
            return jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1))

        return jax.tree.map(lambda x: x[:count], split(*jax.tree.map(pad, arguments)))

    return call
