"""``tpuspec compile``: what a pair takes on a TPU, before one is paid for."""

import argparse
import dataclasses
import json
import os
import sys
import warnings
from typing import TYPE_CHECKING

import tqdm

from tpuspec import platform
from tpuspec.chips import CHIPS
from tpuspec.config import EngineConfig, Quantization, T5Config
from tpuspec.presets import PRESETS, preset

if TYPE_CHECKING:
    from tpuspec.program_report import ProgramReport

ASSUMED = """\
Static estimates, not measurements: the programs are compiled, not run. floor = weights and
full caches read once, over the published bandwidth (encode: its operations over the peak,
where that is more). estimate = the compiler's schedule, with its cycles at an assumed clock
rate, copies and operands in memory at the published bandwidth, and kernels as
tools/kernel_report.py finds them; launches, and options of requests, are left out."""


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if a pair does not fit."""
    platform.prepare_compiler()
    _keep_programs(args.cache_dir)
    target, vocabulary_size = _model(args.target)
    draft = None if args.draft == "none" else _model(args.draft)[0]
    if args.cache_dir is not None and vocabulary_size is None:
        raise ValueError("target must be a checkpoint with its vocabulary for cache_dir, got "
                         f"{args.target}: programs depend on the vocabulary's size")
    dtype = args.dtype
    if dtype == "int8":
        target = dataclasses.replace(target, quantization=Quantization.INT8)
        dtype = "bfloat16"  # of the draft, of activations and of what is not quantized
    lengths = args.draft_lengths if draft is not None else (0,)
    positions = args.length - lengths[-1] - 2  # the start token and one window more
    if positions < 1:
        raise ValueError(f"length must be at least {lengths[-1] + 3} for draft lengths up to "
                         f"{lengths[-1]}, got {args.length}")
    config = EngineConfig(slots=args.slots, source_buckets=(args.source,), draft_lengths=lengths,
                          max_target_length=positions, draft_length=lengths[-1])
    topologies = [args.topology]
    if args.all:
        topologies = [name + host for name, chip in CHIPS.items()
                      for host in ("", ":" + chip.host)]
    from tpuspec import program_report
    from tpuspec.tpu_compiler import Topology

    reports = []
    for text in topologies:
        topology = Topology.parse(text)
        with tqdm.tqdm(desc=text, unit="program", file=sys.stderr, leave=False,
                       disable=not sys.stderr.isatty()) as bar:

            def progress(what: str, done: int, total: int, bar: tqdm.tqdm = bar) -> None:
                bar.total, bar.n = total, done
                bar.set_postfix_str(what)

            found = program_report.report(
                topology, target, draft, config, dtype=dtype, progress=progress,
                mesh_shape=args.mesh or (1, topology.num_chips),
                vocabulary_size=vocabulary_size)
        reports.append(found)
        if not args.json:
            print(_text(found, args) + "\n", flush=True)
    if args.json:
        documents = [{"target": args.target, "draft": args.draft, "dtype": args.dtype,
                      **found.to_json()} for found in reports]
        print(json.dumps(documents if args.all else documents[0], indent=1))
    else:
        print(ASSUMED)
    if args.cache_dir is not None:
        print("The programs are kept for such a host's\n  " + _served(args, config),
              file=sys.stderr)
    return 0 if all(found.fits for found in reports) else 1


def _keep_programs(cache_dir: str | None) -> None:
    """In JAX's own cache, by the keys that a TPU's process asks for; before JAX is imported."""
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    if cache_dir is None:
        return
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": os.path.abspath(cache_dir),
                   "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    # What is there already cannot be loaded without a TPU: it is compiled and written again.
    warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")


def _served(args: argparse.Namespace, config: EngineConfig) -> str:
    """The command whose programs these are."""
    dtype = "" if args.dtype == "bfloat16" else f" --dtype {args.dtype}"
    mesh = "" if args.mesh is None else f" --mesh {','.join(map(str, args.mesh))}"
    draft = "" if args.draft == "none" else f" --draft {args.draft}"
    lengths = ",".join(map(str, config.draft_lengths))
    return (f"JAX_COMPILATION_CACHE_DIR={args.cache_dir} tpuspec serve --target {args.target}"
            f"{draft} --slots {config.slots} --source_buckets {args.source} "
            f"--max_target_length {config.max_target_length} --draft_lengths {lengths} "
            f"--draft_length {config.draft_length}{dtype}{mesh}")


def _model(name: str) -> tuple[T5Config, int | None]:
    """A public size, or a checkpoint of any layout, whose weights are not read; with the ids
    that its vocabulary has, if it has one."""
    if name in PRESETS or not os.path.isdir(name):
        return preset(name), None
    from tpuspec import model_sources

    found = model_sources.describe(name)
    return found.config, None if found.vocabulary is None else found.vocabulary.size


def _text(found: "ProgramReport", args: argparse.Namespace) -> str:
    gib = 2**30
    lines = [
        f"{args.target} with {args.draft} on {found.topology}, {args.dtype}, {found.slots} slots, "
        f"mesh {found.mesh[0]},{found.mesh[1]}; for each chip:",
        f"{'program':<24} {'HBM GiB':>8} {'temporary MiB':>14} {'floor ms':>9} "
        f"{'estimate ms':>12} {'ratio':>6} {'collectives':>12} {'compiled in':>12}"]
    for row in found.programs:
        lines.append(
            f"{row.name:<24} {row.hbm_bytes / gib:>8.2f} {row.temporary_bytes / 2**20:>14.1f} "
            f"{row.floor_ms:>9.3f} {row.estimate_ms:>12.3f} "
            f"{row.estimate_ms / row.floor_ms:>6.2f} {row.collectives:>12} "
            f"{row.compile_seconds:>10.0f} s")
    lines.append(
        f"Memory: weights {found.weight_bytes / gib:.2f} GiB + caches "
        f"{found.cache_bytes / gib:.2f} GiB + the largest program's own "
        f"{(found.total_bytes - found.weight_bytes - found.cache_bytes) / gib:.2f} GiB = "
        f"{found.total_bytes / gib:.2f} of {found.hbm_bytes / gib:.2f} GiB: "
        f"{'fits' if found.fits else 'DOES NOT FIT'}.")
    lines.append("Slots that would fit, by length of source and output (the program's own memory "
                 "taken as here): " + ", ".join(
                     f"{length}: {slots}" for length, slots in found.slots_that_fit.items()) + ".")
    if found.c is not None:
        widest = max(found.widening)
        lines.append(f"c = {found.c:.4f}; T({widest + 1})/T(1) = {found.widening[widest]:.3f}. "
                     "Eq. (5) with the paper's alpha (its own expectation; what it measured):")
        for gain in found.predicted_speedup:
            lines.append(
                f"  {gain['task']:<14} temperature {gain['temperature']}: alpha "
                f"{gain['alpha']:.2f}, gamma {gain['gamma']}: {gain['speedup']:.2f}x   "
                f"({gain['paper_expected']}x; {gain['paper_measured']}x)")
    return "\n".join(lines)
