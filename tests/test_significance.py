"""p-values and power against scipy and against simulation."""

import numpy as np
import pytest
from scipy import stats

from tpuspec import significance
from tpuspec.significance import against_exact, holm, of_drift, two_samples

P = {"a": 0.5, "b": 0.3, "c": 0.15, "d": 0.05}
Q = {"a": 0.3, "b": 0.5, "c": 0.1, "d": 0.1}


def drawn(rng, count, table=P, share=0.0, other=Q):
    """Counts of ``count`` tokens, of ``other`` with the chance ``share``."""
    p = (1 - share) * np.array(list(table.values())) + share * np.array(list(other.values()))
    return dict(zip(table, rng.multinomial(count, p).tolist(), strict=True))


def test_tails_are_scipys():
    for degrees in (1, 2, 3, 7, 30, 200):
        for x in (1e-3, 0.5, 3.0, 10.0, 40.0, 300.0):
            assert significance.chi2_tail(x, degrees) == pytest.approx(
                stats.chi2.sf(x, degrees), rel=1e-6, abs=1e-14)
        for noncentral in (0.0, 1.0, 25.0, 400.0):
            assert significance.noncentral_tail(30.0, degrees, noncentral) == pytest.approx(
                stats.ncx2.sf(30.0, degrees, noncentral) if noncentral else
                stats.chi2.sf(30.0, degrees), rel=1e-6, abs=1e-12)
    assert significance.chi2_tail(5.0, 0) == 1.0
    assert significance.normal_quantile(0.025) == pytest.approx(1.959964, abs=1e-5)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_counts_against_probabilities_are_scipys_chi_square():
    counts = {"a": 260, "b": 150, "c": 60, "d": 30}
    found = against_exact("k", "w", counts, P, Q)
    wanted = stats.chisquare(list(counts.values()), 500 * np.array(list(P.values())))
    assert found.p_value == pytest.approx(wanted.pvalue) and found.degrees == 3
    assert found.effect == pytest.approx(np.sqrt(wanted.statistic / 500))
    assert against_exact("k", "w", counts | {"e": 1}, P, Q).p_value == 0.0  # impossible
    table = np.array([[260, 150, 60, 30], [200, 170, 90, 40]])
    two = two_samples("k", "w", counts, dict(zip("abcd", table[1].tolist(), strict=True)))
    assert two.p_value == pytest.approx(stats.chi2_contingency(table, correction=False).pvalue)


def test_rare_cells_are_pooled():
    exact = {"a": 0.9} | {i: 0.001 for i in range(100)}
    counts = {"a": 89, 3: 6, 5: 5}
    assert against_exact("k", "w", counts, exact, exact).degrees == 1
    assert against_exact("k", "w", {"a": 9, 3: 1}, exact, exact).degrees == 0
    assert two_samples("k", "w", {"a": 90, "b": 1}, {"a": 80, "c": 1}).degrees == 0


def test_p_values_are_uniform_without_bias_and_the_smallest_bias_is_seen_as_often_as_said():
    rng, level, count = np.random.default_rng(0), 0.01, 2000
    quiet = [against_exact("k", "w", drawn(rng, count), P, Q) for _ in range(2000)]
    share = quiet[0].smallest_share(level)
    assert 0.004 < np.mean([one.p_value < level for one in quiet]) < 0.018
    assert 0 < share < 0.5
    biased = [against_exact("k", "w", drawn(rng, count, share=share), P, Q) for _ in range(1000)]
    assert np.mean([one.p_value < level for one in biased]) == pytest.approx(0.9, abs=0.04)
    pairs = [two_samples("k", "w", drawn(rng, count), drawn(rng, count)) for _ in range(2000)]
    assert 0.004 < np.mean([one.p_value < level for one in pairs]) < 0.018
    effect = pairs[0].smallest_effect(level)
    p, q = (np.array(list(table.values())) for table in (P, Q))
    share = effect / np.sqrt(((q - p)**2 / p).sum())
    biased = [two_samples("k", "w", drawn(rng, count), drawn(rng, count, share=share))
              for _ in range(1000)]
    assert np.mean([one.p_value < level for one in biased]) == pytest.approx(0.9, abs=0.05)
    assert pairs[0].smallest_share(level) is None


def drift_of(rng, count, share=0.0):
    p, q = (np.array(list(table.values())) for table in (P, Q))
    kept, beta = np.minimum(1, q / p), np.minimum(p, q).sum()
    tokens = rng.choice(4, count, p=(1 - share) * p + share * q)
    ones = np.ones(count)
    return of_drift("k", "w", kept[tokens] - beta, ((p * kept**2).sum() - beta**2) * ones,
                    ((q * kept).sum() - beta) * ones, rounding=1e-6)


def test_drift_of_acceptance_sees_what_it_says_and_more_than_counts_do():
    rng, level = np.random.default_rng(1), 0.01
    quiet = [drift_of(rng, 2000) for _ in range(2000)]
    assert 0.004 < np.mean([one.p_value < level for one in quiet]) < 0.018
    share = quiet[0].smallest_share(level)
    assert share < against_exact("k", "w", drawn(rng, 2000), P, Q).smallest_share(level)
    biased = [drift_of(rng, 2000, share) for _ in range(1000)]
    assert np.mean([one.p_value < level for one in biased]) == pytest.approx(0.9, abs=0.04)
    assert np.mean([one.effect for one in biased]) == pytest.approx(share, rel=0.1)


def test_a_draft_that_is_the_target_up_to_rounding_does_not_drift():
    noise = np.full(4000, 1e-6)
    found = of_drift("k", "w", -noise, noise**2, noise, rounding=3e-6)
    assert found.p_value > 0.5 and found.effect == 0 and found.smallest_share(0.01) is None
