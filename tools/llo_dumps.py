"""Reads what the TPU compiler writes of a kernel: its VLIW bundles and its VMEM.

The formats are the compiler's own and not documented; what is read here was checked
with the libtpu that requirements-test.lock pins.
"""

import dataclasses
import json
import pathlib
import re


@dataclasses.dataclass(slots=True)
class Op:
    """One instruction of a bundle.

    Attributes:
      opcode: with its suffixes, for example ``vmatmul.bf16.gmra.mxu0``.
      result: name of the value it defines, or of the instruction.
      operands: names (``%s12``), numbers, addresses (``[#allocation1 + %s2]``) as text.
      predicate: value that decides whether it executes, if any.
      negated: it executes where the predicate is false.
      otherwise: operand that is the result where it does not execute, if any.
    """

    opcode: str
    result: str
    operands: tuple[str, ...] = ()
    predicate: str | None = None
    negated: bool = False
    otherwise: str | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled kernel.

    Attributes:
      bundles: the instructions, by address.
      regions: first bundle of each numbered region; branches go to these.
      smem: what the compiler says of each allocation in SMEM, by its name.
      vmem_bytes: VMEM in use, spilled registers included.
      spill_bytes: of these, spilled vector registers.
    """

    bundles: list[list[Op]]
    regions: dict[int, int]
    smem: dict[str, str]
    vmem_bytes: int
    spill_bytes: int


# A value is %s12_s3 where its register has been chosen: %s12 is its name.
_NAME = re.compile(r"%([a-z]*\d+)(?:_[a-z]+\d+)?")
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2},?\s*)*:[\s>]*\{")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_OP = re.compile(r"%([a-z]*\d+)(?:_[a-z]+\d+)? = ([a-z][\w.]*)\s*(.*)", re.DOTALL)
_SMEM = re.compile(r"#(allocation\d+) \[.*space=smem,.*tag = '(.*)'\]")
_ORIGIN = re.compile(r"(?<=\w) \[#allocation\d+\]")  # what an address was made from
_PREDICATE = re.compile(r"\((!?)%(p\d+)(?:_p\d+)?(?:, ([^()]*))?\),?")


def parse_op(text: str) -> Op:
    """Reads one instruction, without comments."""
    match = _OP.fullmatch(text.strip())
    if not match:
        raise ValueError(f"not an instruction: {text!r}")
    name, opcode, rest = match.groups()
    op = Op(opcode, name)
    predicate = _PREDICATE.search(rest)
    if predicate:
        op.negated = bool(predicate[1])
        op.predicate = predicate[2]
        op.otherwise = predicate[3] and _NAME.sub(r"%\1", predicate[3].strip())
        rest = rest[: predicate.start()] + "," + rest[predicate.end() :]
    rest = _NAME.sub(r"%\1", rest.replace("[thread:$0]", "").replace("]] %", "]], %"))
    rest = _ORIGIN.sub("", rest)
    op.operands = tuple(part.strip() for part in rest.split(",") if part.strip())
    return op


def parse_bundles(text: str) -> tuple[list[list[Op]], dict[int, int]]:
    """Reads a ``final_bundles`` dump: the bundles and where each region starts."""
    bundles: list[list[Op]] = []
    regions: dict[int, int] = {}
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if _BUNDLE.match(line)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        bundle = "\n".join(lines[start:end])
        for number in _REGION.findall(bundle):
            regions.setdefault(int(number), len(bundles))
        body = _COMMENT.sub("", bundle)
        body = body[body.index("{") + 1 : body.rindex("}")]
        bundles.append([parse_op(op) for op in body.split(";;") if op.strip()])
    return bundles, regions


def parse_vmem_report(text: str, instruction: str) -> tuple[int, int]:
    """Bytes of VMEM that an instruction takes, and of these spilled registers."""
    data, _ = json.JSONDecoder().raw_decode(text, text.index("{", text.index("DATA =")))
    breakdown = data["hlo_breakdowns"][instruction]
    spills = sum(
        allocation["size"]
        for block in breakdown["blocks"]
        for allocation in block.get("allocations", ())
        if allocation.get("tag") == "SPILL"
    )
    return breakdown["total_size"], spills


def read_program(folder: pathlib.Path, kernel: str) -> Program:
    """Reads the one compiled call of ``kernel`` from the compiler's dumps.

    Raises:
      ValueError: if the program does not have exactly one call of this name.
    """
    name = re.compile(rf"\d+-({re.escape(kernel)}(?:\.\d+)?)-\d+-final_bundles\.txt")
    found = [(path, m[1]) for path in folder.iterdir() if (m := name.fullmatch(path.name))]
    if len(found) != 1:
        raise ValueError(f"expected one call of the kernel {kernel!r}, found {len(found)}")
    (path, instruction), prefix = found[0], found[0][0].name.partition("-")[0]
    (allocations,) = folder.glob(f"{prefix}-{instruction}-*-pre-finalize-*.txt")
    (report,) = folder.glob("*-TLP-*-vmem_report.html")
    return Program(
        *parse_bundles(path.read_text()),
        dict(_SMEM.findall(allocations.read_text())),
        *parse_vmem_report(report.read_text(), instruction),
    )
