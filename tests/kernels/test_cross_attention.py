"""The cross-attention kernel, interpreted, and its XLA path against a float64 oracle.

Keys and values hold NaN at and beyond every slot's length.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import cross_oracle
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from tpuspec.kernels import AttentionBlocks, cross_attention, sharded_cross_attention, tile_heads

pytestmark = pytest.mark.usefixtures("quick_compilation")

S, N, H = 384, 4, 64
EDGES = [0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257, S - 1, S]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


class Inputs:
    """Random arguments of ``cross_attention``, and what the oracle makes of them."""

    def __init__(self, lengths_B, *, window, dtype="float32", num_heads=N, head_width=H):
        rng = np.random.default_rng(window)
        self.dtype = jnp.dtype(dtype)
        self.head_width = head_width
        slots, width = len(lengths_B), num_heads * head_width

        def rows(count):
            numbers = jnp.asarray(rng.normal(size=(slots, count, width)), self.dtype)
            return numbers * jnp.asarray(0.4, self.dtype)

        q = rows(window)
        dead_BS1 = (np.arange(S) >= np.asarray(lengths_B)[:, None])[..., None]
        k, v = (jnp.where(dead_BS1, jnp.nan, rows(S)) for _ in range(2))
        self.arguments = (q, tile_heads(k), tile_heads(v), jnp.asarray(lengths_B, jnp.int32))
        plain = [np.asarray(x, np.float32) for x in (q, k, v)]
        self.expected = cross_oracle(*plain, lengths_B, head_width)

    def call(self, **options):
        return functools.partial(cross_attention, head_width=self.head_width, **options)

    def check(self, mixed) -> None:
        np.testing.assert_allclose(np.asarray(mixed, np.float64), self.expected,
                                   atol=TOLERANCE[self.dtype.name], rtol=0)


def test_agrees_with_the_oracle_at_every_edge() -> None:
    inputs = Inputs(EDGES, window=3)
    call = inputs.call(implementation="pallas", interpret=True,
                       blocks=AttentionBlocks(cores=1, tiles=1, positions=128))
    inputs.check(jax.jit(call)(*inputs.arguments))
    inputs.check(inputs.call(implementation="xla")(*inputs.arguments))


def test_without_races_on_two_cores_from_memory_full_of_nan() -> None:
    inputs = Inputs([0, 130, S], window=16, dtype="bfloat16")
    call = inputs.call(
        implementation="pallas",
        blocks=AttentionBlocks(cores=2, tiles=1, positions=128),
        interpret=pltpu.InterpretParams(
            detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2),
    )  # fmt: skip
    inputs.check(jax.jit(call)(*inputs.arguments))


def test_heads_and_slots_split_over_a_mesh() -> None:
    inputs = Inputs([100, 0], window=2, num_heads=2, head_width=128)
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    call = sharded_cross_attention(mesh, heads="model", slots="data", head_width=128)
    compiled = jax.jit(call).lower(*inputs.arguments).compile()
    inputs.check(compiled(*inputs.arguments))
    for exchange in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
        assert exchange not in compiled.as_text()


def test_other_dtypes_are_left_to_xla() -> None:
    inputs = Inputs([5], window=2)
    q, *rest = inputs.arguments
    with pytest.raises(NotImplementedError, match="must both be float32 or bfloat16"):
        inputs.call(implementation="pallas", interpret=True)(q.astype(jnp.bfloat16), *rest)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", range(1, 17))
def test_every_window_over_many_lengths(window, dtype) -> None:
    inputs = Inputs(EDGES + list(range(3, S, 29)), window=window, dtype=dtype)
    call = inputs.call(implementation="pallas", interpret=True,
                       blocks=AttentionBlocks(cores=1, tiles=1, positions=128))
    inputs.check(jax.jit(call)(*inputs.arguments))
