"""Static cost report of every kernel on every TPU generation; needs no TPU.

Compiles each kernel by libtpu's compiler, one process for each program and generation,
and estimates its time from what was compiled (``llo_replay.py``) and from the bytes that
it has to move. Compares with the stored figures, so that a change that makes a kernel
slower is seen.

Exit status: 0 if all is well; 1 if a kernel does not compile, takes more than 90 % of
the VMEM, or costs over 10 % more than the stored figures, or if there is no libtpu; 2 if
the arguments are wrong.
"""

import argparse
import fnmatch
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from tqdm import tqdm

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: no TPU is touched

import kernel_cases  # noqa: E402
import llo_compiler  # noqa: E402
from kernel_case import GENERATIONS  # noqa: E402

HEADER = """\
Static estimates, not measurements: no TPU was used. Per call on one chip: bundles = VLIW
bundles executed by the busier core; replay = these, with their waits for the matrix,
cross-lane and transcendental units; dma = bytes that have to be moved / published
bandwidth; copied = bytes moved / these; predicted = the replay with its waits for copies
too, not below dma; roofline = the hardware's limit (dma, or flops / peak where that is
more) / predicted. Clock rates are assumed; launch and start-up of copies are left out."""
KEYS = (
    "kernel", "generation", "compiles", "vmem_bytes", "vmem_limit_bytes", "bundles",
    "replay_us", "dma_us", "predicted_us", "roofline",
)  # fmt: skip
GOLDEN = pathlib.Path(__file__).with_name("kernel_report_golden.json")
COSTS = ("bundles", "predicted_us")
MAX_COST_RATIO = 1.1
MAX_VMEM_SHARE = 0.9
TIMEOUT_S = 900  # ten seconds where the machine is free

Row = dict[str, Any]


def run_estimate(kernels: Sequence[str], generation: str) -> list[Row]:
    """Rows of kernels that have the same program, made by a process of its own."""
    rows: list[Row] = [
        dict.fromkeys(KEYS) | {"kernel": kernel, "generation": generation} for kernel in kernels
    ]

    def fail(error: str) -> list[Row]:
        return [row | {"compiles": False, "error": error} for row in rows]

    script = pathlib.Path(__file__).with_name("kernel_estimate.py")
    paths = [str(script.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="kernel_report_") as dumps:
        try:
            done = subprocess.run(
                [sys.executable, script, generation, dumps, *kernels],
                env=os.environ
                | llo_compiler.environment(dumps)
                | {"PYTHONPATH": os.pathsep.join(paths)},  # also where Python has a safe path
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return fail(f"not compiled in {TIMEOUT_S} s")
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        return [row | figures for row, figures in zip(rows, found, strict=True)]
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines() or ["no message"]
        return fail(f"its process ended with status {done.returncode}: {lines[-1]}")


def run_estimates(pairs: Sequence[tuple[str, str]]) -> list[Row]:
    """Rows of (kernel, generation) pairs; as many processes at a time as there are cores."""
    groups: dict[Any, list[str]] = {}
    for kernel, generation in pairs:
        key = kernel_cases.CASES[kernel].build, generation
        groups.setdefault(key, []).append(kernel)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    with ThreadPoolExecutor(cores) as pool:
        futures = [
            pool.submit(run_estimate, kernels, generation)
            for (_, generation), kernels in groups.items()
        ]
        for _ in tqdm(as_completed(futures), total=len(futures), unit="program", disable=None):
            pass
    rows = {(r["kernel"], r["generation"]): r for future in futures for r in future.result()}
    return [rows[pair] for pair in pairs]


def faults(row: Row, golden: Row | None) -> list[str]:
    """What is wrong with a row.

    Args:
      golden: the stored row; None if costs cannot be compared.
    """
    if row.get("error"):
        return [row["error"].strip().splitlines()[0]]
    found = []
    share = row["vmem_bytes"] / row["vmem_limit_bytes"]
    if share > MAX_VMEM_SHARE:
        found.append(f"takes {share:.0%} of the VMEM, more than {MAX_VMEM_SHARE:.0%}")
    for cost in COSTS if golden else ():
        if row[cost] > golden[cost] * MAX_COST_RATIO:
            found.append(f"{cost} was {golden[cost]}, is {row[cost]}")
    return found


def load_golden() -> tuple[str, dict[tuple[str, str], Row]]:
    """The libtpu that the stored figures were made with, and the figures."""
    stored = json.loads(GOLDEN.read_text())
    return stored["libtpu"], {(r["kernel"], r["generation"]): r for r in stored["rows"]}


def save_golden(libtpu: str, rows: dict[tuple[str, str], Row]) -> None:
    """Stores rows in the order of the report, one a line."""
    order = [(kernel, g) for kernel in kernel_cases.CASES for g in GENERATIONS]
    lines = [json.dumps({key: rows[pair][key] for key in KEYS}) for pair in order if pair in rows]
    text = ",\n    ".join(lines)
    GOLDEN.write_text(f'{{\n  "libtpu": "{libtpu}",\n  "rows": [\n    {text}\n  ]\n}}\n')


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    width = max(len(row["kernel"]) for row in rows)
    lines = [
        f"{'kernel':{width}} gen  VMEM MiB   of  spill KiB  bundles  replay us  dma us  "
        "copied  predicted us  roofline  bound"
    ]
    for row in rows:
        start = f"{row['kernel']:{width}} {row['generation']:4}"
        if row["bundles"] is None:
            lines.append(f"{start} {'not compiled' if not row['compiles'] else 'not understood'}")
            continue
        lines.append(
            f"{start} {row['vmem_bytes'] / 2**20:8.2f} {row['vmem_limit_bytes'] / 2**20:4.0f} "
            f"{row['spill_bytes'] / 2**10:10.0f} {row['bundles']:8} {row['replay_us']:10.1f} "
            f"{row['dma_us']:7.1f} {row['copied']:7.2f} {row['predicted_us']:13.1f} "
            f"{row['roofline']:9.2f}  {row['bound']}"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernel", action="append", metavar="NAME",
                        help="only this kernel, or those that match a pattern; repeatable")
    parser.add_argument("--generation", action="append", choices=GENERATIONS,
                        help="only this generation; repeatable")
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--update-golden", action="store_true",
                        help="store these figures instead of comparing with them; not those "
                        "of kernels that do not compile or do not fit")
    args = parser.parse_args(arguments)
    kernels = [
        name for name in kernel_cases.CASES
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in args.kernel or ["*"])
    ]
    if not kernels:
        parser.error(f"no kernel matches; there are {', '.join(kernel_cases.CASES)}")
    generations = [g for g in GENERATIONS if g in (args.generation or GENERATIONS)]
    return args, [(kernel, g) for kernel in kernels for g in generations]


def main(arguments: Sequence[str] | None = None) -> int:
    args, pairs = parse(arguments)
    if importlib.util.find_spec("libtpu") is None:
        print("kernel_report: libtpu, which has the compiler, is not installed; "
              "pip install libtpu", file=sys.stderr)
        return 1
    libtpu = importlib.metadata.version("libtpu")
    print(HEADER, end="\n\n", file=sys.stderr if args.json else sys.stdout, flush=True)

    golden_libtpu, golden = load_golden() if GOLDEN.exists() else (libtpu, {})
    rows = run_estimates(pairs)
    if args.json:
        print(json.dumps([{key: row[key] for key in KEYS} for row in rows], indent=1))
    else:
        print(table(rows))
    comparable = golden_libtpu == libtpu and not args.update_golden
    if golden_libtpu != libtpu:
        print(f"kernel_report: costs are not compared: stored with libtpu {golden_libtpu}, "
              f"this is {libtpu}", file=sys.stderr)
    faulty = set()
    for row in rows:
        pair = row["kernel"], row["generation"]
        found = faults(row, golden.get(pair) if comparable else None)
        if comparable and not found and pair not in golden:
            found.append("has no stored figures; see --update-golden")
        for fault in found:
            print(f"kernel_report: {' on '.join(pair)}: {fault}", file=sys.stderr)
            faulty.add(pair)
    if args.update_golden:
        kept = golden if golden_libtpu == libtpu else {}
        made = {(r["kernel"], r["generation"]): r for r in rows}
        save_golden(libtpu, kept | {pair: made[pair] for pair in made if pair not in faulty})
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
