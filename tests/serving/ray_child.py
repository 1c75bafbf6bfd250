"""``tpuspec batch`` in a process of its own that kills things while it works.

    python ray_child.py worker|self|nothing LINES FLAG ...

kills a worker, or this process, when LINES lines have their record.
"""

import os
import signal
import sys

from jax._src import xla_bridge

from tpuspec.serving import batch, batch_ray
from tpuspec.serving.cli import make_parser


def main(victim: str, lines: str, *flags: str) -> int:
    places: list[batch_ray.Place] = []
    started, append = batch_ray.RayEngine._started, batch.Job.append

    def note(self, worker, place):
        places.append(place)
        started(self, worker, place)

    def kill_at(job, record):
        append(job, record)
        if job.done == int(lines) and victim != "nothing":
            job.save()
            os.kill(os.getpid() if victim == "self" else places[0].pid, signal.SIGKILL)

    batch_ray.RayEngine._started, batch.Job.append = note, kill_at
    code = batch.run(make_parser().parse_args(["batch", *flags]))
    # The chips of this host are its worker's.
    assert places and not xla_bridge.backends_are_initialized()
    return code


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
