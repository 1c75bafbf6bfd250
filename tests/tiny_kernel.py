"""A kernel whose costs can be counted by hand, compiled for v4; prints what is found.

A program of its own, as the compiler takes its options from the environment, once. Its
argument is the folder that the compiler writes its dumps to.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import llo_compiler
import llo_paths
import llo_replay
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from llo_dumps import read_program
from llo_units import LATENCIES

from tpuspec.chips import CHIPS
from tpuspec.tpu_compiler import Topology, lowering_for

SLOTS, ROWS, LANES = 8, 256, 128


def kernel(turns_ref, x_ref, out_ref):
    slot = pl.program_id(0)
    out_ref[...] = x_ref[...]

    @pl.when(turns_ref[slot] > 0)
    def _() -> None:
        def add(i, _):
            # Two additions that cannot be made one.
            out_ref[...] = (out_ref[...] + 1.0) + x_ref[...]

        def double(total):
            out_ref[...] = out_ref[...] * 2.0
            return jnp.sum(out_ref[0, :8, :])

        lax.fori_loop(0, turns_ref[slot], add, None)
        lax.while_loop(lambda total: total < 1000.0, double, jnp.float32(0))


def build():
    block = pl.BlockSpec((1, ROWS, LANES), lambda slot, _: (slot, 0, 0))
    x = jax.ShapeDtypeStruct((SLOTS, ROWS, LANES), jnp.float32)
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(SLOTS,), in_specs=[block], out_specs=block
        ),
        out_shape=x,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="tiny",
    )
    return call, [jax.ShapeDtypeStruct((SLOTS,), jnp.int32), x]


def main(dumps: str) -> None:
    device = Topology.parse("v4").devices()[0]
    with lowering_for(device):
        llo_compiler.compile_for(device, *build())
    program = read_program(pathlib.Path(dumps), "tiny")

    def replays(turns, trips=3):
        return [
            llo_replay.replay(
                program, core=core, scalars={0: np.array(turns, np.int32)}, loop_trips=[trips],
                latencies=LATENCIES["v4"], delay_slots=llo_replay.DELAY_SLOTS["v4"],
                copies=llo_replay.Copies(500.0, CHIPS["v4"].dma_granule_bytes),
            )
            for core in (0, 1)
        ]  # fmt: skip

    fives, one_more = [5] * SLOTS, [5, 5, 5, 5, 5, 6, 5, 5]
    inert = [0, 5, 5, 5, 5, 5, 5, 5]
    print(json.dumps({
        "copied_bytes": [r.copied_bytes for r in replays(fives)],
        "loops": [loop.data for loop in llo_paths.find_loops(program)],
        "turns": [[r.bundles for r in replays(turns)] for turns in (fives, one_more)],
        "trips": [[r.bundles for r in replays(fives, trips)] for trips in (3, 4)],
        "inert": [r.bundles for r in replays(inert)],
        "inert_copied_bytes": [r.copied_bytes for r in replays(inert)],
        "vmem_bytes": program.vmem_bytes,
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
