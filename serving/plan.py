"""``tpuspec plan``: what a pair should gain, and with which draft length, before it is run."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from tpuspec import theory
from tpuspec.chips import CHIPS


def run(args: argparse.Namespace) -> int:
    plan = make(args.alpha, args.c, c_hat=args.c if args.c_hat is None else args.c_hat,
                widening=args.widening, longest=args.longest)
    if args.parameters is not None:
        plan["roofline"] = roofline(args.parameters, args.draft_parameters,
                                    plan["best_gamma"] or 1, args.machine)
    if args.json:
        print(json.dumps(plan, indent=1))
    else:
        _print(plan)
    return 0


def make(alphas: tuple[float, ...], c: float, *, c_hat: float, widening: tuple[float, ...],
         longest: int) -> dict[str, Any]:
    """The plan as JSON.

    Args:
      alphas: one rate for all drafts, or one for each position.
      c, c_hat: of a draft pass, in time and in operations.
      widening: T(γ+1)/T(1) for γ = 1, 2, ...; the last holds for what is longer.
      longest: the longest draft length looked at.
    """
    by_position = list(alphas) if len(alphas) > 1 else [alphas[0]] * longest
    by_position = by_position[:longest]

    def width(length: int) -> float:
        return widening[min(length, len(widening)) - 1] if length else 1.0

    rows = []
    for length in range(len(by_position) + 1):
        tokens = theory.expected_tokens_by_position(by_position[:length])
        rows.append({
            "gamma": length, "tokens_per_target_run": tokens, "widening": width(length),
            "speedup": theory.speedup_by_position(by_position[:length], c, width(length)),
            "operations": (length * (c_hat + 1) + 1) / tokens})
    best = theory.best_draft_length(by_position, c, longest=longest, widening=width)
    return {"alpha": list(alphas), "c": c, "best_gamma": best, "speedup": rows[best]["speedup"],
            "pays": theory.pays(by_position[0], c),
            "tokens_of_a_run": theory.run_lengths_by_position(by_position[:best]),
            "oracle_speedup": theory.oracle_speedup(alphas[0], c) if len(alphas) == 1 else None,
            "rows": rows}


@dataclasses.dataclass(frozen=True)
class Measured:
    """A machine whose figures were measured, by ``tpuspec measure cost`` for one."""

    bandwidth: float
    flops: float


def roofline(parameters: float, draft_parameters: float | None, gamma: int,
             measured: Sequence[float] | None) -> list[dict[str, Any]]:
    """Figure 1 of the paper as a table, in bfloat16 at half of the peak (a measured
    machine: in float32, at all that was measured).

    Args:
      measured: GB a second and GFLOP a second of a machine beside the chips.
    """
    machines: list[tuple[str, theory.Machine, dict[str, float]]] = [
        (name, chip, {}) for name, chip in CHIPS.items()]
    if measured is not None:
        bandwidth, flops = measured
        machines.append(("measured", Measured(1e9 * bandwidth, 1e9 * flops),
                         {"bytes_per_parameter": 4.0, "utilization": 1.0}))
    rows = []
    for name, machine, options in machines:
        one, verify = (theory.roofline(parameters, positions, machine, **options).seconds
                       for positions in (1, gamma + 1))
        draft = None if draft_parameters is None else theory.roofline(
            draft_parameters, 1, machine, **options).seconds
        rows.append({
            "machine": name, "gamma": gamma, "target_ms": 1e3 * one, "verify_ms": 1e3 * verify,
            "draft_ms": None if draft is None else 1e3 * draft,
            "c": None if draft is None else draft / one,
            "bound_by_arithmetic_from": theory.crossover(machine, **options)})
    return rows


def _print(plan: dict[str, Any]) -> None:
    print(f"{'gamma':>5} {'tokens a target run':>20} {'T(g+1)/T(1)':>12} {'speed-up':>9} "
          f"{'operations':>11}")
    for row in plan["rows"]:
        mark = "  best" if row["gamma"] == plan["best_gamma"] else ""
        print(f"{row['gamma']:>5} {row['tokens_per_target_run']:>20.2f} {row['widening']:>12.2f} "
              f"{row['speedup']:>8.2f}x {row['operations']:>10.2f}x{mark}")
    if plan["best_gamma"]:
        print("With it a run of the target gives "
              + ", ".join(f"{k} ({share:.0%})" for k, share in
                          enumerate(plan["tokens_of_a_run"], 1)) + " tokens.")
    else:
        print("No draft length pays: plain decoding is the fastest.")
    if plan["best_gamma"] and plan["oracle_speedup"] is not None:
        print(f"A perfect choice of gamma at every step would gain at most "
              f"{plan['oracle_speedup']:.2f}x (with a widening of 1).")
    for row in plan.get("roofline", ()):
        draft = "" if row["c"] is None else (
            f"; draft pass {row['draft_ms']:.3g} ms, c = {row['c']:.4f} by its bytes")
        print(f"{row['machine']}: target pass {row['target_ms']:.3g} ms, of "
              f"{row['gamma'] + 1} positions {row['verify_ms']:.3g} ms, bound by arithmetic from "
              f"{row['bound_by_arithmetic_from']:.0f} on{draft}")
    if "roofline" in plan:
        print("Idealized: every weight is read once and nothing else takes time; chips in "
              "bfloat16 at half of their peak, a measured machine in float32.")
