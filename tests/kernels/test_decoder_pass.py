"""The decoder kernel, interpreted, and its XLA path against a float64 oracle.

Caches hold NaN beyond every slot's length, and are compared whole afterwards.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import cross_oracle, verify_oracle
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels import DecoderWeights, bias_table, decoder_pass, tile_heads, untile_heads

pytestmark = pytest.mark.usefixtures("quick_compilation")

T, S, EPSILON = 768, 896, 1e-6  # two blocks each, of 384 and of 512
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.12}


def starts(window: int) -> list[int]:
    """Starts at which something changes: 0, 1, row tiles, block edges, the end."""
    return [0, 1, 15, 16, 127, 128, 384 - window, 384, 385, T - window]


LENGTHS = [0, 1, 16, 17, 127, 128, 511, 512, 513, S]


SHORT = dict(positions=256, source_positions=256)


def np_gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gated-gelu": np_gelu,
    "gated-silu": lambda x: x / (1 + np.exp(-x)),
}


def np_norm(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON) * weight


class Inputs:
    """Random arguments of ``decoder_pass``, and what the oracle makes of them."""

    def __init__(self, start_B, source_B, *, window, dtype="float32", layers=2, width=128,
                 num_heads=2, head_width=64, inner_width=128, activation="gated-gelu",
                 distances=128, positions=T, source_positions=S):
        rng = np.random.default_rng(window)
        self.dtype, self.activation = jnp.dtype(dtype), activation
        slots, inner = len(start_B), num_heads * head_width
        parts = 1 if activation == "relu" else 2

        def rand(*shape, std=1.0):
            return jnp.asarray(std * rng.normal(size=shape), self.dtype)

        def linear(out, into, gain=1.0):
            return rand(layers, out, into, std=gain * into**-0.5)

        bias = jnp.asarray(rng.normal(size=(num_heads, distances)), jnp.float32)
        self.weights = DecoderWeights(
            **{f"{part}_norm": rand(layers, 1, width, std=0.2) + jnp.ones((), self.dtype)
               for part in ("self", "cross", "mlp")},
            qkv=linear(3 * inner, width, 0.6), self_o=linear(width, inner),
            cross_q=linear(inner, width, 0.6), cross_o=linear(width, inner),
            wi=linear(parts * inner_width, width), wo=linear(width, inner_width),
            last_norm=rand(1, width), bias=bias_table(bias))  # fmt: skip
        x = rand(slots, window, width)
        dead_BT1 = (np.arange(positions) >= np.asarray(start_B)[:, None])[..., None]
        dead_BS1 = (np.arange(source_positions) >= np.asarray(source_B)[:, None])[..., None]
        self.caches = [
            jnp.where(dead, jnp.nan, rand(layers, slots, dead.shape[1], inner, std=0.6))
            for dead in (dead_BT1, dead_BT1, dead_BS1, dead_BS1)]
        integers = [jnp.asarray(numbers, jnp.int32) for numbers in (start_B, source_B)]
        caches = [jax.vmap(tile_heads)(cache) for cache in self.caches]
        self.arguments = (x, self.weights, *caches, *integers)
        self.expected = self._oracle(x, bias, start_B, source_B, head_width)

    def _oracle(self, x, bias, start_B, source_B, head_width):
        w = jax.tree.map(lambda a: np.asarray(a, np.float64), self.weights)
        x, bias, *caches = (np.asarray(a, np.float64) for a in (x, bias, *self.caches))
        for layer in range(w.qkv.shape[0]):
            qkv = np_norm(x, w.self_norm[layer]) @ w.qkv[layer].T
            mixed, caches[0][layer], caches[1][layer] = verify_oracle(
                *np.split(qkv, 3, axis=-1), caches[0][layer], caches[1][layer], bias, start_B)
            x = x + mixed @ w.self_o[layer].T
            q = np_norm(x, w.cross_norm[layer]) @ w.cross_q[layer].T
            mixed = cross_oracle(q, caches[2][layer], caches[3][layer], source_B, head_width)
            x = x + mixed @ w.cross_o[layer].T
            hidden = np_norm(x, w.mlp_norm[layer]) @ w.wi[layer].T
            gate, *linear = np.split(hidden, hidden.shape[-1] // w.wo.shape[-1], axis=-1)
            gate = ACTIVATIONS[self.activation](gate)
            x = x + (gate * linear[0] if linear else gate) @ w.wo[layer].T
        return np_norm(x, w.last_norm), *caches[:2]

    def run(self, **options):
        call = functools.partial(
            decoder_pass, activation=self.activation, epsilon=EPSILON, **options)
        return jax.jit(call)(*self.arguments)

    def check(self, results) -> None:
        x, *caches = results
        atol = TOLERANCE[self.dtype.name]
        np.testing.assert_allclose(np.asarray(x, np.float64), self.expected[0], atol=atol, rtol=0)
        before = self.caches[:2]
        for cache, expected, old in zip(caches, self.expected[1:], before, strict=True):
            cache = np.asarray(jax.vmap(untile_heads)(cache), np.float64)
            np.testing.assert_allclose(cache, expected, atol=atol, rtol=0)
            kept = expected.astype(np.float32) == np.asarray(old, np.float32)
            np.testing.assert_array_equal(cache[kept], np.asarray(old, np.float64)[kept])


def test_agrees_with_the_oracle_at_every_edge() -> None:
    inputs = Inputs(starts(2), LENGTHS, window=2)
    inputs.check(inputs.run(implementation="pallas", interpret=True))


def test_bfloat16_rounds_no_more_than_the_reference() -> None:
    inputs = Inputs([0, 126], [5, 256], window=8, dtype="bfloat16", **SHORT)
    results = inputs.run(implementation="pallas", interpret=True), inputs.run()
    errors = []
    for x, *caches in results:
        inputs.check([x, *caches])
        errors.append(np.mean(np.abs(np.asarray(x, np.float64) - inputs.expected[0])))
    assert 0 < errors[0] < 1.2 * errors[1]


def check_without_races(inputs: Inputs) -> None:
    inputs.check(inputs.run(implementation="pallas", interpret=pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan")))
    assert not interpreter.races.races_found


def test_without_races_from_memory_full_of_nan() -> None:
    check_without_races(Inputs([120, 250], [130, 20], window=1, **SHORT))


def test_a_start_beyond_the_end_is_moved_back() -> None:
    inputs = Inputs([256 - 2], [7], window=2, **SHORT)
    *others, start_B, lengths_B = inputs.arguments
    inputs.arguments = (*others, start_B + 100, lengths_B)
    inputs.check(inputs.run())  # on a CPU: the XLA path


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(window=9), "positions in one pass must be at most 8, got 9"),
        (dict(positions=200), "must be a multiple of 128"),
        (dict(num_heads=3), "must fill tiles of 128 lanes"),
        (dict(width=192), "widths must be multiples of 128, got 192 and 128"),
        (dict(inner_width=64), "widths must be multiples of 128, got 128 and 64"),
        (dict(width=8192, num_heads=128), "bytes of VMEM, 134217728 are there"),
    ],
)
def test_other_shapes_are_refused(changed, message) -> None:
    options = dict(window=2, num_heads=2, width=128, inner_width=128, positions=256) | changed
    width, inner = options["width"], options["num_heads"] * 64

    def shape(*dims: int, dtype="float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    norm, cache = shape(1, 1, width), shape(1, 1, -(-inner // 128), options["positions"], 128)
    weights = DecoderWeights(
        self_norm=norm, cross_norm=norm, mlp_norm=norm, qkv=shape(1, 3 * inner, width),
        self_o=shape(1, width, inner), cross_q=shape(1, inner, width),
        cross_o=shape(1, width, inner), wi=shape(1, options["inner_width"], width),
        wo=shape(1, width, options["inner_width"]), last_norm=shape(1, width),
        bias=shape(options["num_heads"], 128))  # fmt: skip
    x = shape(1, options["window"], width)
    numbers = shape(1, dtype="int32")
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(
            functools.partial(decoder_pass, activation="relu", epsilon=EPSILON,
                              implementation="pallas", interpret=True),
            x, weights, cache, cache, cache, cache, numbers, numbers)  # fmt: skip


def test_a_table_of_more_distances_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="distances must be at most 128, got 129"):
        bias_table(jnp.zeros((2, 129)))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_window_at_every_edge(window, dtype) -> None:
    inputs = Inputs(starts(window), LENGTHS, window=window, dtype=dtype)
    inputs.check(inputs.run(implementation="pallas", interpret=True))
    inputs.check(inputs.run())


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        dict(activation="relu", num_heads=4, inner_width=256),
        dict(activation="gated-silu", num_heads=2, head_width=128, width=256),
        dict(layers=1, num_heads=6, distances=20),
    ],
)
def test_other_models(shape) -> None:
    inputs = Inputs([0, 127, 240], [256, 3, 129], window=2, **SHORT, **shape)
    inputs.check(inputs.run(implementation="pallas", interpret=True))
    inputs.check(inputs.run())


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 3])
def test_without_races_over_more_layers(slots) -> None:
    check_without_races(
        Inputs([120, 248, 0][:slots], [130, 20, 0][:slots], window=8, layers=3, **SHORT))
