"""A compiled TPU program as its schedule: what runs when, and what it moves.

Reads the text of a program that XLA has scheduled (``Compiled.as_text()``): one
instruction after the other, each with the memory space of its operands and, for the
compiler's own operations, the cycles that it estimates. Written for libtpu 0.0.50; a
format that is not understood raises ValueError.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
           "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
# The shape holds spaces only where it is a tuple.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
    """Part of an instruction's value: its size, whether it lies in HBM, its shape."""

    size_bytes: int
    in_hbm: bool
    dims: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a schedule.

    Attributes:
      name: unique in the program.
      opcode: "fusion", "custom-call", "copy-start", ...
      arrays: of the value; several if it is a tuple.
      operands: names of instructions of the same computation.
      cycles: the compiler's estimate, None where it gives none.
      scope: path of named scopes of the source, for reports.
      attributes: the rest of the line.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    cycles: int | None
    scope: str
    attributes: str

    def called(self, role: str) -> str | None:
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Computations by name, each a tuple of instructions in order."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Raises ValueError if the program is not scheduled or not understood."""
        if "is_scheduled=true" not in text.partition("\n")[0]:
            raise ValueError("the program's text has no schedule")
        computations: dict[str, list[Instruction]] = {}
        entry, current = None, None
        for line in text.splitlines():
            if start := _COMPUTATION.match(line):
                current = computations.setdefault(start.group(2), [])
                entry = start.group(2) if start.group(1) else entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (found := _INSTRUCTION.match(line)):
                current.append(_instruction(*found.groups()))
        if entry is None or not computations[entry]:
            raise ValueError("the program's text has no entry computation")
        return cls({name: tuple(lines) for name, lines in computations.items()}, entry)

    def trips(self, loop: Instruction) -> int:
        """How often a counted loop runs: the bound in its condition."""
        condition = loop.called("condition")
        bounds = [int(value) for name in self._reachable(condition or "")
                  for line in self.computations[name] if line.opcode == "constant"
                  for value in re.findall(r"^(\d+)\)", line.attributes)]
        if not bounds:
            raise ValueError(f"loop {loop.name} has no constant bound")
        return max(bounds)

    def _reachable(self, name: str) -> Iterator[str]:
        if name in self.computations:
            yield name
            for line in self.computations[name]:
                yield from self._reachable(line.called("calls") or "")


def _instruction(name: str, shape: str, opcode: str, rest: str) -> Instruction:
    arguments, _, _ = rest.partition(")")
    cycles = re.search(r'"estimated_cycles":"(\d+)"', rest)
    scope = re.search(r'op_name="([^"]*)"', rest)
    return Instruction(
        name, opcode, _arrays(shape), tuple(_OPERAND.findall(arguments)),
        int(cycles.group(1)) if cycles else None, scope.group(1) if scope else "",
        re.sub(r'"body":"[^"]*"', "", rest))  # of a kernel: most of the text


@functools.cache
def _arrays(shape: str) -> tuple[Array, ...]:
    arrays = []
    for element, dims, layout in _ARRAY.findall(shape):
        if element in _WIDTHS:
            sizes = tuple(int(n) for n in dims.split(",") if n)
            arrays.append(Array(math.prod(sizes) * _WIDTHS[element], dims=sizes,
                                in_hbm=not re.search(r"S\([1-9]\d*\)", layout)))
    return tuple(arrays)
