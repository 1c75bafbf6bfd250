"""``tpuspec plan`` against the formulas and the paper."""

import json

import pytest
from harness import run_cli

from tpuspec import theory


def test_plan_of_t5_small_on_translation():
    result = run_cli("plan", "--alpha", "0.75", "--c", "0.02", "--json")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["rows"][7]["speedup"] == pytest.approx(3.16, abs=0.005)
    assert plan["rows"][7]["operations"] == pytest.approx(
        theory.operations_factor(0.75, 7, 0.02))
    assert plan["best_gamma"] == theory.best_draft_length(0.75, 0.02, longest=16)
    assert plan["speedup"] == max(row["speedup"] for row in plan["rows"])


def test_plan_by_position_and_with_a_widening():
    result = run_cli("plan", "--alpha", "0.8,0.2,0.2", "--c", "0.1", "--widening", "1.2,1.4",
                     "--json")
    plan = json.loads(result.stdout)
    assert [row["widening"] for row in plan["rows"]] == [1.0, 1.2, 1.4, 1.4]
    assert plan["rows"][3]["tokens_per_target_run"] == pytest.approx(1 + 0.8 + 0.16 + 0.032)
    assert plan["best_gamma"] == 1 and plan["oracle_speedup"] is None


def test_plan_says_when_no_draft_length_pays():
    result = run_cli("plan", "--alpha", "0.1", "--c", "0.3", "--longest", "3")
    assert result.returncode == 0
    assert "No draft length pays" in result.stdout and "0  " in result.stdout
    wrong = run_cli("plan", "--alpha", "1.5", "--c", "0.3")
    assert wrong.returncode == 2 and "must be in [0.0, 1.0], got 1.5" in wrong.stderr
