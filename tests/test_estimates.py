"""Intervals against scipy, against simulation, and by hand."""

import numpy as np
import pytest
from scipy import stats

from tpuspec.estimates import bootstrap, clipped, mean_by_blocks, t_quantile


def test_students_t():
    for degrees in (1, 2, 3, 4, 5, 8, 20, 100):
        assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=0.02)


def test_mean_of_equal_blocks_is_students_interval_of_their_means():
    values = np.random.default_rng(0).normal(size=(7, 5))
    found = mean_by_blocks(list(values), range(7))
    means = values.mean(1)
    half = stats.t.ppf(0.975, 6) * means.std(ddof=1) / np.sqrt(7)
    assert found.value == pytest.approx(values.mean())
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.02)
    assert (found.count, found.blocks) == (35, 7)


def test_interval_covers_the_mean_of_clustered_values_where_that_of_single_values_does_not():
    rng, covered, naive = np.random.default_rng(1), 0, 0
    for _ in range(400):
        lengths = rng.integers(5, 30, 25)
        levels = rng.normal(0.6, 0.1, 25)
        values = [level + 0.05 * rng.normal(size=n) for level, n in zip(levels, lengths,
                                                                        strict=True)]
        found = mean_by_blocks(values, range(25))
        covered += found.low <= 0.6 <= found.high
        flat = np.concatenate(values)
        naive += abs(flat.mean() - 0.6) < 1.96 * flat.std() / np.sqrt(len(flat))
    assert 0.90 < covered / 400 < 0.985
    assert naive / 400 < 0.7


def test_arrays_of_one_block_count_together():
    values = [np.ones(4), np.zeros(4), np.ones(2), np.zeros(2)]
    apart = mean_by_blocks(values, [0, 1, 2, 3])
    together = mean_by_blocks(values, [0, 0, 1, 1])
    assert apart.value == together.value == 0.5
    assert together.low == together.high == 0.5 and apart.high > 0.6


def test_one_block_has_no_interval_and_none_no_mean():
    found = mean_by_blocks([np.ones(3), np.empty(0)], [5, 6])
    assert (found.value, found.low, found.high, found.blocks) == (1.0, None, None, 1)
    assert str(found) == "1.000" and clipped(found) == found
    with pytest.raises(ValueError, match="number of values must be at least 1, got 0"):
        mean_by_blocks([np.empty(0)], [0])


def test_a_share_stays_within_0_and_1():
    found = clipped(mean_by_blocks([np.array([1.0]), np.array([1.0]), np.array([0.7])], range(3)))
    assert found.high == 1.0 and found.low < 0.9
    assert found.to_json("alpha") == {"alpha": found.value, "alpha_low": found.low,
                                      "alpha_high": 1.0}


def test_bootstrap_of_a_mean_is_its_interval():
    values = np.random.default_rng(2).normal(3, 1, 60)
    found = bootstrap(lambda chosen: float(values[chosen].mean()), 60)
    assert found.value == pytest.approx(values.mean())
    half = 1.96 * values.std() / np.sqrt(60)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.15)
    assert bootstrap(lambda chosen: 1.0, 1).low is None
