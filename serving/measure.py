"""``tpuspec measure``: α, c and the speed-up of a pair on this machine, one module for each."""

import argparse
import importlib
import json
import sys
from typing import Any

import tqdm


def run(args: argparse.Namespace) -> int:
    module = importlib.import_module(f"tpuspec.serving.measure_{args.measurement}")
    document = module.measure(args)
    print(json.dumps(document, indent=1) if args.json else module.text(document))
    return 0


def progress(total: float, unit: str, what: str) -> tqdm.tqdm:
    """On a terminal only."""
    return tqdm.tqdm(total=total, unit=unit, desc=what, file=sys.stderr, leave=False,
                     disable=not sys.stderr.isatty())


def bounds(row: dict[str, Any], name: str, form: str = "{:.3f}") -> str:
    """A figure and its interval, as far as it is known."""
    value, low, high = (row.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return "-"
    said = form.format(value)
    return said if low is None else f"{said} [{form.format(low)}, {form.format(high)}]"
