"""int8 weights: the rounding, the model they make, its checkpoints and its ids."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import llo_compiler
import numpy as np
import orbax.checkpoint as ocp
import pytest
from engines import Job, run
from flax import nnx
from numpy_t5 import numpy_twin
from programmable import build, rand, tensors_of

from tpuspec import checkpoint
from tpuspec.checkpoint import named_parameters
from tpuspec.config import EngineConfig, Quantization, T5Config
from tpuspec.engine import Engine
from tpuspec.int8_weights import quantize_weight
from tpuspec.mesh import make_mesh, param_shardings
from tpuspec.quantization import load_int8, quantize
from tpuspec.sampling import SamplingParams
from tpuspec.t5 import T5
from tpuspec.t5_layers import Linear, Linears

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = pathlib.Path(__file__).resolve().parent.parent
WHOLE = ("embedding", "lm_head.weight", "wo.weight", "norm.weight", "_bias.0.weight")


def arrays(model: T5) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in named_parameters(model).items()}


def dequantized(model: T5) -> T5:
    """The float32 model whose weights are steps times scales, multiplied by numpy."""
    leaves = arrays(model)

    def fill(name: str, shape: tuple[int, ...]) -> np.ndarray:
        scale = leaves.get(name.removesuffix("weight") + "scale")
        array = leaves[name].astype(np.float64)
        return array if scale is None else array * scale.astype(np.float64)[..., None]

    return build(dataclasses.replace(model.config, quantization=None), fill)


@pytest.fixture(scope="module")
def model() -> T5:
    return rand(d_model=16, layers=1, num_decoder_layers=2)


@pytest.fixture(scope="module")
def small(model) -> T5:
    return quantize(model)


# ---- the rounding --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(24, 40), (3, 24, 40)])
def test_every_weight_is_within_half_a_step_of_its_channel(shape, dtype):
    weight = np.random.default_rng(0).normal(size=shape)
    weight *= np.exp(np.random.default_rng(1).normal(scale=3, size=shape[:-1]))[..., None]
    weight[..., 1, 7] *= 1e4  # an outlier takes the steps from its own channel only
    weight[..., 2, :] = -np.abs(weight[..., 2, :])
    weight = np.asarray(jnp.asarray(weight, dtype)).astype(np.float64)
    steps, scale = (np.asarray(a) for a in quantize_weight(jnp.asarray(weight, dtype)))
    assert (steps.dtype, scale.dtype) == (np.int8, np.float32)
    assert (steps.shape, scale.shape) == (shape, shape[:-1])
    np.testing.assert_allclose(scale, np.abs(weight).max(-1) / 127, rtol=1e-6)
    error = np.abs(weight - steps.astype(np.float64) * scale[..., None])
    # 127 steps, each off by the rounding of the scale to 24 bits.
    assert (error <= scale[..., None] * (0.5 + 127 * 2.0**-23)).all()
    assert (np.abs(steps.astype(int)).max(-1) == 127).all()
    negative, same = quantize_weight(jnp.asarray(-weight, dtype))
    np.testing.assert_array_equal(negative, -steps)
    np.testing.assert_array_equal(same, scale)


@pytest.mark.parametrize("size", [0.0, -0.0, 1e-45, 1e-37])
def test_a_channel_of_zeros_or_next_to_zero_is_zero(size):
    weight = np.ones((3, 8), np.float32)
    weight[1] = size
    steps, scale = (np.asarray(a) for a in quantize_weight(jnp.asarray(weight)))
    assert np.isfinite(scale).all() and (scale > 0).all()
    assert not steps[1].any() and (steps[[0, 2]] == 127).all()


def test_the_largest_float_has_a_scale():
    weight = np.full((1, 4), np.finfo(np.float32).max)
    steps, scale = quantize_weight(jnp.asarray(weight))
    np.testing.assert_allclose(np.float64(scale[0]) * 127, weight[0, 0], rtol=1e-6)
    assert (np.asarray(steps) == 127).all()


# ---- layers and models ---------------------------------------------------------


@pytest.mark.parametrize("dtype, rtol", [(jnp.float32, 1e-5), (jnp.bfloat16, 2.0**-8)])
@pytest.mark.parametrize("rows", [1, 8, 40])  # sums of products, and a product
def test_layers_multiply_by_steps_and_then_by_scales(rows, dtype, rtol):
    x = jax.random.normal(jax.random.key(rows), (rows, 48), dtype)
    made = dict(logical=("mlp", "embed"), dtype=dtype, rngs=nnx.Rngs(1),
                quantization=Quantization.INT8)
    for layer in (Linears(48, 64, stds=[1.0, 30.0], **made), Linear(48, 64, std=0.1, **made)):
        found = jax.jit(lambda layer, x: layer(x))(layer, x)
        found = jnp.stack(found) if isinstance(layer, Linears) else found[None]
        steps, scale = (np.asarray(a[...], np.float64) for a in (layer.weight, layer.scale))
        weight = (steps * scale[..., None]).reshape(-1, 64, 48)
        wanted = np.einsum("ri,poi->pro", np.asarray(x, np.float64), weight)
        size = np.einsum("ri,poi->pro", np.abs(np.asarray(x, np.float64)), np.abs(weight))
        assert found.dtype == dtype
        error = np.abs(np.asarray(found, np.float64) - wanted)
        assert (error <= rtol * np.abs(wanted) + 1e-5 * size).all()


def test_what_t5_needs_whole_stays_whole(model, small):
    before, after = arrays(model), arrays(small)
    for name, array in before.items():
        if name.endswith(WHOLE):
            np.testing.assert_array_equal(after.pop(name), array)
        else:
            assert after.pop(name).dtype == np.int8
            scale = after.pop(name.removesuffix("weight") + "scale")
            assert (scale.dtype, scale.shape) == (np.float32, array.shape[:-1])
    assert not after
    assert small.config == dataclasses.replace(model.config, quantization=Quantization.INT8)


def test_logits_are_those_of_the_dequantized_weights():
    quantized = quantize(rand(3, d_model=32))
    twin_model = dequantized(quantized)
    twin = numpy_twin(twin_model, tensors_of(twin_model))
    random = np.random.default_rng(1)
    forward = jax.jit(lambda model, source, target: model.decode_teacher_forced(
        target, model.encode(source, jnp.full(1, source.shape[1])),
        jnp.full(1, source.shape[1])))
    for length in (5, 40):
        source, target = random.integers(3, 32, (2, 1, length)).astype(np.int32)
        logits = np.asarray(forward(quantized, jnp.asarray(source), jnp.asarray(target)))
        np.testing.assert_allclose(logits[0], twin.logits(source[0], target[0]), rtol=0,
                                   atol=1e-5 * np.abs(logits).max())


def test_a_model_of_a_quantized_configuration_is_born_quantized(small):
    born = T5(small.config, rngs=nnx.Rngs(0))
    assert {name: (a.shape, a.dtype) for name, a in arrays(born).items()} == {
        name: (a.shape, a.dtype) for name, a in arrays(small).items()}
    assert T5Config.from_json(json.loads(json.dumps(small.config.to_json()))) == small.config


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused_by_name(model, value):
    name = "decoder_layers.1.cross_attention.kv.weight"
    leaves = arrays(model)
    leaves[name] = leaves[name].copy()
    leaves[name][1, 3, 5] = value
    broken = build(model.config, lambda leaf, _: leaves[leaf])
    with pytest.raises(ValueError, match=f"{name} holds numbers that are not finite"):
        quantize(broken)


def test_what_is_quantized_is_not_quantized_again(small):
    with pytest.raises(ValueError, match="int8 already"):
        quantize(small)


# ---- the engine ----------------------------------------------------------------


def test_speculative_and_sharded_ids_of_a_quantized_target():
    """Greedy speculation changes no id, and a mesh changes none at any temperature."""
    config = EngineConfig(slots=4, source_buckets=(8,), max_target_length=16,
                          draft_lengths=(0, 3), draft_length=3)
    target, draft = (quantize(rand(0, vocab=48, layers=1, noise=noise)) for noise in (0.0, 0.1))
    greedy = [Job(source=[5 + i, 9, 1], eos_ids=(), max_new_tokens=16) for i in range(4)]
    plain = [dataclasses.replace(job, draft_length=0, sampling=SamplingParams(temperature=t))
             for t in (0.0, 1.0) for job in greedy]
    engine = Engine(target, draft, config, vocabulary_size=48)
    engine.compile()
    speculative = run(engine, greedy)
    wanted = [r.ids for jobs in (plain[:4], plain[4:]) for r in run(engine, jobs)]
    assert [r.ids for r in speculative] == wanted[:4]
    accepted, drafted = (sum(getattr(r.stats, name) for r in speculative)
                         for name in ("accepted", "drafted"))
    assert 0 < accepted < drafted  # else the comparison would say little

    sharded = Engine(target, None, dataclasses.replace(config, draft_lengths=(0,), draft_length=0),
                     vocabulary_size=48, mesh=make_mesh(2, 2))
    sharded.compile()
    assert [r.ids for jobs in (plain[:4], plain[4:]) for r in run(sharded, jobs)] == wanted
    shapes = {(w.shape, w.dtype.name): w.sharding.shard_shape(w.shape)
              for w in sharded._weights[0]}
    assert shapes[(3, 64, 64), "int8"] == (3, 32, 64)
    assert shapes[(3, 64), "float32"] == (3, 32)  # a scale goes with its channel


# ---- checkpoints ---------------------------------------------------------------


def test_everything_comes_back_bitwise(small, tmp_path):
    checkpoint.save(tmp_path / "made", small, None, dtype=jnp.bfloat16)
    stored = json.loads((tmp_path / "made" / "model.json").read_text())
    assert (stored["dtype"], stored["model"]["quantization"]) == ("bfloat16", "int8")
    loaded = checkpoint.load(tmp_path / "made")
    assert loaded.config == small.config
    wanted, size = arrays(small), 0
    for name, array in arrays(loaded.model).items():
        assert array.dtype == (jnp.bfloat16 if name.endswith(WHOLE) else wanted[name].dtype), name
        np.testing.assert_array_equal(array, wanted[name].astype(array.dtype), err_msg=name)
        size += array.nbytes
    described = checkpoint.describe(tmp_path / "made")
    assert described.weight_bytes == size
    assert described.parameters == sum(
        a.size for name, a in wanted.items() if not name.endswith("scale"))


def test_a_checkpoint_is_quantized_on_the_way_to_a_mesh(model, small, tmp_path):
    checkpoint.save(tmp_path / "whole", model, None)
    loaded = load_int8(tmp_path / "whole", shardings=functools.partial(
        param_shardings, mesh=make_mesh(1, 4)))
    assert loaded.config == small.config == loaded.model.config
    for name, array in named_parameters(loaded.model).items():
        assert len(array.sharding.device_set) == 4
        np.testing.assert_array_equal(np.asarray(array), arrays(small)[name], err_msg=name)
    scale = loaded.model.decoder_layers[0].self_attention.qkv.scale[...]
    assert scale.sharding.shard_shape(scale.shape) == (3, 4)


def rewritten(path, leaves, quantization):
    """A checkpoint with other arrays or another configuration than it was saved with."""
    stored = json.loads((path / "model.json").read_text())
    stored["model"]["quantization"] = quantization
    (path / "model.json").write_text(json.dumps(stored))
    shutil.rmtree(path / "weights")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(path / "weights", args=ocp.args.PyTreeSave(checkpoint._nest(leaves)))
    return path


def test_leaves_that_do_not_fit_are_refused_by_name(model, small, tmp_path):
    checkpoint.save(tmp_path / "made", small, None)
    leaves, wi = arrays(small), "decoder_layers.0.mlp.wi"
    cases = [
        (leaves, None, f"unexpected {wi}.scale [2, 32]"),
        (arrays(model), "int8", f"missing {wi}.scale [2, 32]"),
        (leaves | {f"{wi}.scale": leaves[f"{wi}.scale"].T}, "int8",
         f"misshaped {wi}.scale: [32, 2], wanted [2, 32]"),
        (leaves | {f"{wi}.weight": arrays(model)[f"{wi}.weight"]}, "int8",
         f"{wi}.weight is float32, wanted int8"),
        (leaves, "int4", "'int4' is not a valid Quantization")]
    for found, quantization, told in cases:
        path = rewritten(tmp_path / "made", found, quantization)
        with pytest.raises(ValueError) as error:
            checkpoint.load(path)
        assert told in str(error.value)


# ---- on a TPU ------------------------------------------------------------------


def test_v4_multiplies_by_the_bytes_as_they_are(tmp_path):
    """A layer through the real compiler: no copy of its weight in another type exists."""
    pytest.importorskip("libtpu")
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "int8_product.py", tmp_path],
        env=os.environ | llo_compiler.environment(tmp_path)
        | {"PYTHONPATH": str(ROOT / "tools")}, check=True, capture_output=True, text=True)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["shapes_of_the_weight"] == ["s8"]
    assert facts["pushes"] == ["byte"]  # of weights into the matrix unit
    assert facts["temporary_bytes"] < 2**20
    assert facts["argument_bytes"] < 1.01 * 10240 * 4096
