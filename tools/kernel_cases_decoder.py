"""The decoder kernel at the shapes that the kernel report judges it by."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_case import KernelCase

from tpuspec.kernels import DecoderWeights, decoder_pass, tiled_cache_shape

ITEMSIZE = 2  # bfloat16
# T5 1.1 small, the draft of T5-XXL.
L, D, N, H, F = 8, 512, 6, 64, 1024
E = N * H
# Positions of the caches: for texts of 512, an engine keeps some spare ones.
T, S, LENGTH = 640, 512, 512

MAPS = dict(qkv=(3 * E, D), self_o=(D, E), cross_q=(E, D), cross_o=(D, E), wi=(2 * F, D),
            wo=(D, F))  # fmt: skip


def bfloat16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def builder(slots: int, window: int) -> Callable[[str], Any]:
    norms = {f"{part}_norm": bfloat16(L, 1, D) for part in ("self", "cross", "mlp")}
    weights = DecoderWeights(
        **norms, **{name: bfloat16(L, *shape) for name, shape in MAPS.items()},
        last_norm=bfloat16(1, D), bias=jax.ShapeDtypeStruct((N, 128), jnp.float32),
    )  # fmt: skip
    own, source = (
        bfloat16(L, *tiled_cache_shape(slots=slots, positions=n, num_heads=N, head_width=H))
        for n in (T, S)
    )
    numbers = jax.ShapeDtypeStruct((slots,), jnp.int32)
    rows = bfloat16(slots, window, D)
    arrays, tree = jax.tree.flatten((rows, weights, own, own, source, source, numbers, numbers))

    def function(*arrays: jax.Array) -> Any:
        return decoder_pass(*jax.tree.unflatten(tree, arrays), activation="gated-gelu",
                            epsilon=1e-6, implementation="pallas")  # fmt: skip

    return lambda generation: (function, arrays)


def case(slots: int, window: int) -> KernelCase:
    """Every slot at ``LENGTH``, the new positions included, with a source as long."""
    per_layer = sum(out * into for out, into in MAPS.values())
    new, cached = slots * window, slots * (LENGTH + S)
    norms = L * 3 * D + D
    rows = 2 * new * D  # in and out
    written = 2 * L * new * E
    return KernelCase(
        name=f"decoder_pass_L={L}_D={D}_N={N}_B={slots}_G={window}_T={T}_S={S}",
        kernel="decoder_pass",
        build=builder(slots, window),
        hbm_bytes=ITEMSIZE * (L * per_layer + norms + rows + written + 2 * L * cached * E)
        + N * 128 * 4,
        flops=2 * L * (new * per_layer + 2 * window * cached * E),
        scalars={
            0: np.full(slots, LENGTH - window, np.int32),
            1: np.full(slots, S, np.int32),
        },
        donate_argnums=(12, 13),
    )


CASES = (case(1, 8), case(8, 1))
