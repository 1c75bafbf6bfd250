"""Peak memory of a conversion, on directories as large as the published models."""

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from programmable import write_config

from tpuspec import checkpoint
from tpuspec.checkpoint import AbstractModel
from tpuspec.config import T5Config
from tpuspec.huggingface import parameter_names
from tpuspec.presets import preset

_SHARD_BYTES = 5 << 30
_GIB = 1 << 30


def write_synthetic(path: Path, config: T5Config) -> tuple[int, int]:
    """Random bfloat16 in shards, by plain writes; bytes of all tensors and of the largest."""
    write_config(path, config)
    leaves = AbstractModel(config, jnp.dtype(jnp.bfloat16)).leaves
    shapes = {part: leaves[name].shape[-2:] for name, parts in parameter_names(config).items()
              for part in parts}
    sizes = {name: 2 * math.prod(shape) for name, shape in shapes.items()}
    noise = np.random.default_rng(0).normal(size=1 << 24).astype(ml_dtypes.bfloat16).tobytes()
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[n] for n in shards[-1]) + size > _SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    index: dict[str, str] = {}
    for i, names in enumerate(shards):
        file, header, end = f"model-{i + 1:05}-of-{len(shards):05}.safetensors", {}, 0
        for name in names:
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]),
                            "data_offsets": [end, end + sizes[name]]}
            end += sizes[name]
            index[name] = file
        text = json.dumps(header).encode()
        with (path / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for n, name in enumerate(names):
                start, left = 2 * 977 * n % (1 << 20), sizes[name]
                while left:
                    piece = noise[start:start + left]
                    stream.write(piece)
                    start, left = 0, left - len(piece)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return sum(sizes.values()), max(sizes.values())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["t5-v1_1-xl", "t5-v1_1-xxl"])
def test_a_conversion_needs_little_memory_beside_its_largest_tensor(tmp_path, name, capsys):
    config = preset(name)
    needed = 5 * sum(math.prod(leaf.shape) for leaf in AbstractModel(
        config, jnp.dtype(jnp.bfloat16)).leaves.values())
    if shutil.disk_usage(tmp_path).free < needed:
        pytest.skip(f"needs {needed / _GIB:.0f} GiB of disk")
    total, largest = write_synthetic(tmp_path / "source", config)
    script = f"""
from tpuspec.serving import convert
from tpuspec.serving.cli import make_parser
convert.run(make_parser().parse_args(
    ["convert", {str(tmp_path / "source")!r}, {str(tmp_path / "made")!r}]))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak = 1024 * int(done.stdout.split()[1])
    with capsys.disabled():
        print(f"\n{name}: {total / _GIB:.1f} GiB in {time.monotonic() - start:.0f} s, peak "
              f"{peak / _GIB:.2f} GiB, largest tensor {largest / _GIB:.2f} GiB")
    assert peak < largest + 2 * _GIB
    assert checkpoint.describe(tmp_path / "made").weight_bytes == total
    shutil.rmtree(tmp_path / "source")
    shutil.rmtree(tmp_path / "made")
