"""One of several processes that hold one engine: restores its shards of a pair, runs the
same requests as all others and prints their ids.

Usage: multihost_worker.py COORDINATOR PROCESSES ID CHECKPOINTS DATA MODEL
"""

import functools
import json
import pathlib
import sys

import jax

from tpuspec import checkpoint
from tpuspec import mesh as mesh_lib
from tpuspec.config import EngineConfig
from tpuspec.engine import Engine
from tpuspec.sampling import SamplingParams

CONFIG = EngineConfig(slots=2, source_buckets=(8,), max_target_length=12, draft_lengths=(0, 2),
                      draft_length=2)
REQUESTS = ([3, 4, 5, 1], [9, 1], [7, 8, 9, 10, 11, 1])


def ids(directory: pathlib.Path, mesh: jax.sharding.Mesh | None) -> list[list[int]]:
    """Outputs of the requests, two at a time, greedy and sampled by turns."""
    shardings = None if mesh is None else functools.partial(mesh_lib.param_shardings, mesh=mesh)
    pair = [checkpoint.load(directory / name, shardings=shardings).model
            for name in ("target", "draft")]
    engine = Engine(*pair, CONFIG, vocabulary_size=32, mesh=mesh)
    engine.compile()
    waiting = list(enumerate(REQUESTS))
    running: dict[int, int] = {}
    outputs: list[list[int]] = [[] for _ in REQUESTS]
    while waiting or running:
        for slot in {0, 1} - set(running):
            if waiting:
                number, source = waiting.pop(0)
                engine.insert(slot, source, seed=number, max_new_tokens=12, eos_ids=(1,),
                              sampling=SamplingParams(temperature=float(number % 2)),
                              draft_length=2)
                running[slot] = number
        output = engine.step().read()
        for slot, number in list(running.items()):
            outputs[number] += output.tokens[slot, :output.num_tokens[slot]].tolist()
            if output.finish[slot]:
                del running[slot]
    return outputs


if __name__ == "__main__":
    coordinator, processes, process, directory, data, model = sys.argv[1:]
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.distributed.initialize(coordinator, int(processes), int(process))
    found = ids(pathlib.Path(directory), mesh_lib.make_mesh(int(data), int(model)))
    print(json.dumps([jax.process_count(), len(jax.local_devices()), found]))
