"""The JSON documents that ``tpuspec report`` is made from: known by their keys, and checked
before anything is drawn of them."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

_LARGEST = 1e18  # of any number
_SHOWN = 40  # characters of a refused value


@dataclasses.dataclass(frozen=True)
class Number:
    low: float | None = None
    high: float | None = None
    whole: bool = False


@dataclasses.dataclass(frozen=True)
class Maybe:
    """May be null, or not there at all."""

    spec: Any


_FACTOR, _COUNT, _LENGTH = Number(0.0), Number(0, None, True), Number(1, None, True)
_SHARE = Number(0.0, 1.000001)  # of sums in float32
_INTERVAL = {f"{name}_{end}": Maybe(_FACTOR) for name in ("alpha", "observed_speedup")
             for end in ("low", "high")}
_PASS = {"width": _LENGTH, "ms": Number(1e-9), "moved": Number(1.0), "bytes_per_s": _FACTOR,
         "share_of_copy": _FACTOR}
# By command: keys that no other document has, and what the figures take from it.
_KINDS: Mapping[str, tuple[tuple[str, ...], Any]] = {
    "measure alpha": (("impossible_tokens", "rows"), {
        "target": str, "dtype": str, "rows": [{
            "temperature": _FACTOR, "draft": str, "alpha": _SHARE, **_INTERVAL, "tokens": _COUNT,
            "prompts": _COUNT, "tokens_per_target_run": [
                {"gamma": _LENGTH, "of_these_texts": _FACTOR, "equation_1": _FACTOR}]}]}),
    "measure speedup": (("cost_method", "rows"), {
        "target": str, "draft": str, "platform": str, "dtype": str, "prompts": _COUNT,
        "repeats": _COUNT, "cost_method": str, "rows": [{
            "temperature": _FACTOR, "gamma": _LENGTH, "alpha": Maybe(_SHARE), "c": Maybe(_FACTOR),
            "widening": Number(1e-3), "tokens_per_target_run": Maybe(_FACTOR),
            "predicted_speedup": Maybe(_FACTOR), "observed_speedup": Maybe(_FACTOR),
            "plain_tokens_per_s": Maybe(_FACTOR), "speculative_tokens_per_s": Maybe(_FACTOR),
            **_INTERVAL}]}),
    "measure cost": (("batches", "source", "length"), {
        "target": str, "draft": Maybe(str), "platform": str, "dtype": str, "source": _LENGTH,
        "length": _LENGTH, "batches": [{
            "slots": _LENGTH, "c": Maybe(_FACTOR), "copy_bytes_per_s": Number(1.0),
            "product_flops_per_s": Number(1.0), "draft": Maybe(_PASS),
            "target": [{**_PASS, "widening": Number(1e-3)}]}]}),
    "verify": (("tests", "greedy", "passed"), {
        "target": str, "draft": str, "dtype": str, "gamma": _LENGTH, "samples": _LENGTH,
        "passed": bool, "family_level": _FACTOR,
        "tests": [{"kind": str, "p_value": _SHARE, "adjusted_p_value": _SHARE}],
        "frequencies": Maybe([{
            "source": _COUNT, "position": _COUNT, "outputs": _LENGTH, "ids": [{
                "id": Maybe(_COUNT), "text": Maybe(str), "target": _SHARE, "draft": _SHARE,
                "count": _COUNT}]}])}),
    "demo": (("samples", "observed_speedup", "draft_acceptance_rate"), {
        "alpha": Maybe(_SHARE), "c": Maybe(_FACTOR), "gamma": _LENGTH,
        "tokens_per_target_run": Maybe(_FACTOR), "predicted_speedup": Maybe(_FACTOR),
        "observed_speedup": Maybe(_FACTOR), "samples": [{
            "source": str, "text": str,
            "tokens": Maybe([{"id": _COUNT, "text": str, "origin": str}])}]})}
KINDS = tuple(_KINDS)


@dataclasses.dataclass(frozen=True)
class Document:
    """One of them, checked.

    Attributes:
      kind: the command that made it.
      file: its name.
    """

    kind: str
    file: str
    content: dict[str, Any]


def read(paths: Sequence[str]) -> dict[str, Document]:
    """By kind.

    Raises:
      ValueError: one is no such document, or two are of one kind; the file is named.
      OSError: one cannot be read.
    """
    found: dict[str, Document] = {}
    for path in paths:
        try:
            # NaN is what could not be measured.
            content = json.loads(pathlib.Path(path).read_bytes(), parse_constant=lambda _: None)
            kind = check(content)
        except RecursionError:
            raise ValueError(f"{path}: is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if kind in found:
            raise ValueError(f"{path}: is of tpuspec {kind}, as {found[kind].file} is; a report "
                             "takes one of each")
        found[kind] = Document(kind, pathlib.Path(path).name, content)
    return found


def check(content: Any) -> str:
    """Its kind. What may be absent and is becomes null.

    Raises:
      ValueError: it is no such document.
    """
    if isinstance(content, dict):
        for kind, (keys, spec) in _KINDS.items():
            if set(keys) <= set(content):
                _check("", content, spec)
                return kind
    raise ValueError("is no JSON document of tpuspec " + ", ".join(KINDS[:-1]) + f" or {KINDS[-1]}")


def _check(where: str, value: Any, spec: Any) -> None:
    if isinstance(spec, Maybe):
        if value is not None:
            _check(where, value, spec.spec)
    elif isinstance(spec, Number):
        kinds = (int,) if spec.whole else (int, float)
        _require(isinstance(value, kinds) and not isinstance(value, bool), where, value,
                 "an integer" if spec.whole else "a number")
        _require(abs(value) <= _LARGEST, where, value, f"within {_LARGEST:g}")
        if spec.low is not None:
            _require(value >= spec.low, where, value, f"at least {spec.low:g}")
        if spec.high is not None:
            _require(value <= spec.high, where, value, f"at most {spec.high:.0f}")
    elif isinstance(spec, list):
        _require(isinstance(value, list), where, value, "a list")
        for i, one in enumerate(value):
            _check(f"{where}[{i}]", one, spec[0])
    elif isinstance(spec, dict):
        _require(isinstance(value, dict), where, value, "an object")
        for name, inner in spec.items():
            _check(f"{where}.{name}".lstrip("."), value.setdefault(name, None), inner)
    else:
        name = {str: "a string", bool: "true or false"}[spec]
        _require(isinstance(value, spec), where, value, name)


def _require(holds: bool, where: str, value: Any, what: str) -> None:
    if not holds:
        raise ValueError(f"{where} must be {what}, got {json.dumps(value)[:_SHOWN]}")
