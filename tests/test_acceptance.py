"""The accept / reject rule alone, against the theorem."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tpuspec.kernels import WarpOptions, rejection_sample
from tpuspec.kernels.sampling_reference import warp

pytestmark = pytest.mark.usefixtures("quick_compilation")

P = np.array([0.50, 0.30, 0.15, 0.05], np.float32)
Q = np.array([0.30, 0.50, 0.10, 0.10], np.float32)
ROWS = 200_000


def outcome(p, q, drafts, coins, next_coins, limit=None):
    """One draft per row, at temperature 1."""
    rows, size = len(drafts), len(p)
    with np.errstate(divide="ignore"):
        logits_p, logits_q = np.log(np.asarray(p, np.float32)), np.log(np.asarray(q, np.float32))

    @jax.jit
    def run(drafts, coins, next_coins):
        ones = jnp.ones(rows, jnp.float32)
        options = WarpOptions(ones, jnp.zeros(rows, jnp.int32), ones, jnp.zeros_like(ones))
        draft_logits = jnp.broadcast_to(jnp.asarray(logits_q), (rows, 1, size))
        return rejection_sample(
            drafts[:, None], draft_logits, warp(draft_logits, options, size)[1],
            jnp.broadcast_to(jnp.asarray(logits_p), (rows, 2, size)), options,
            jnp.full((rows,), 1 if limit is None else limit, jnp.int32), jnp.ones(rows, bool),
            coins[:, None], jnp.broadcast_to(next_coins[:, None], (rows, 2)),
            vocabulary_size=size)

    return run(jnp.asarray(drafts, jnp.int32), jnp.asarray(coins, jnp.float32),
               jnp.asarray(next_coins, jnp.float32))


@pytest.mark.parametrize(("p", "q"), [
    (P, Q), (Q, P), (P, P), (P, [1.0, 0, 0, 0]), ([0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0])])
def test_one_token_has_exactly_the_targets_distribution(p, q):
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    rng = np.random.default_rng(0)
    drafts = rng.choice(4, ROWS, p=q / q.sum())
    result = outcome(p, q, drafts, rng.random(ROWS, np.float32), rng.random(ROWS, np.float32))
    accepted = np.asarray(result.accepted_B).astype(bool)
    first = np.where(accepted, drafts, np.asarray(result.next_token_B))
    counts = np.bincount(first, minlength=4)
    p = p / p.sum()
    live = p > 0
    assert not counts[~live].any()
    if live.sum() > 1:
        assert stats.chisquare(counts[live], p[live] * ROWS).pvalue > 1e-4
    assert accepted.mean() == pytest.approx(np.minimum(p, q).sum(), abs=0.005)
    np.testing.assert_allclose(np.asarray(result.overlap_Bγ), np.minimum(p, q).sum(), atol=1e-6)


def test_the_worked_example_of_the_docstring():
    result = outcome(P, Q, [1, 1, 1], [0.59, 0.61, 0.61], [0.0, 0.79, 0.81])
    assert result.accepted_B.tolist() == [1, 0, 0]
    assert result.next_token_B.tolist()[1:] == [0, 2]


def test_a_draft_of_target_probability_zero_is_not_accepted_when_the_coin_is_exactly_zero():
    result = outcome([1.0, 0, 0, 0], [0, 1.0, 0, 0], [1], [0.0], [0.0])
    assert result.accepted_B.tolist() == [0] and result.next_token_B.tolist() == [0]


def test_equal_distributions_accept_at_the_largest_coin():
    result = outcome(P, P, [0, 1, 2, 3], np.full(4, 1 - 2**-24), np.full(4, 0.5))
    assert result.accepted_B.tolist() == [1, 1, 1, 1]


def test_a_residual_lost_to_rounding_falls_back_to_the_target():
    p = np.array([0.5, 0.5, 0, 0], np.float32)
    q = np.array([np.nextafter(np.float32(0.5), np.float32(1)), 0.5, 0, 0], np.float32)
    result = outcome(p, q, [0], [1 - 2**-24], [0.9])
    assert np.isfinite(np.asarray(result.overlap_Bγ)).all()
    assert result.next_token_B[0] in (0, 1)


def test_drafts_beyond_the_limit_are_not_examined():
    rng = np.random.default_rng(1)
    result = outcome(P, Q, rng.choice(4, ROWS, p=Q / Q.sum()), np.zeros(ROWS),
                     rng.random(ROWS, np.float32), limit=0)
    assert not np.asarray(result.accepted_B).any()
    counts = np.bincount(np.asarray(result.next_token_B), minlength=4)
    p = P.astype(np.float64) / P.sum(dtype=np.float64)
    assert stats.chisquare(counts, p * ROWS).pvalue > 1e-4
