"""Definitions of α, draft acceptance rate and c, and the paper's formulas."""

import jax
import numpy as np
import pytest

from tpuspec.decode_state import StepOutput
from tpuspec.measurement import CostReport, SpeculationStats, time_interleaved
from tpuspec.theory import expected_tokens, speedup
from tpuspec.token_logprobs import TokenLogprobs


def test_expected_tokens_is_equation_1():
    for alpha in (0.0, 0.3, 0.75):
        for gamma in (0, 1, 7):
            assert expected_tokens(alpha, gamma) == pytest.approx(
                (1 - alpha**(gamma + 1)) / (1 - alpha))
    assert expected_tokens(1.0, 5) == 6


def test_speedup_is_equation_5_with_the_papers_numbers():
    """γ = 7, α = 0.75, c = 0.02: numerator 3.60, denominator 1.14 (T5-small)."""
    assert expected_tokens(0.75, 7) == pytest.approx(3.60, abs=0.005)
    assert speedup(0.75, 7, 0.02) == pytest.approx(3.60 / 1.14, abs=0.01)
    assert speedup(0.2, 3, 0.0) == pytest.approx(1.25, abs=0.005)
    assert speedup(0.75, 7, 0.02, widening=2.0) == pytest.approx(3.60 / 2.14, abs=0.01)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: expected_tokens(1.1, 1), r"alpha must be in \[0.0, 1.0\], got 1.1"),
    (lambda: expected_tokens(0.5, -1), "draft_length must be at least 0, got -1"),
    (lambda: speedup(0.5, 1, -0.1), "c must be at least 0.0, got -0.1")])
def test_formulas_refuse_what_means_nothing(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_two_acceptance_rates_are_told_apart():
    """A step of 4 drafts with 1 accepted: 2 examined, so α = 1/2 and the rate 1/4."""
    stats = SpeculationStats(steps=1, drafted=4, accepted=1, examined=2, emitted=2, overlap=1.2)
    assert stats.alpha == 0.5 and stats.draft_acceptance_rate == 0.25
    assert stats.alpha_overlap == 0.6 and stats.tokens_per_target_run == 2
    twice = stats + stats
    assert twice == SpeculationStats(steps=2, drafted=8, accepted=2, examined=4, emitted=4,
                                     overlap=2.4)
    low, high = twice.alpha_interval()
    assert 0 <= low < 0.5 < high <= 1


def test_nothing_drafted_has_no_rate():
    stats = SpeculationStats(steps=3, emitted=3)
    assert stats.alpha is stats.alpha_overlap is stats.draft_acceptance_rate is None
    assert stats.alpha_interval() is None and stats.tokens_per_target_run == 1
    assert SpeculationStats().tokens_per_target_run is None


def test_one_host_array_carries_a_whole_step():
    output = StepOutput(tokens=np.arange(6, dtype=np.int32).reshape(2, 3),
                        num_tokens=np.array([1, 0], np.int32), drafted=np.array([2, 0], np.int32),
                        accepted=np.array([0, 0], np.int32), examined=np.array([1, 0], np.int32),
                        finish=np.array([2, 0], np.int32), overlap=np.array([0.3, 0.0], np.float32),
                        found=np.array([3, 0], np.int32), agreed=np.array([1, 0], np.int32),
                        logprobs=TokenLogprobs(
                            tokens=-np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
                            top=-np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 9,
                            top_ids=np.arange(24, dtype=np.int32).reshape(2, 3, 4)))
    again = StepOutput.unpack(np.asarray(output.pack()), width=3)
    for found, expected in zip(jax.tree.leaves(again), jax.tree.leaves(output), strict=True):
        np.testing.assert_array_equal(found, expected)
    stats = SpeculationStats.of_slot(again, 0)
    assert (stats.steps, stats.examined, stats.emitted) == (1, 1, 1)
    assert SpeculationStats.of_slot(again, 1) == SpeculationStats()


def test_c_and_widening_are_ratios_to_one_target_pass_of_width_1():
    report = CostReport(target_ms=10.0, draft_ms=2.0, verify_ms={0: 10.0, 3: 12.5},
                        step_ms={0: 10.0, 3: 20.0}, method="by hand")
    assert report.c == 0.2 and report.widening(3) == 1.25
    plain = CostReport(target_ms=10.0, draft_ms=None, verify_ms={0: 10.0}, step_ms={0: 10.0},
                       method="by hand")
    assert plain.c is None


def test_runs_are_timed_in_turns():
    order = []
    times = time_interleaved({name: lambda name=name: order.append(name) for name in "ab"}, 3)
    assert order == list("ab") * 4 and set(times) == {"a", "b"}
