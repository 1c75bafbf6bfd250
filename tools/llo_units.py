"""Waits of a core's bundles for its matrix, cross-lane and transcendental units.

Their results come out of queues some time after the instruction that asks for them. The
compiler emits no empty bundles for that time: the instruction that takes a result
(``vpop``) waits. Latencies between other instructions are in the schedule already.
"""

import collections
import dataclasses
import re

from llo_dumps import Op, Program


@dataclasses.dataclass(frozen=True)
class Latencies:
    """Cycles, as the compiler itself counts them (its ``critical-path`` dumps).

    Attributes:
      matmul: from a matrix product to its first result.
      result: between two results of one product.
      push: that loading a tile of weights takes the matrix unit.
      stream: that a product takes the matrix unit.
      reduce: of a reduction across lanes.
      permute: of a rotation or permutation across lanes.
      transcendental: of exp, reciprocal and the like.
      to_scalar: from a vector register to a scalar one.
    """

    matmul: int
    result: int
    push: int
    stream: int
    reduce: int
    permute: int
    transcendental: int
    to_scalar: int


LATENCIES = {
    "v4": Latencies(83, 8, 8, 8, 79, 69, 8, 30),
    "v5e": Latencies(131, 8, 4, 8, 115, 114, 7, 30),
    "v5p": Latencies(131, 8, 4, 8, 115, 114, 9, 49),
    "v6e": Latencies(192, 4, 4, 4, 137, 123, 14, 49),
}
_MATRIX_UNIT = re.compile(r"mxu\d")
_PRODUCERS = (
    ("reduce", re.compile(r"v\w+\.xlane")),
    ("permute", re.compile(r"v(rot\.lane|perm|xpose|bcast)")),
    ("transcendental", re.compile(r"v(exp2|rcp|rsqrt|log2|tanh|pow2|erf|sin|cos|sigshft)")),
    ("to_scalar", re.compile(r"vpush")),
)


class Units:
    """When the results of one core's units are there.

    Args:
      program: the kernel; it tells how many results a matrix product has.
      latencies: of the generation.
    """

    def __init__(self, program: Program, latencies: Latencies):
        self._latencies = latencies
        self._ready: dict[str, int] = {}  # result of a unit, by the instruction that asked
        self._busy: dict[str, int] = {}  # matrix unit: until when it takes no weights, rows
        self._results: dict[str, collections.deque[int]] = collections.defaultdict(
            collections.deque
        )
        asked: collections.Counter[str] = collections.Counter()
        taken: collections.Counter[str] = collections.Counter()
        for op in (op for bundle in program.bundles for op in bundle):
            if unit := _MATRIX_UNIT.search(op.opcode):
                asked[unit[0]] += op.opcode.startswith("vmatmul")
                taken[unit[0]] += op.opcode.startswith("vpop")
        self._per_product = {unit: taken[unit] / n for unit, n in asked.items() if n}
        self._owed: dict[str, float] = collections.defaultdict(float)

    def uses(self, op: Op) -> bool:
        """Whether an instruction waits for a unit, or sets one to work."""
        return (
            op.opcode.startswith(("vpop", "vmat"))
            or op.opcode == "spop"
            or any(pattern.match(op.opcode) for _, pattern in _PRODUCERS)
        )

    def ready(self, op: Op) -> int:
        """The first cycle in which ``op`` can be executed."""
        unit = _MATRIX_UNIT.search(op.opcode)
        if op.opcode.startswith("vmat") and unit:
            return self._busy.get(unit[0], 0)
        if op.opcode.startswith("vpop") and unit:
            queue = self._results[unit[0]]
            return queue.popleft() if queue else 0
        if op.opcode.startswith("vpop") or op.opcode == "spop":
            return max((self._ready.get(name[1:], 0) for name in op.operands), default=0)
        return 0

    def execute(self, op: Op, cycle: int) -> None:
        """Takes note of what ``op``, executed in ``cycle``, sets to work."""
        unit = _MATRIX_UNIT.search(op.opcode)
        if op.opcode.startswith("vmatpush") and unit:
            self._busy[unit[0]] = cycle + self._latencies.push
        elif op.opcode.startswith("vmatmul") and unit:
            self._busy[unit[0]] = cycle + self._latencies.stream
            self._owed[unit[0]] += self._per_product[unit[0]]
            results, self._owed[unit[0]] = divmod(self._owed[unit[0]], 1)
            first = cycle + self._latencies.matmul
            self._results[unit[0]].extend(
                first + i * self._latencies.result for i in range(int(results))
            )
        elif not op.opcode.startswith("vpop"):
            for name, pattern in _PRODUCERS:
                if pattern.match(op.opcode):
                    self._ready[op.result] = cycle + getattr(self._latencies, name)
