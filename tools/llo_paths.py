"""Where the branches of a compiled kernel go."""

import dataclasses
import re
from collections.abc import Sequence

from llo_dumps import Op, Program

_NAME = re.compile(r"%(\w+)")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop's first bundle, and the last that can go back to it.

    Attributes:
      data: whether its end depends on vectors, which the replay does not know.
    """

    start: int
    end: int
    data: bool


def target(program: Program, op: Op) -> int:
    """The bundle that a branch goes to."""
    number = int(op.operands[-1].rpartition("region")[2])
    # The empty region at the exit is not marked.
    return program.regions.get(number, len(program.bundles) - 1)


def vector_values(program: Program) -> set[str | None]:
    """Names of the scalars, and of the spill slots, that depend on vectors."""
    found: set[str | None] = set()
    before = -1
    while len(found) > before:
        before = len(found)
        for op in (op for bundle in program.bundles for op in bundle):
            # Without an alternative, the value is only used where the predicate holds.
            names = _NAME.findall(f"{op.operands} {op.otherwise}")
            names += [op.predicate] if op.otherwise else []
            if op.opcode == "spop" or not found.isdisjoint(names):
                found.add(op.operands[0] if op.opcode == "sst" else op.result)
            elif op.opcode == "sld" and op.operands[0] in found:
                found.add(op.result)
    return found


def find_loops(program: Program) -> list[Loop]:
    """All loops in program order, the outer before the inner."""
    by_vectors = vector_values(program)
    branches = [
        (i, op) for i, b in enumerate(program.bundles) for op in b if op.opcode == "sbr.rel"
    ]
    loops = []
    for end, back in branches:
        start = target(program, back)
        if start <= end:
            exits = [op for i, op in branches if start <= i < end < target(program, op)]
            tests = [back] if back.predicate else exits
            loops.append(Loop(start, end, any(op.predicate in by_vectors for op in tests)))
    return sorted(loops, key=lambda loop: (loop.start, -loop.end))


class Path:
    """Follows one core's branches.

    Args:
      program: the kernel.
      loop_trips: trip counts of the loops whose end depends on vectors.

    Raises:
      ValueError: if there are more or fewer of such loops.
    """

    def __init__(self, program: Program, loop_trips: Sequence[int]):
        loops = [loop for loop in find_loops(program) if loop.data]
        if len(loops) != len(loop_trips):
            raise ValueError(
                f"{len(loops)} loops end by what is in vectors, got {len(loop_trips)} trip counts"
            )
        self._program = program
        self._by_vectors = vector_values(program)
        self._trips = dict(zip(loops, loop_trips, strict=True))
        self._turns = dict.fromkeys(loops, 0)

    def taken(self, op: Op, at: int, goes: bool | None) -> bool:
        """Whether the branch of bundle ``at`` is taken; None is for the trip counts."""
        if goes is not None:
            return goes
        if op.predicate not in self._by_vectors:
            raise ValueError(f"the branch of bundle {at:#x} needs a scalar that was not given")
        to = target(self._program, op)
        for loop in reversed(self._trips):  # the innermost first
            if loop.start <= at <= loop.end and not loop.start < to <= loop.end:
                # Tests are after the body where they go back, before it where they leave.
                goes_back = to == loop.start
                self._turns[loop] += 1
                again = self._turns[loop] < self._trips[loop] + (not goes_back)
                if not again:
                    self._turns[loop] = 0
                return again == goes_back
        return False  # a part that vectors decide on: taken as not skipped
