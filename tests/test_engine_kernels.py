"""The engine with the TPU kernels, interpreted on the CPU, gives the ids of plain XLA."""

import dataclasses

import jax.numpy as jnp
import pytest
from engines import Job, run
from programmable import rand

from tpuspec import mesh as mesh_lib
from tpuspec.config import EngineConfig
from tpuspec.engine import Engine
from tpuspec.kernel_choice import XLA, KernelChoice
from tpuspec.kernels import WarpOptions, sample_tokens
from tpuspec.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = EngineConfig(slots=2, source_buckets=(4, 8), max_target_length=8, draft_lengths=(0, 2),
                      draft_length=2)
SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, presence_penalty=0.5,
                         logit_bias={7: 1.0}, banned_ids=(11, 12))
JOBS = [Job(source=[5, 9, 7, 1], eos_ids=(), max_new_tokens=8, draft_length=2),
        Job(source=[11, 1], eos_ids=(), max_new_tokens=5, decoder_prompt=(9, 40, 3), draft_length=2,
            sampling=SAMPLED, seed=3),
        Job(source=[30, 4, 1], eos_ids=(), max_new_tokens=6, draft_length=0, start=5,
            decoder_prompt=(7, 8),
            sampling=SamplingParams(repetition_penalty=1.5, allowed_ids=tuple(range(3, 30))))]
LENIENT = [dataclasses.replace(JOBS[0], source=[7, 9, 1], seed=4, sampling=SamplingParams(
    temperature=temperature, lenience=0.01)) for temperature in (0.0, 1.5)]


def pair(**shape):
    shape = dict(vocab=48, layers=1, d_kv=64, bias_std=1.0) | shape
    return rand(0, **shape), rand(0, noise=0.05, **shape)


def ids(engine: Engine) -> list[list[int]]:
    engine.compile()
    return [result.ids for result in run(engine, JOBS, slots=[0, 1, 0])
            + run(engine, LENIENT)]


@pytest.mark.parametrize(("shape", "fused"), [
    (dict(num_heads=2, d_model=128), True),
    pytest.param(dict(num_heads=2, d_model=128, layers=2), True, marks=pytest.mark.slow),
    pytest.param(dict(num_heads=4), False, marks=pytest.mark.slow)])
def test_interpreted_kernels_give_the_ids_of_xla(shape, fused):
    target, draft = pair(**shape)
    one_bucket = dataclasses.replace(CONFIG, source_buckets=(8,))
    engine = Engine(target, draft, one_bucket, vocabulary_size=48)
    plain = ids(engine)
    strict = [dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, lenience=1.0))
              for job in LENIENT]
    for one, lenient in zip(run(engine, strict), plain[-2:], strict=True):
        assert one.ids != lenient  # lenience is at work
    kernels = KernelChoice(implementation="pallas", interpret=True)
    engine = Engine(target, draft, CONFIG, vocabulary_size=48, kernels=kernels)
    cache = (2, shape["num_heads"] // 2, 128, 128)
    assert engine._state.target_cache.self_k[0].shape == cache
    # The draft's whole pass is one kernel where its widths fill the lanes.
    layers = (shape.get("layers", 1),) if fused else ()
    assert engine._state.draft_cache.self_k[0].shape == (*layers, *cache)
    # release, copy, an insert a bucket, a step a draft length
    assert len(list(engine._definitions.requests())) == 6
    assert ids(engine) == plain


def test_heads_that_do_not_fill_the_lanes_keep_to_xla():
    target, draft = pair(d_kv=16, num_heads=4)
    kernels = KernelChoice(implementation="pallas", interpret=True)
    assert not kernels.tiles(target.config)
    engine = Engine(target, draft, CONFIG, vocabulary_size=48, kernels=kernels)
    assert engine._state.target_cache.self_k[0].shape == (2, 4, CONFIG.target_positions, 16)


def test_logits_that_the_kernels_do_not_take_are_left_to_xla():
    chosen = KernelChoice(implementation="pallas", interpret=True)
    logits = jnp.arange(16, dtype=jnp.bfloat16).reshape(2, 8) % 5
    options = WarpOptions(jnp.array([0.0, 1.0]), jnp.zeros(2, jnp.int32), jnp.ones(2), jnp.zeros(2))
    arguments = (logits, options, jnp.array([0.1, 0.6]))
    with pytest.raises(NotImplementedError, match="float32"):
        sample_tokens(*arguments, vocabulary_size=8, implementation="pallas", interpret=True)
    found = chosen.sample_tokens(*arguments, vocabulary_size=8)
    expected = XLA.sample_tokens(*arguments, vocabulary_size=8)
    assert found.token_B.tolist() == expected.token_B.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "fused"), [
    (dict(num_heads=4), False), (dict(num_heads=4, d_model=128), True)])
def test_interpreted_kernels_on_a_mesh(shape, fused):
    target, draft = pair(**shape)
    plain = ids(Engine(target, draft, CONFIG, vocabulary_size=48))
    mesh = mesh_lib.make_mesh(2, 2)
    kernels = KernelChoice(implementation="pallas", interpret=True, mesh=mesh)
    engine = Engine(target, draft, CONFIG, vocabulary_size=48, mesh=mesh, kernels=kernels)
    # Every device has the whole of a draft whose pass is one kernel, and some of the slots.
    cache = engine._state.draft_cache.self_k[0]
    assert cache.sharding.shard_shape(cache.shape) == (
        (1, 1, 2, 128, 128) if fused else (1, 1, 128, 128))
    if fused:
        assert all(weight.sharding.is_fully_replicated for weight in engine._weights[1])
    assert ids(engine) == plain
