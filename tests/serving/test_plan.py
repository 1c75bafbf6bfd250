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


def test_plan_says_how_many_tokens_a_run_gives_and_what_a_roofline_allows():
    args = ("plan", "--alpha", "0.75", "--c", "0.02", "--longest", "7", "--parameters", "11e9",
            "--draft_parameters", "77e6", "--machine", "28,193")
    plan = json.loads(run_cli(*args, "--json").stdout)
    assert plan["pays"] is True
    assert plan["tokens_of_a_run"] == pytest.approx(theory.run_length_distribution(0.75, 7))
    rows = {row["machine"]: row for row in plan["roofline"]}
    assert list(rows) == ["v4", "v5e", "v5p", "v6e", "measured"]
    assert rows["v4"]["target_ms"] == rows["v4"]["verify_ms"] == pytest.approx(18.3, abs=0.1)
    assert rows["v4"]["c"] == pytest.approx(0.007, abs=0.0005)
    cpu = rows["measured"]  # float32: 44 GB at 28 GB/s; 7 operations a byte
    assert cpu["target_ms"] == pytest.approx(44e3 / 28)
    assert cpu["bound_by_arithmetic_from"] == pytest.approx(2 * 193 / 28)
    printed = run_cli(*args).stdout
    assert "8 (13%) tokens." in printed and "v6e: target pass" in printed
    assert "Idealized" in printed
