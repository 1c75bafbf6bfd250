"""``tpuspec plan``: what a pair should gain, and with which draft length, before it is run."""

import argparse
import json
from typing import Any

from tpuspec import theory


def run(args: argparse.Namespace) -> int:
    plan = make(args.alpha, args.c, c_hat=args.c if args.c_hat is None else args.c_hat,
                widening=args.widening, longest=args.longest)
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
            "oracle_speedup": theory.oracle_speedup(alphas[0], c) if len(alphas) == 1 else None,
            "rows": rows}


def _print(plan: dict[str, Any]) -> None:
    print(f"{'gamma':>5} {'tokens a target run':>20} {'T(g+1)/T(1)':>12} {'speed-up':>9} "
          f"{'operations':>11}")
    for row in plan["rows"]:
        mark = "  best" if row["gamma"] == plan["best_gamma"] else ""
        print(f"{row['gamma']:>5} {row['tokens_per_target_run']:>20.2f} {row['widening']:>12.2f} "
              f"{row['speedup']:>8.2f}x {row['operations']:>10.2f}x{mark}")
    if plan["best_gamma"] == 0:
        print("No draft length pays: plain decoding is the fastest.")
    elif plan["oracle_speedup"] is not None:
        print(f"A perfect choice of gamma at every step would gain at most "
              f"{plan['oracle_speedup']:.2f}x (with a widening of 1).")
