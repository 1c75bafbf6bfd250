"""The paper's formulas against its tables, its worked numbers, and simulation."""

import math

import numpy as np
import pytest

from tpuspec import theory
from tpuspec.chips import CHIPS
from tpuspec.paper import TABLE_1, TABLE_4

P, Q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.3, 0.5, 0.1, 0.1])


@pytest.mark.parametrize("alpha, gamma, operations, speed", TABLE_1)
def test_table_1(alpha, gamma, operations, speed):
    assert theory.speedup(alpha, gamma, 0) == pytest.approx(speed, abs=0.005)
    assert theory.operations_factor(alpha, gamma, 0) == pytest.approx(operations, abs=0.005)


@pytest.mark.parametrize("task, draft, temperature, gamma, alpha, c, expected, measured", TABLE_4)
def test_table_4(task, draft, temperature, gamma, alpha, c, expected, measured):
    """As far as the rounding of α, c and the result itself goes."""
    least = theory.speedup(alpha - 0.005, gamma, c + 0.005)
    most = theory.speedup(alpha + 0.005, gamma, c - 0.005)
    assert least - 0.05 <= expected <= most + 0.05


def test_what_the_papers_tables_say_together():
    rows = {row[:3]: row for row in TABLE_4}
    for task in ("translation", "summarization"):
        for temperature in (0, 1):
            row = {name: rows[task, name, temperature] for name in ("small", "base", "large")}
            assert row["small"][-1] == max(r[-1] for r in row.values())  # T5-small wins
            assert row["small"][4] < row["base"][4] < row["large"][4]  # with the lowest α
        for draft in ("small", "base", "large"):  # argmax raises α by 0.11 to 0.18
            gain = rows[task, draft, 0][4] - rows[task, draft, 1][4]
            assert 0.109 < gain < 0.181
    # T5-large against T5-small at γ = 7: the numerator gains 23 %, the denominator 55 %.
    assert theory.expected_tokens(0.82, 7) / theory.expected_tokens(0.75, 7) == pytest.approx(
        1.23, abs=0.005)
    assert (7 * 0.11 + 1) / (7 * 0.02 + 1) == pytest.approx(1.55, abs=0.005)
    assert theory.expected_tokens(0.9, 10) == pytest.approx(6.86, abs=0.005)
    for alpha, limit in ((0.75, 4), (0.9, 10)):  # however long the draft
        assert theory.expected_tokens(alpha, 300) == pytest.approx(limit)
        assert theory.oracle_speedup(alpha, 0.0) == pytest.approx(limit)


def test_what_the_documents_say_of_the_measured_speedups():
    small = {row[:3]: row.measured for row in TABLE_4 if row.draft == "small"}
    assert list(small.values()) == [3.4, 2.6, 3.1, 2.3]  # 2.3x to 3.4x
    near = sum(abs(row.expected - row.measured) < 0.55 for row in TABLE_4)
    assert near == 9  # of 12: a few tenths in most rows
    assert 11e9 / 800e6 == pytest.approx(14, abs=0.3)  # T5-large, of which c is 0.11


def test_the_rough_formula_of_one_document_is_not_the_papers():
    """K α / (1 + c) approaches K and "cannot be slower": Eq. (5) approaches K + 1, because of
    the bonus token, and falls below 1 where drafts cost and are not kept."""
    assert theory.speedup(1.0, 5, 0.0) == 6
    assert theory.speedup(0.0, 5, 0.0) == 1  # break-even, for a draft that costs nothing
    assert theory.speedup(0.0, 5, 0.02) == pytest.approx(1 / 1.1)
    # Its question: 80 % for the first of five drafts, 20 % for the others.
    tokens = [theory.expected_tokens_by_position([0.8, 0.2, 0.2, 0.2, 0.2][:k]) for k in (1, 2, 5)]
    assert tokens == pytest.approx([1.8, 1.96, 1.99968])


def test_run_lengths_by_position():
    assert theory.run_lengths_by_position([0.75] * 7) == pytest.approx(
        theory.run_length_distribution(0.75, 7))
    lengths = theory.run_lengths_by_position([0.8, 0.2])
    assert lengths == pytest.approx([0.2, 0.64, 0.16])
    assert sum(k * p for k, p in enumerate(lengths, 1)) == pytest.approx(
        theory.expected_tokens_by_position([0.8, 0.2]))
    with pytest.raises(ValueError, match=r"alphas\[0\] must be in"):
        theory.run_lengths_by_position([2.0])


def test_t5_small_on_translation():
    assert theory.expected_tokens(0.75, 7) == pytest.approx(3.60, abs=0.005)
    assert theory.speedup(0.75, 7, 0.02) == pytest.approx(3.16, abs=0.005)
    assert theory.expected_tokens(0.82, 7) == pytest.approx(4.42, abs=0.005)  # T5-large
    runs = theory.run_length_distribution(0.75, 7)
    assert runs[7] == pytest.approx(0.13, abs=0.005) and runs[0] == pytest.approx(0.25)
    assert math.fsum(runs) == pytest.approx(1)
    assert sum(k * p for k, p in enumerate(runs, 1)) == pytest.approx(
        theory.expected_tokens(0.75, 7))


def test_a_bigram_table_that_costs_nothing():
    assert theory.speedup(0.2, 3, 0.0) == pytest.approx(1.25, abs=0.005)


def test_equal_acceptance_is_a_geometric_series():
    assert theory.expected_tokens(0.9, 10) == pytest.approx((1 - 0.9**11) / 0.1)
    assert theory.expected_tokens(1.0, 4) == 5 and theory.expected_tokens(0.0, 4) == 1
    assert theory.expected_tokens_by_position([0.9] * 10) == pytest.approx(
        theory.expected_tokens(0.9, 10))


def test_expected_tokens_by_simulation():
    rng, alphas = np.random.default_rng(0), [0.8, 0.5, 0.9, 0.2]
    kept = rng.random((200_000, 4)) < alphas
    assert 1 + np.cumprod(kept, axis=1).sum(1).mean() == pytest.approx(
        theory.expected_tokens_by_position(alphas), abs=0.01)


def test_a_draft_pays_exactly_if_alpha_exceeds_c():
    for c in (0.05, 0.3, 0.7):
        for alpha in np.linspace(0, 0.99, 34):
            gains = [theory.speedup(alpha, gamma, c) for gamma in range(1, 60)]
            assert (max(gains) > 1) == theory.pays(alpha, c)
            if theory.pays(alpha, c):
                assert max(gains) >= (1 + alpha) / (1 + c)
                assert theory.best_draft_length(alpha, c) >= 1
            else:
                assert theory.best_draft_length(alpha, c) == 0


def test_best_draft_length_is_the_maximum_over_all():
    for alpha in (0.3, 0.6, 0.8, 0.95):
        for c in (0.01, 0.05, 0.2):
            gains = [theory.speedup(alpha, gamma, c, 1 + 0.02 * gamma) for gamma in range(33)]
            assert theory.best_draft_length(
                alpha, c, widening=lambda gamma: 1 + 0.02 * gamma) == int(np.argmax(gains))


def test_acceptance_that_falls_after_the_first_draft_wants_one_or_two():
    """80 % for the first draft and 20 % for later ones; a mean of 32 % would say more."""
    assert theory.best_draft_length([0.8, 0.2, 0.2, 0.2, 0.2], 0.05) in (1, 2)
    assert theory.best_draft_length([0.8, 0.2, 0.2, 0.2, 0.2], 0.2) == 1


def test_a_perfect_schedule_gains_up_to_60_percent_over_a_fixed_one():
    fixed = theory.speedup(0.8, theory.best_draft_length(0.8, 0.05), 0.05)
    assert 1.3 < theory.oracle_speedup(0.8, 0.05) / fixed < 1.6
    assert theory.oracle_speedup(0.75, 0.0) == pytest.approx(4)  # 1 / (1 - α)
    rng = np.random.default_rng(1)
    accepted = rng.geometric(0.2, 200_000) - 1  # before the first failure at α = 0.8
    simulated = (accepted + 1).sum() / (1 + 0.05 * accepted).sum()
    assert theory.oracle_speedup(0.8, 0.05) == pytest.approx(simulated, rel=0.01)


def test_the_worked_example_of_four_tokens():
    assert theory.overlap(P, Q) == pytest.approx(0.75)
    assert theory.d_lk(P, Q) == pytest.approx(0.25)
    np.testing.assert_allclose(theory.residual(P, Q), [0.8, 0, 0.2, 0])
    np.testing.assert_allclose(
        np.minimum(P, Q) + (1 - theory.overlap(P, Q)) * theory.residual(P, Q), P)
    assert theory.rejection_sampling_rate(P, Q) == pytest.approx(0.60)
    assert 0.25 * theory.residual(P, Q)[0] == pytest.approx(0.20)  # token 0 on a rejection
    assert min(1, P[1] / Q[1]) == pytest.approx(0.6)  # token 1 is kept that often
    assert theory.residual(P, P) is P


def test_acceptance_is_one_minus_the_total_variation_distance():
    rng = np.random.default_rng(2)
    for _ in range(50):
        p, q = rng.dirichlet(np.ones(9), 2)
        assert theory.overlap(p, q) == pytest.approx(1 - theory.d_lk(p, q))
        assert theory.d_lk(p, q) == pytest.approx(0.5 * np.abs(p - q).sum())
        assert theory.rejection_sampling_rate(p, q) <= theory.overlap(p, q)
        assert theory.lenient_acceptance(p, q, 1.0) == pytest.approx(theory.overlap(p, q))
        assert theory.lenient_acceptance(p, q, 0.1) >= theory.overlap(p, q)


def test_cold_distributions_agree_or_do_not():
    """At temperature 0.05 the overlap is near 1 or near 0, as the likeliest tokens agree or not,
    and the residual is the target's likeliest token."""
    def cold(p):
        powers = p**20
        return powers / powers.sum()

    assert theory.overlap(cold(P), cold(np.array([0.6, 0.2, 0.1, 0.1]))) > 0.99
    assert theory.overlap(cold(P), cold(Q)) < 1e-3
    np.testing.assert_allclose(theory.residual(cold(P), cold(Q)), [1, 0, 0, 0], atol=1e-3)
    even = np.full(32_128, 1 / 32_128)  # uniformly random drafts: tiny, and never 0
    peaked = np.zeros(32_128)
    peaked[7] = 1.0
    assert theory.overlap(peaked, even) == pytest.approx(1 / 32_128)


def test_one_rare_token_ruins_ordinary_rejection_sampling():
    p, q = np.array([0.98, 0.02]), np.array([0.999, 0.001])
    assert theory.rejection_sampling_rate(p, q) == pytest.approx(0.05)
    assert theory.overlap(p, q) > 0.98


def test_the_roofline_of_t5_xxl_on_v4():
    v4 = CHIPS["v4"]
    one, eight = (theory.roofline(11e9, n, v4) for n in (1, 8))
    assert 1e3 * one.memory == pytest.approx(18, abs=0.5)
    assert 1e3 * one.arithmetic == pytest.approx(0.16, abs=0.005)
    assert 1e3 * theory.roofline(11e9, 1, v4, utilization=1.0).arithmetic == pytest.approx(
        0.08, abs=0.005)
    assert 1e3 * eight.arithmetic == pytest.approx(1.3, abs=0.05)
    assert eight.seconds == one.seconds
    small = theory.roofline(77e6, 1, v4)
    assert 1e3 * small.seconds == pytest.approx(0.13, abs=0.005)
    assert small.seconds / one.seconds == pytest.approx(0.007, abs=0.0005)
    assert 100 < theory.crossover(v4) < 120
    assert v4.flops / v4.bandwidth == pytest.approx(230, abs=1)  # operations a byte
    assert 2 * v4.flops / v4.bandwidth == pytest.approx(460, abs=2)  # and a weight
    assert 11e9 * 2 == 22e9 and 77e6 * 2 == 154e6  # bytes of T5-XXL and T5-small


@pytest.mark.parametrize("call, told", [
    (lambda: theory.speedup(1.2, 3, 0.1), r"alpha must be in \[0.0, 1.0\], got 1.2"),
    (lambda: theory.speedup(0.5, -1, 0.1), "draft_length must be at least 0, got -1"),
    (lambda: theory.speedup(0.5, 3, -0.1), "c must be at least 0.0, got -0.1"),
    (lambda: theory.expected_tokens_by_position([0.5, 2.0]), r"alphas\[1\] must be in"),
    (lambda: theory.lenient_acceptance(P, Q, 0.0), r"lenience must be in \(0, 1\], got 0.0")])
def test_values_out_of_bounds_are_named(call, told):
    with pytest.raises(ValueError, match=told):
        call()
