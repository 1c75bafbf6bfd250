"""Compiles the programs of a tiny pair for a topology; a process of its own, because the
compiler is chosen before JAX is imported. Usage: tiny_programs.py TOPOLOGY SLOTS; prints
the report as JSON."""

import dataclasses
import json
import sys

from tpuspec import platform
from tpuspec.config import EngineConfig, T5Config

TARGET = T5Config(vocab_size=1280, d_model=256, d_kv=64, d_ff=512, num_heads=8, num_layers=1,
                  num_decoder_layers=2)
DRAFT = dataclasses.replace(TARGET, d_model=128, num_heads=2, num_decoder_layers=1)
CONFIG = EngineConfig(slots=1, source_buckets=(128,), draft_lengths=(0, 3), draft_length=3,
                      max_target_length=100)

if __name__ == "__main__":
    platform.prepare_compiler()
    from tpuspec import program_report
    from tpuspec.tpu_compiler import Topology

    topology = Topology.parse(sys.argv[1])
    found = program_report.report(
        topology, TARGET, DRAFT, dataclasses.replace(CONFIG, slots=int(sys.argv[2])),
        dtype="bfloat16", mesh_shape=(1, topology.num_chips))
    print(json.dumps(found.to_json()))
