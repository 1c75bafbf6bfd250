"""Replays the schedule of a compiled kernel, one core at a time.

The compiler's bundles are followed as a core would: scalar instructions are executed,
so that the grid's loop, ``pl.when`` and dynamic loops take the paths that they would
take on the chip, and a bundle takes a cycle, or longer where it waits for

* a result of the matrix, cross-lane or transcendental unit (``llo_units``);
* a copy, copies being served in order at the core's share of the HBM bandwidth.

Not modelled, all of which make the chip slower: start-up of a copy, one core's copies in
the way of the other's, fetching instructions, launching the kernel. Where the units are
the limit, such replays were 25 to 40 % below libtpu's own profiler, which exists for
later generations than v4.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np
from llo_dumps import Op, Program
from llo_paths import Path, target
from llo_scalars import ScalarCore
from llo_units import Latencies, Units

# Bundles after a branch that are executed whether or not it is taken.
DELAY_SLOTS = {"v4": 1, "v5e": 4, "v5p": 4, "v6e": 4}
_SCALAR = re.compile(r"s(?!br|halt|fence|pop$)|p(or|n?and|nor|xor|neg|mov)|int_to_ptr|inlined")
_NEGATIVE = 1 << 31
_MAX_BUNDLES = 20_000_000


@dataclasses.dataclass(frozen=True)
class Replay:
    """What one core does in one call.

    Attributes:
      bundles: that were executed.
      cycles: with the waits for units, all copies being there in time.
      copy_cycles: further cycles of waiting for copies.
      copied_bytes: between HBM and the core.
    """

    bundles: int
    cycles: int
    copy_cycles: float
    copied_bytes: int


class Copies:
    """DMA between HBM and one core's VMEM.

    Args:
      bytes_per_cycle: the core's share of the bandwidth.
      granule_bytes: unit of the sizes in the instructions.
    """

    def __init__(self, bytes_per_cycle: float, granule_bytes: int):
        self._rate = bytes_per_cycle
        self._granule = granule_bytes
        self._free = 0.0
        self._done: dict[int, collections.deque[list[float]]] = collections.defaultdict(
            collections.deque
        )  # [granules, when they are there], by semaphore
        self.bytes = 0

    def start(self, opcode: str, semaphore: int, granules: int, now: float) -> None:
        """Queues a copy; one of prefetched scalars is instant.

        v4's CMEM counts as HBM: the compiler may put an argument there, but it has to
        come from HBM all the same.
        """
        done = now
        if not opcode.endswith("_to_smem"):
            self.bytes += granules * self._granule
            self._free = done = max(self._free, now) + granules * self._granule / self._rate
        self._done[semaphore].append([granules, done])

    def signal(self, semaphore: int, granules: int, now: float) -> None:
        """Counts as arrived what is waited for and not copied: where a block overhangs
        the end of its array."""
        self._done[semaphore].append([granules, now])

    def wait(self, semaphore: int, granules: int) -> float:
        """When ``granules`` more of the semaphore's copies are there.

        Raises:
          ValueError: if so many were not started.
        """
        queue, done = self._done[semaphore], 0.0
        while granules > 0:
            if not queue:
                raise ValueError("the kernel waits for a copy that was not started")
            taken = min(granules, queue[0][0])
            done = queue[0][1]
            granules -= taken
            queue[0][0] -= taken
            if not queue[0][0]:
                queue.popleft()
        return done


def replay(
    program: Program,
    *,
    core: int,
    scalars: Mapping[int, np.ndarray],
    loop_trips: Sequence[int],
    latencies: Latencies,
    delay_slots: int,
    copies: Copies,
) -> Replay:
    """Follows one core through one call of the kernel.

    Args:
      program: the kernel.
      core: number of the core.
      scalars: values of its scalar-prefetch operands, by their number.
      loop_trips: trip counts of the loops whose end depends on vectors.
      latencies: of the generation's units.
      delay_slots: of its branches.
      copies: of its DMA.

    Raises:
      ValueError: if the number of trip counts is not that of such loops, or a branch
        depends on a scalar that was not given.
    """
    path = Path(program, loop_trips)
    scalar, units = ScalarCore(program, core, scalars), Units(program, latencies)
    kinds = [  # what a phi takes over is there before the bundle
        [
            (kind, op)
            for op in sorted(bundle, key=lambda op: op.opcode != "sphi")
            if (kind := _kind(units, op))
        ]
        for bundle in program.bundles
    ]
    at, executed, cycle, stalled = 0, 0, 0, 0.0
    jump: tuple[int, int] | None = None  # bundle to go to, delay slots left before it
    while at < len(kinds):
        executed += 1
        if executed > _MAX_BUNDLES:
            raise ValueError("the kernel does not come to an end")
        cycle += 1
        for kind, op in kinds[at]:
            if kind == "unit" and scalar.executes(op) is not False:
                cycle = max(cycle, units.ready(op))
        for kind, op in kinds[at]:
            goes = scalar.executes(op)
            if kind == "scalar":
                scalar.step(op, goes)
            elif kind == "branch":
                if path.taken(op, at, goes):
                    jump = target(program, op), delay_slots
            elif goes is False:
                pass
            elif kind == "unit":
                units.execute(op, cycle)
            elif kind == "signal":
                semaphore, granules = _known(scalar, op, 0, 1)
                if granules < _NEGATIVE:  # else it takes back what was waited for
                    copies.signal(semaphore, granules, cycle + stalled)
            elif kind == "wait":
                done = copies.wait(*_known(scalar, op, 0, 1))
                stalled += max(0.0, done - cycle - stalled)
            else:
                copies.start(op.opcode, *_known(scalar, op, 3, 1), cycle + stalled)
        at += 1
        if jump:
            to, left = jump
            at, jump = (at, (to, left - 1)) if left else (to, None)
    return Replay(executed, cycle, stalled, copies.bytes)


def _known(scalar: ScalarCore, op: Op, *numbers: int) -> list[int]:
    values = [scalar.read(op.operands[number]) for number in numbers]
    if None in values:
        raise ValueError(f"semaphore or size of the copy {op} is not known")
    return values


def _kind(units: Units, op: Op) -> str:
    """What the replay has to do for ``op``; empty where it just takes its place."""
    if op.opcode == "sbr.rel":
        return "branch"
    if op.opcode == "dma.done.wait":
        return "wait"
    if op.opcode.startswith("dma."):
        return "copy"
    if op.opcode == "vsyncadd":
        return "signal"
    if units.uses(op):
        return "unit"
    return "scalar" if _SCALAR.match(op.opcode) else ""
