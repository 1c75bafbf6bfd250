"""Compiles one kernel for one TPU generation and estimates its times.

A process of its own, started by ``kernel_report.py``: the compiler takes its options
from the environment, once, and a fault in it ends the process. Usage:

    kernel_estimate.py GENERATION DUMPS CASE ...

DUMPS is the empty folder that ``llo_compiler.environment`` named; the cases
have the same program. Prints a row of the report for each, as a JSON list, on one line.
"""

import json
import pathlib
import sys
from typing import Any

import kernel_cases
import llo_compiler
import llo_replay
import llo_units
from kernel_case import KernelCase
from llo_dumps import Program, read_program

from tpuspec.chips import CHIPS
from tpuspec.tpu_compiler import Topology, lowering_for


def estimate(
    case: KernelCase, generation: str, program: Program, *, peak_flops: float, cores: int
) -> dict[str, Any]:
    """Figures of a compiled kernel: those of its slower core, for one call.

    Args:
      peak_flops: of one core, in a second.
      cores: that share the call.
    """
    chip = CHIPS[generation]
    bytes_per_us = chip.bandwidth / 1e6
    cycles_per_us = chip.clock_hz / 1e6

    def replays(sharing: int) -> list[llo_replay.Replay]:
        bytes_per_cycle = bytes_per_us / cycles_per_us / sharing
        return [
            llo_replay.replay(
                program,
                core=core,
                scalars=case.scalars,
                loop_trips=case.loop_trips,
                latencies=llo_units.LATENCIES[generation],
                delay_slots=llo_replay.DELAY_SLOTS[generation],
                copies=llo_replay.Copies(bytes_per_cycle, chip.dma_granule_bytes),
            )
            for core in range(cores)
        ]

    found = replays(sharing=cores)
    copying = sum(r.copied_bytes > 0 for r in found)
    if 0 < copying < cores:  # a core that does nothing leaves the other all the bandwidth
        found = replays(sharing=copying)
    copied = sum(r.copied_bytes for r in found)
    replay_us = max(r.cycles for r in found) / cycles_per_us
    dma_us = case.hbm_bytes / bytes_per_us
    with_copies_us = max(r.cycles + r.copy_cycles for r in found) / cycles_per_us
    predicted_us = max(with_copies_us, dma_us)
    limit_us = max(dma_us, case.flops / (peak_flops * cores) * 1e6)
    return {
        "vmem_bytes": program.vmem_bytes,
        "bundles": max(r.bundles for r in found),
        "replay_us": round(replay_us, 3),
        "dma_us": round(dma_us, 3),
        "predicted_us": round(predicted_us, 3),
        "roofline": round(limit_us / predicted_us, 4),
        "spill_bytes": program.spill_bytes,
        "copied": round(copied / case.hbm_bytes, 3),
        "bound": "HBM" if max(dma_us, copied / bytes_per_us) > replay_us else "units",
    }


def main(generation: str, dumps: str, *names: str) -> None:
    cases = [kernel_cases.CASES[name] for name in names]
    device = Topology.parse(generation).devices()[0]
    with lowering_for(device) as info:
        row = {"compiles": True, "vmem_limit_bytes": info.vmem_capacity_bytes}
        function, shapes = cases[0].build(generation)
        try:
            llo_compiler.compile_for(device, function, shapes, cases[0].donate_argnums)
        except Exception as error:  # whatever the compiler refuses it with
            print(json.dumps([row | {"compiles": False, "error": str(error)}] * len(cases)))
            return
    rows = []
    for case in cases:
        try:
            program = read_program(pathlib.Path(dumps), case.kernel)
            found = estimate(
                case,
                generation,
                program,
                peak_flops=info.bf16_ops_per_second,
                cores=info.num_cores,
            )
        except Exception as error:  # the dumps' format is the compiler's own
            found = {"error": f"compiled, but not understood: {error!r}"}
        rows.append(row | found)
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
