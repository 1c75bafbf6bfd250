"""Static estimate of a compiled TPU program's time, from its schedule.

Two resources: the cores, which run one instruction after the other for the cycles that
the compiler estimates, and the memory, which serves copies and the operands that lie in
HBM in the order in which they are asked for, at the published bandwidth. Kernels, of
which the compiler knows nothing, take the time that ``tools/kernel_report.py`` finds for
their kind. Of branches, which options of requests choose, the fastest counts. No launch,
no refresh of the memory, no power limits: an estimate, not a measurement, and rather a
low one.
"""

import collections
import dataclasses

from tpuspec.chips import Chip
from tpuspec.hlo_schedule import Instruction, Schedule

# An operation that the compiler gives no cycles, such as a gather: as its smallest ones.
_SMALLEST_CYCLES = 600
# Over the bytes that it moves, an attention kernel takes this long, a sampling kernel this
# for each row of logits: of the stored figures of the kernel report (v4).
ATTENTION_SECONDS = 1.0e-6
SAMPLING_ROW_SECONDS = 0.35e-6
# The decoder kernel's core is busy for this many cycles with a byte of weights or of caches,
# which may be longer than the byte takes to come: of the stored figures too (1 and 8 slots;
# v6e with 8 is 10 % slower).
WEIGHT_CYCLES, CACHE_CYCLES = 0.8e-3, 1.25e-3
_CACHE_AXES = 5
_SAMPLING = ("rejection_sample", "sample_tokens")
# A collective is bound by its hops for what a step exchanges: an assumption.
COLLECTIVE_SECONDS = 2.0e-6
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_LOGITS_ROW_BYTES = 4 * 32128


@dataclasses.dataclass
class Estimate:
    """Of one run of a program.

    Attributes:
      seconds: until its end.
      bytes: moved from and to HBM.
      collectives: how many the program runs.
      by_scope: seconds of the cores by the named scope and operation they run for.
    """

    seconds: float = 0.0
    bytes: float = 0.0
    collectives: int = 0
    by_scope: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float))

    def add(self, other: "Estimate", times: int = 1) -> None:
        self.bytes += times * other.bytes
        self.collectives += times * other.collectives
        for scope, seconds in other.by_scope.items():
            self.by_scope[scope] += times * seconds


def estimate(schedule: Schedule, chip: Chip) -> Estimate:
    """Raises ValueError on a loop without a constant bound."""
    return _run(schedule, schedule.entry, chip)


def _run(schedule: Schedule, computation: str, chip: Chip) -> Estimate:
    total = Estimate()
    now, memory_free = 0.0, 0.0
    copied: dict[str, float] = {}  # when a copy's data are there
    by_name = {line.name: line for line in schedule.computations[computation]}
    for line in by_name.values():
        if line.opcode in ("copy-start", "slice-start"):
            size = min(a.size_bytes for a in line.arrays[:-1])  # the last is a flag
            memory_free = max(memory_free, now) + size / chip.bandwidth
            copied[line.name] = memory_free
            total.bytes += float(size)
            continue
        if line.opcode in ("copy-done", "slice-done"):
            now = max(now, copied.get(line.operands[0], now))
            continue
        if line.opcode in ("while", "conditional", "call"):
            inner = _called(schedule, line, chip)
            total.add(inner)
            now = memory_free = max(now, memory_free) + inner.seconds
            continue
        busy, moved = _cost(line, by_name, chip)
        if not busy:
            continue
        if line.opcode.startswith(_COLLECTIVES):
            total.collectives += 1
        memory_free = max(memory_free, now) + moved / chip.bandwidth
        started, now = now, max(now + busy, memory_free if moved else 0.0)
        total.bytes += moved
        total.by_scope[_place(line)] += now - started
    total.seconds = max(now, memory_free)
    return total


def _called(schedule: Schedule, line: Instruction, chip: Chip) -> Estimate:
    total = Estimate()
    if line.opcode == "while":
        times = schedule.trips(line)
        body = _run(schedule, line.called("body") or "", chip)
        total.add(body, times)
        total.seconds = times * body.seconds
    elif line.opcode == "call":
        return _run(schedule, line.called("to_apply") or "", chip)
    else:  # the fastest branch: of options that no request asks for
        names = [name for name in schedule.computations if f"%{name}" in line.attributes
                 and name not in line.operands]
        return min((_run(schedule, name, chip) for name in names),
                   key=lambda branch: branch.seconds, default=total)
    return total


def _cost(line: Instruction, by_name: dict[str, Instruction], chip: Chip) -> tuple[float, float]:
    """Seconds of the cores and bytes from and to HBM."""
    operands = [a for name in line.operands if name in by_name for a in by_name[name].arrays]
    in_hbm = [a.size_bytes for a in operands if a.in_hbm]
    if line.opcode == "custom-call":
        if "tpu_custom_call" not in line.attributes:
            return 0.0, 0.0
        moved = float(sum(in_hbm))
        if line.name.startswith(_SAMPLING):
            rows = max(sum(a.size_bytes for a in operands) / _LOGITS_ROW_BYTES, 1.0)
            return ATTENTION_SECONDS + rows * SAMPLING_ROW_SECONDS, moved
        if line.name.startswith("decoder_pass"):
            caches = sum(a.size_bytes for a in operands if len(a.dims) == _CACHE_AXES)
            work = WEIGHT_CYCLES * (moved - caches) + CACHE_CYCLES * caches
            return ATTENTION_SECONDS + max(work / chip.clock_hz, moved / chip.bandwidth), moved
        return ATTENTION_SECONDS + moved / chip.bandwidth, moved
    if line.opcode.startswith(_COLLECTIVES) and not line.opcode.endswith("-done"):
        return COLLECTIVE_SECONDS, 0.0
    cycles = line.cycles
    if cycles is None:
        if line.opcode not in ("fusion", "copy", "dynamic-update-slice", "gather", "scatter"):
            return 0.0, 0.0
        cycles = _SMALLEST_CYCLES
    busy = cycles / chip.clock_hz
    # Operands may be read in part (rows of an embedding): never more than fits the time.
    return busy, min(float(sum(in_hbm)), busy * chip.bandwidth)


def _place(line: Instruction) -> str:
    """"feed_forward/dot_general" of "jit(step)/while/body/feed_forward/cond/.../dot_general"."""
    if line.opcode == "custom-call":
        return line.name.partition(".")[0]
    parts = [p for p in line.scope.split("/") if p and "(" not in p
             and p not in ("while", "body", "cond", "eval_jaxpr") and "branch" not in p]
    return "/".join(parts[-2:]) or line.opcode
