"""The sampling kernels on a mesh that splits slots and the vocabulary: the ids of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from tpuspec.kernels import (
    WarpOptions,
    rejection_sample,
    sample_tokens,
    sharded_rejection_sample,
    sharded_sample_tokens,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

SLOTS, γ, V = 3, 1, 128  # three slots on four devices
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
OPTIONS = WarpOptions(
    temperature_B=jnp.array([0.7, 0.0, 1.3], jnp.float32), top_k_B=jnp.array([12, 0, 0], jnp.int32),
    top_p_B=jnp.array([0.9, 1.0, 1.0], jnp.float32), min_p_B=jnp.array([0, 0, 0.02], jnp.float32))


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


def split(mesh, x):
    """As the head of a sharded model leaves logits, but for the slots, which are three."""
    spec = jax.P(*[None] * (x.ndim - 1), "model")
    return jax.device_put(jnp.asarray(x, jnp.float32), NamedSharding(mesh, spec))


def compiled(sharded, mesh, arguments):
    call = sharded(mesh, slots=("data", "model"), vocabulary_size=V - 5, implementation="pallas",
                   interpret=True)
    return jax.jit(call, compiler_options=QUICK_TO_COMPILE).lower(*arguments).compile()


def test_slots_are_shared_by_all_devices_and_no_id_changes(mesh):
    rng = np.random.default_rng(0)
    logits, target = rng.normal(0, 2, (SLOTS, γ, V)), rng.normal(0, 2, (SLOTS, γ + 1, V))
    coins = jnp.asarray(rng.random((3, SLOTS, γ + 1)), jnp.float32)
    plain = dict(vocabulary_size=V - 5, implementation="xla")

    arguments = (split(mesh, logits[:, 0]), OPTIONS, coins[0, :, 0])
    expected = sample_tokens(*jax.device_get(arguments), **plain)
    program = compiled(sharded_sample_tokens, mesh, arguments)
    drafted = program(*arguments)
    np.testing.assert_array_equal(drafted.token_B, expected.token_B)
    assert drafted.sound_B.shape == (SLOTS,) and drafted.sound_B.all()

    rows = jax.tree.map(lambda x: x[:, None], expected.rows_B)
    arguments = (expected.token_B[:, None], split(mesh, logits), rows, split(mesh, target), OPTIONS,
                 jnp.full(SLOTS, γ), jnp.ones(SLOTS, bool), coins[1, :, :-1], coins[2])
    expected = rejection_sample(*jax.device_get(arguments), **plain)
    outcome = compiled(sharded_rejection_sample, mesh, arguments)(*arguments)
    for field in ("accepted_B", "next_token_B", "sound_B"):
        np.testing.assert_array_equal(getattr(outcome, field), getattr(expected, field))
    np.testing.assert_allclose(outcome.overlap_Bγ, expected.overlap_Bγ, atol=1e-5)
