"""The verification kernel, interpreted, and its XLA path against a float64 oracle.

Caches hold NaN at and beyond every slot's length, and are compared whole afterwards.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import verify_oracle
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from tpuspec.kernels import (
    AttentionBlocks,
    sharded_verify_attention,
    tile_heads,
    untile_heads,
    verify_attention,
)
from tpuspec.kernels.attention_blocks import blocks_for

pytestmark = pytest.mark.usefixtures("quick_compilation")

T, N, H = 384, 4, 64
ONE_CORE = AttentionBlocks(cores=1, tiles=1, positions=128)
TWO_CORES = AttentionBlocks(cores=2, tiles=1, positions=128)
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def edges(window: int, positions: int = T) -> list[int]:
    """Starts at which something changes: 0, 1, row tiles, block edges, the end."""
    return sorted(
        {0, 1, 15, 16, 127, 128, 129, 256, positions - window}
        | {128 - window, 129 - window, 257 - window}
    )


class Inputs:
    """Random arguments of ``verify_attention``, and what the oracle makes of them."""

    def __init__(self, start_B, *, window, dtype="float32", num_heads=N, head_width=H,
                 distances=128, positions=T):
        rng = np.random.default_rng(window)
        self.dtype = jnp.dtype(dtype)
        slots, width = len(start_B), num_heads * head_width

        def rows(count):
            numbers = jnp.asarray(rng.normal(size=(slots, count, width)), self.dtype)
            return numbers * jnp.asarray(0.4, self.dtype)

        q, k, v = (rows(window) for _ in range(3))
        dead_BT1 = (np.arange(positions) >= np.asarray(start_B)[:, None])[..., None]
        caches = [jnp.where(dead_BT1, jnp.nan, rows(positions)) for _ in range(2)]
        bias = jnp.asarray(rng.normal(size=(num_heads, distances)), jnp.float32)
        self.arguments = (q, k, v, *map(tile_heads, caches), bias,
                          jnp.asarray(start_B, jnp.int32))
        plain = [np.asarray(x, np.float32) for x in (q, k, v, *caches, bias)]
        self.expected = verify_oracle(*plain, start_B)

    def check(self, results) -> None:
        mixed, *caches = results
        np.testing.assert_allclose(np.asarray(mixed, np.float64), self.expected[0],
                                   atol=TOLERANCE[self.dtype.name], rtol=0)
        for cache, expected in zip(caches, self.expected[1:], strict=True):
            cache = np.asarray(untile_heads(cache), np.float32)
            np.testing.assert_array_equal(cache, expected.astype(np.float32))


def run(inputs: Inputs, **options):
    call = functools.partial(verify_attention, implementation="pallas", **options)
    return jax.jit(call)(*inputs.arguments)


def test_agrees_with_the_oracle_at_every_edge() -> None:
    inputs = Inputs(edges(8), window=8, dtype="bfloat16")
    inputs.check(run(inputs, blocks=ONE_CORE, interpret=True))
    inputs.check(verify_attention(*inputs.arguments, implementation="xla"))


def test_without_races_on_two_cores_from_memory_full_of_nan() -> None:
    inputs = Inputs([0, 120, 250], window=16)
    inputs.check(run(
        inputs,
        blocks=TWO_CORES,
        interpret=pltpu.InterpretParams(
            detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2),
    ))  # fmt: skip


def test_one_head_per_lane_tile_and_a_short_bias_table() -> None:
    inputs = Inputs([0, 100, 256 - 5], window=5, num_heads=2, head_width=128, distances=20,
                    positions=256)
    inputs.check(run(inputs, interpret=True))  # blocks by the rule: 256 positions at once
    inputs.check(verify_attention(*inputs.arguments))  # on a CPU: the XLA path


def test_heads_and_slots_split_over_a_mesh() -> None:
    inputs = Inputs([3, 200], window=2)
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    call = sharded_verify_attention(mesh, heads="model", slots="data")
    compiled = jax.jit(call).lower(*inputs.arguments).compile()
    inputs.check(compiled(*inputs.arguments))
    for exchange in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
        assert exchange not in compiled.as_text()


def test_a_start_beyond_the_end_is_moved_back() -> None:
    inputs = Inputs([T - 4], window=4)
    *others, start_B = inputs.arguments
    inputs.check(verify_attention(*others, start_B + 100))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(window=17), "positions in one pass must be in"),
        (dict(positions=T - 16), "must be a multiple of 128"),
        (dict(head_width=48), "must fill tiles of 128 lanes"),
        (dict(distances=129), "distances must be at most 128"),
    ],
)
def test_other_shapes_are_left_to_xla(changed, message) -> None:
    options = dict(window=2, num_heads=N, head_width=H, positions=T, distances=128) | changed
    width = options["num_heads"] * options["head_width"]
    rows = jnp.zeros((1, options["window"], width))
    cache = jnp.zeros((1, -(-width // 128), options["positions"], 128))
    bias = jnp.zeros((options["num_heads"], options["distances"]))
    arguments = (rows, rows, rows, cache, cache, bias, jnp.zeros(1, jnp.int32))
    with pytest.raises(NotImplementedError, match=message):
        verify_attention(*arguments, implementation="pallas", interpret=True)


def test_blocks_that_do_not_cut_the_cache_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"must divide 6 lane tiles, got 2 \* 2"):
        AttentionBlocks(cores=2, tiles=2, positions=128).groups(tiles=6, positions=256)
    with pytest.raises(ValueError, match="a multiple of 128 that divides 384, got 256"):
        AttentionBlocks(cores=1, tiles=2, positions=256).groups(tiles=6, positions=384)


@pytest.mark.parametrize("version", ["TPU_V4", "TPU_V5E", "TPU_V5P", "TPU_V6E"])
@pytest.mark.parametrize("num_heads", [6, 8, 12, 16, 32, 64])
@pytest.mark.parametrize("positions", [128, 384, 512, 4096])
def test_rule_of_blocks_holds_for_every_model(version, num_heads, positions) -> None:
    chip = getattr(pltpu.ChipVersion, version)
    cores = chip.num_physical_tensor_cores_per_chip
    info = pltpu.get_tpu_info_for_chip(chip, cores)
    tiles = num_heads * H // 128
    for itemsize, slots in ((2, 1), (2, 8), (4, 8)):
        blocks = blocks_for(
            info, slots=slots, tiles=tiles, positions=positions, itemsize=itemsize)
        assert blocks.groups(tiles, positions) >= 1
        assert blocks.cores == (cores if tiles % cores == 0 else 1)
        buffers = 2 * 2 * blocks.tiles * blocks.positions * 128 * itemsize
        assert buffers <= info.vmem_capacity_bytes / 4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", range(1, 17))
def test_every_window_over_many_starts(window, dtype) -> None:
    starts = edges(window) + list(range(3, T - window, 29))
    inputs = Inputs(starts, window=window, dtype=dtype)
    inputs.check(run(inputs, blocks=ONE_CORE, interpret=True))
