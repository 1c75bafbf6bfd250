"""Executes the scalar instructions of a compiled kernel.

They compute grid indices, block addresses, predicates and loop ends: what decides
which bundles and which copies of a kernel are executed. Values that come from vectors
are unknown (None), and so is all that is computed from them.
"""

import itertools
import operator
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from llo_dumps import Op, Program

Value = Any  # int (32 bits, unsigned), bool of a predicate, [quotient, remainder], None

_INTEGER: dict[str, Callable[[int, int], int]] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda x, n: x << n if n < 32 else 0,
    "sshrl": lambda x, n: x >> n if n < 32 else 0,
    "sshra": lambda x, n: x >> min(n, 31),
    "smin": min,
    "smax": max,
}
_FLOAT: dict[str, Callable[[float, float], float]] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "smin": min,
    "smax": max,
}
_COMPARE = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_PREDICATES: dict[str, Callable[..., bool]] = {
    "por": lambda a, b: a or b,
    "pand": lambda a, b: a and b,
    "pnand": lambda a, b: not (a and b),
    "pnor": lambda a, b: not (a or b),
    "pxor": operator.ne,
    "pneg": operator.not_,
    "pmov": bool,
}
_WORD = 1 << 32
_ALLOCATION_WORDS = 1 << 16  # apart in the made-up address space; more than SMEM has


def _signed(value: int) -> int:
    return value - _WORD if value >= _WORD // 2 else value


def _float(value: int) -> float:
    return struct.unpack("<f", struct.pack("<I", value))[0]


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def words(values: np.ndarray) -> dict[int, int]:
    """Where the elements of a prefetched operand lie in SMEM: rows of 128 words.

    Raises:
      ValueError: for shapes of which the layout is not known here.
    """
    if values.dtype not in (np.int32, np.float32):
        raise ValueError(f"scalars must be int32 or float32, got {values.dtype}")
    rows = np.atleast_2d(values)
    if rows.ndim > 2 or (rows.shape[0] > 1 and rows.shape[1] > 128):
        raise ValueError(f"scalars must be [n] or [rows, at most 128], got {values.shape}")
    return {
        row * 128 + column: int(word)
        for (row, column), word in np.ndenumerate(np.ascontiguousarray(rows).view(np.uint32))
    }


class ScalarCore:
    """Registers and SMEM of one core.

    Args:
      program: the kernel.
      core: number of the core.
      scalars: values of the kernel's scalar-prefetch operands, by their number.
    """

    def __init__(self, program: Program, core: int, scalars: Mapping[int, np.ndarray]):
        self.values: dict[str, Value] = {}
        self._defined: dict[str, int] = {}
        self._time = 0
        self._bases: dict[str, int] = {}
        self._scalars = scalars
        self.smem: dict[int, Value] = {}
        for name, tag in program.smem.items():
            base = self._base(name)
            operand = re.fullmatch(r"prefetched SMEM operand (\d+)", tag)
            if tag.endswith("core index"):
                self.smem[base] = core
            elif tag.endswith(("chip ID", "null")):
                self.smem[base] = 0
            elif operand and int(operand[1]) in scalars:
                for offset, word in words(scalars[int(operand[1])]).items():
                    self.smem[base + offset] = word

    def _base(self, allocation: str) -> int:
        return self._bases.setdefault(allocation, (len(self._bases) + 1) * _ALLOCATION_WORDS)

    def read(self, operand: str) -> Value:
        """Value of an operand: a register, a number, or an address."""
        if operand.startswith("%"):
            return self.values.get(operand[1:])
        if operand.startswith("["):
            return self.address(operand)
        try:
            return int(operand) % _WORD
        except ValueError:
            return None

    def address(self, operand: str) -> Value:
        """``[#allocation1 + %s2 + $0x3]``, with or without ``smem:`` around it."""
        total = 0
        for part in operand.removeprefix("[smem:").strip("[]").split(" + "):
            if part.startswith("#"):
                value = self._base(part[1:])
            elif part.startswith("$"):
                value = int(part[1:], 16)
            else:
                value = self.read(part)
            if value is None:
                return None
            total += value
        return total % _WORD

    def executes(self, op: Op) -> bool | None:
        """Whether the predicate of ``op`` holds; None where it is unknown."""
        if op.predicate is None:
            return True
        value = self.values.get(op.predicate)
        return None if value is None else bool(value) != op.negated

    def step(self, op: Op, executed: bool | None) -> None:
        """Executes one scalar instruction, or what it does where its predicate fails."""
        if executed is None and op.otherwise is not None:
            self._set(op.result, None)
        elif executed is not False:  # in a place that is only reached if it holds
            self._set(op.result, self._evaluate(op))
        elif op.otherwise is not None:
            self._set(op.result, self.read(op.otherwise))

    def _set(self, name: str, value: Value) -> None:
        self._time += 1
        self._defined[name] = self._time
        self.values[name] = value

    def _evaluate(self, op: Op) -> Value:
        family, _, suffix = op.opcode.partition(".")
        if family == "sphi":  # of the paths that lead here, the one that was taken last
            names = [operand[1:] for operand in op.operands]
            return self.values.get(max(names, key=lambda name: self._defined.get(name, 0)))
        if family == "inlined_call_operand":  # one element comes in a register
            (number,) = (int(o[7:]) for o in op.operands if o.startswith("index: "))
            given = suffix == "" and number in self._scalars
            return words(self._scalars[number])[0] if given else None
        if family == "sst":
            address = self.address(op.operands[0])
            if address is not None:
                self.smem[address] = self.read(op.operands[1])
            return None
        if family == "sld":
            return self.smem.get(self.address(op.operands[0]))
        values = [self.read(operand) for operand in op.operands]
        if op.opcode == "spop.drf":
            return values[0].pop(0) if values[0] else None
        if family == "scalar_select":
            return None if values[0] is None else values[1 if values[0] else 2]
        if family in _PREDICATES:  # known where an unknown value makes no difference
            choices = [(False, True) if value is None else (value,) for value in values]
            outcomes = {bool(_PREDICATES[family](*c)) for c in itertools.product(*choices)}
            return outcomes.pop() if len(outcomes) == 1 else None
        if any(value is None for value in values) or not values:
            return None
        if family == "scmp":
            relation, kind = suffix.split(".")[:2]
            if kind != "u32":
                values = [_signed(v) if kind == "s32" else _float(v) for v in values]
            return _COMPARE[relation](*values)
        if family in ("smov", "int_to_ptr"):
            return values[0]
        if family == "scalar_lea":
            return sum(values) % _WORD
        if family == "sdivrem" and values[1]:
            return list(divmod(*values))
        if op.opcode == "scvt.s32.f32":
            return _bits(_signed(values[0]))
        if suffix == "f32" and family in _FLOAT:
            return _bits(_FLOAT[family](*map(_float, values)))
        if suffix in ("s32", "u32") and family in _INTEGER:
            if suffix == "s32":
                values = [_signed(v) for v in values]
            return _INTEGER[family](*values) % _WORD
        return None
