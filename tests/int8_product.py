"""An int8 layer compiled for v4; prints what became of its weights.

A program of its own, as the compiler takes its options from the environment, once. Its
argument is the folder that the compiler writes its dumps to.
"""

import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import llo_compiler
from flax import nnx

from tpuspec.config import Quantization
from tpuspec.t5_layers import Linear
from tpuspec.tpu_compiler import Topology

ROWS, IN, OUT = 8, 4096, 10240


def main(dumps: str) -> None:
    graph, params = nnx.split(nnx.eval_shape(lambda: Linear(
        IN, OUT, std=1.0, logical=("mlp", "embed"), dtype=jnp.bfloat16, rngs=nnx.Rngs(0),
        quantization=Quantization.INT8)))
    leaves, structure = jax.tree.flatten(params)

    def product(x, *leaves):
        return nnx.merge(graph, jax.tree.unflatten(structure, leaves))(x)

    compiled = llo_compiler.compile_for(
        Topology.parse("v4").devices()[0], product,
        [jax.ShapeDtypeStruct((ROWS, IN), jnp.bfloat16), *leaves])  # fmt: skip
    bundles = "".join(path.read_text() for path in pathlib.Path(dumps).glob("*-final_bundles.txt"))
    print(json.dumps({
        "argument_bytes": compiled.memory_analysis().argument_size_in_bytes,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "shapes_of_the_weight": sorted(set(re.findall(
            rf"(\w+)\[{OUT},{IN}\]", compiled.as_text()))),
        "pushes": sorted(set(re.findall(r"vmatpush\.(\w+)", bundles))),
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
