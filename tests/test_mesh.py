"""The engine on several (CPU) devices gives the ids of one device."""

import jax
import numpy as np
import pytest
from engines import Job, run
from flax import nnx
from programmable import fixed, rand

from tpuspec import mesh as mesh_lib
from tpuspec.config import EngineConfig
from tpuspec.engine import Engine
from tpuspec.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = EngineConfig(slots=4, source_buckets=(16,), max_target_length=12,
                      draft_lengths=(0, 3), draft_length=3)
JOBS = [Job(source=[5 + i, 9, 1], seed=i, eos_ids=(), max_new_tokens=12 - i,
            logprobs=i == 1,
            sampling=SamplingParams(temperature=float(i % 2), presence_penalty=i / 3,
                                    banned_ids=(7,) * (i == 2)), draft_length=3)
        for i in range(4)]


def outputs(target, draft, mesh):
    """Ids of all jobs, log-probabilities of the one that asks for them, and the engine."""
    engine = Engine(target, draft, CONFIG, vocabulary_size=48, mesh=mesh)
    engine.compile()
    before = engine.compilations
    results = run(engine, JOBS)
    assert engine.compilations == before
    return [r.ids for r in results], results[1].logprobs, engine


# By default with a sharded draft only over two processes, in test_multihost.
@pytest.mark.slow
@pytest.mark.parametrize(("data", "model"), [(2, 2), (1, 4)])
def test_ids_do_not_depend_on_how_the_model_is_sharded(data, model):
    target = rand(0, vocab=48)
    draft = rand(0, vocab=48, noise=0.05)
    expected, logprobs, _ = outputs(target, draft, None)
    found, found_logprobs, engine = outputs(target, draft, mesh_lib.make_mesh(data, model))
    assert found == expected
    np.testing.assert_allclose(found_logprobs, logprobs, atol=1e-4)
    assert max(logprobs) < 0
    qkv = next(w for w in engine._weights[0] if w.shape == (3, 64, 64))
    assert qkv.sharding.shard_shape(qkv.shape) == (3, 64 // model, 64)
    key = engine._state.target_cache.self_k[0]
    assert key.sharding.shard_shape(key.shape) == (4 // data, 4 // model, key.shape[2], 16)


def test_a_draft_whose_heads_do_not_divide_is_replicated():
    mesh = mesh_lib.make_mesh(1, 4)
    draft = fixed({5: 1.0}, 48)  # one head
    assert not mesh_lib.divides(draft.config, mesh)
    params = nnx.split(draft)[1]
    shardings = jax.tree.leaves(mesh_lib.param_shardings(params, draft.config, mesh))
    assert all(s.is_fully_replicated for s in shardings)


def test_a_replicated_draft_beside_a_sharded_target_changes_no_ids():
    target, draft = rand(0, vocab=48), fixed({5: 0.5, 9: 0.5}, 48)
    expected, logprobs, _ = outputs(target, draft, None)
    found, found_logprobs, engine = outputs(target, draft, mesh_lib.make_mesh(2, 2))
    assert found == expected
    np.testing.assert_allclose(found_logprobs, logprobs, atol=1e-4)
    assert all(w.sharding.is_fully_replicated for w in engine._weights[1])
    assert not all(w.sharding.is_fully_replicated for w in engine._weights[0])


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(ValueError, match=r"at most 4 .* got 4 \* 2"):
        mesh_lib.make_mesh(4, 2)
