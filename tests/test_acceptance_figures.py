"""α along texts: bins and correlation by hand, target runs against simulated ones."""

import numpy as np
import pytest

from tpuspec import theory
from tpuspec.acceptance_figures import (
    alpha,
    autocorrelation,
    by_position,
    target_runs,
    tokens_per_run,
)


def simulated_runs(coins: np.ndarray, draft_length: int) -> int:
    """Algorithm 1 along a text whose place i keeps its draft if ``coins[i]``."""
    place = runs = 0
    while place < len(coins):
        runs += 1
        drafts = 0
        while drafts < draft_length and place < len(coins) and coins[place]:
            place, drafts = place + 1, drafts + 1
        place += 1  # the target's own token
    return runs


@pytest.mark.parametrize("draft_length", [0, 1, 3, 7])
def test_target_runs_are_those_of_simulated_decoding(draft_length):
    rng = np.random.default_rng(draft_length)
    kept = rng.uniform(0.2, 1, 23)
    simulated = np.mean([simulated_runs(rng.random(23) < kept, draft_length)
                         for _ in range(4000)])
    assert target_runs(kept, draft_length) == pytest.approx(simulated, rel=0.02)


def test_tokens_per_run_is_equation_1_where_acceptance_is_the_same_everywhere():
    kept = np.full(5000, 0.7)
    for gamma in (1, 4, 8):
        assert tokens_per_run([kept], gamma) == pytest.approx(
            theory.expected_tokens(0.7, gamma), rel=0.005)
    assert tokens_per_run([kept], 0) == 1


def test_acceptance_that_clusters_is_not_equation_1_and_correlates():
    easy = np.repeat([1.0, 0.0], 100)
    clustered, scattered = np.tile(easy, 5), np.tile([1.0, 0.0], 500)
    assert tokens_per_run([clustered], 7) < theory.expected_tokens(0.5, 7) * 0.92
    assert tokens_per_run([scattered], 7) == pytest.approx(2.0)
    assert autocorrelation([clustered], 1).lags[0] == pytest.approx(0.98, abs=0.01)
    assert autocorrelation([scattered], 2).lags == pytest.approx((-1.0, 1.0), abs=0.01)


def test_independent_acceptance_has_no_correlation_and_the_noise_says_so():
    values = list(np.random.default_rng(0).random((40, 50)))
    found = autocorrelation(values, 5)
    assert all(abs(lag) < 1.8 * noise for lag, noise in zip(found.lags, found.noise, strict=True))
    assert found.noise[0] == pytest.approx(1.96 / np.sqrt(40 * 49))


def test_correlation_does_not_reach_from_one_text_into_the_next():
    texts = [np.array([1.0, 0.0])] * 3
    found = autocorrelation(texts, 2)
    assert found.lags == (pytest.approx(-1.0), None) and found.noise[1] is None
    assert autocorrelation([np.ones(9)], 1).lags == (None,)


def test_alpha_by_position_in_bins_that_double():
    overlaps = [np.arange(9) / 10, np.arange(4) / 10, np.zeros(1)]
    bins = by_position(overlaps, [0, 1, 2])
    assert [(one.first, one.last) for one in bins] == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 8)]
    assert [one.alpha.count for one in bins] == [3, 2, 4, 4, 1]
    assert [one.alpha.value for one in bins] == pytest.approx([0, 0.1, 0.25, 0.55, 0.8])
    assert bins[-1].alpha.low is None  # of one text
    assert alpha(overlaps, [0, 1, 2]).value == pytest.approx((3.6 + 0.6) / 14)
