"""The attention kernels at the shapes that the kernel report judges them by."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_case import KernelCase

from tpuspec.kernels import cross_attention, tiled_cache_shape, verify_attention

ITEMSIZE = 2  # bfloat16

Built = tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Slots, heads, positions in one pass, head width, positions of the cache."""

    B: int = 8
    N: int = 64
    G: int = 8
    H: int = 64
    T: int = 512

    def arrays(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Rows [B, G, E], one cache [B, P, T, 128], one integer a slot."""
        cache = tiled_cache_shape(
            slots=self.B, positions=self.T, num_heads=self.N, head_width=self.H
        )
        return (
            jax.ShapeDtypeStruct((self.B, self.G, self.N * self.H), jnp.bfloat16),
            jax.ShapeDtypeStruct(cache, jnp.bfloat16),
            jax.ShapeDtypeStruct((self.B,), jnp.int32),
        )

    def bytes_of(self, rows: int, positions: int) -> int:
        """Of G-row arrays [B, G, E], and of as many cached positions in all slots."""
        return (rows * self.B * self.G + positions) * self.N * self.H * ITEMSIZE

    def flops_of(self, positions: int) -> int:
        """Of q Kᵀ and of weights times V, with this many positions in all slots."""
        return 2 * 2 * self.N * self.H * self.G * positions


@functools.cache  # cases with the same program have the same builder
def verify_builder(shapes: Shapes) -> Callable[[str], Built]:
    rows, cache, start = shapes.arrays()
    bias = jax.ShapeDtypeStruct((shapes.N, 128), jnp.float32)
    function = functools.partial(verify_attention, implementation="pallas")
    return lambda generation: (function, [rows, rows, rows, cache, cache, bias, start])


@functools.cache
def cross_builder(shapes: Shapes) -> Callable[[str], Built]:
    rows, cache, lengths = shapes.arrays()
    function = functools.partial(cross_attention, head_width=shapes.H, implementation="pallas")
    return lambda generation: (function, [rows, cache, cache, lengths])


def verify_case(shapes: Shapes, lengths: tuple[int, ...], name: str) -> KernelCase:
    """``lengths``: positions of each slot, the new ones included."""
    live = sum(lengths)
    return KernelCase(
        name=f"verify_attention_{name}",
        kernel="verify_attention",
        build=verify_builder(shapes),
        # q, k, v and the result, K and V read; the new K and V written into the cache.
        hbm_bytes=shapes.bytes_of(4, 2 * live + 2 * shapes.B * shapes.G) + shapes.N * 128 * 4,
        flops=shapes.flops_of(live),
        scalars={0: np.array(lengths, np.int32) - shapes.G},
        donate_argnums=(3, 4),
    )


def cross_case(shapes: Shapes, lengths: tuple[int, ...], name: str) -> KernelCase:
    live = sum(lengths)
    return KernelCase(
        name=f"cross_attention_{name}",
        kernel="cross_attention",
        build=cross_builder(shapes),
        hbm_bytes=shapes.bytes_of(2, 2 * live),
        flops=shapes.flops_of(live),
        scalars={0: np.array(lengths, np.int32)},
    )


XXL, XXL_ONE_SLOT, XXL_G16 = Shapes(), Shapes(B=1), Shapes(G=16)
SMALL, T5_11B = Shapes(N=8), Shapes(N=128, H=128)
RAGGED = (512, 450, 384, 300, 250, 130, 64, 16)

CASES = (
    verify_case(XXL, 8 * (512,), "B=8_N=64_G=8_H=64_T=512"),
    verify_case(XXL, 8 * (250,), "B=8_N=64_G=8_H=64_T=512_length=250"),
    verify_case(XXL, RAGGED, "B=8_N=64_G=8_H=64_T=512_ragged"),
    verify_case(XXL_G16, 8 * (512,), "B=8_N=64_G=16_H=64_T=512"),
    verify_case(XXL_ONE_SLOT, (512,), "B=1_N=64_G=8_H=64_T=512"),
    verify_case(SMALL, 8 * (512,), "B=8_N=8_G=8_H=64_T=512"),
    verify_case(T5_11B, 8 * (512,), "B=8_N=128_G=8_H=128_T=512"),
    cross_case(XXL, 8 * (512,), "B=8_N=64_G=8_H=64_S=512"),
    cross_case(XXL, RAGGED, "B=8_N=64_G=8_H=64_S=512_ragged"),
    cross_case(XXL_ONE_SLOT, (512,), "B=1_N=64_G=8_H=64_S=512"),
)
