"""One engine over several processes, as on the hosts of a TPU slice."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import pytest
from multihost_worker import ids
from programmable import rand

from tpuspec import checkpoint

WORKER = pathlib.Path(__file__).with_name("multihost_worker.py")


@pytest.mark.parametrize("data, model", [
    (2, 2), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_two_processes_restore_their_shards_and_give_the_ids_of_one_device(tmp_path, data, model):
    target = rand(1)
    checkpoint.save(tmp_path / "target", target, None)
    checkpoint.save(tmp_path / "draft", rand(1, noise=0.3), None)
    with socket.create_server(("localhost", 0)) as free:
        coordinator = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2",
                                "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # quick to compile
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # of one process alone
    workers = [subprocess.Popen(
        [sys.executable, WORKER, coordinator, "2", str(number), tmp_path, str(data), str(model)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for number in range(2)]
    try:
        outputs = [worker.communicate(timeout=400) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, errors
    # Gloo, which connects the processes, prints lines of its own.
    one, other = (json.loads(output.splitlines()[-1]) for output, _ in outputs)
    assert one == other
    processes, devices, found = one
    assert (processes, devices) == (2, 2) and len(jax.devices()) == 4
    assert found == ids(tmp_path, None)
    assert all(found) and len({tuple(x) for x in found}) == len(found)
