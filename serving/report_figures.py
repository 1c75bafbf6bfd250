"""Figures 1 to 3 of a report: roofline, token strips, sampled frequencies."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tpuspec import theory
from tpuspec.chips import CHIPS
from tpuspec.serving.report_documents import Document
from tpuspec.serving.report_svg import Axis, Chart, decades, escape, number, table

Documents = Mapping[str, Document]
_WIDEST = 1024  # positions of a pass in the roofline
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0}  # of a parameter
_MOST_BARS = 8
# Name, sign: colour is not the only difference.
ORIGINS = {"accepted_draft": ("accepted draft", "✓"), "correction": ("correction", "↻"),
           "bonus": ("bonus", "+"), "plain": ("plain", "·")}


class LeftOutError(Exception):
    """Why a figure cannot be drawn from these documents."""


def needed(documents: Documents, kind: str) -> dict[str, Any]:
    if kind not in documents:
        raise LeftOutError(f"it takes a document of tpuspec {kind} --json")
    return documents[kind].content


@dataclasses.dataclass(frozen=True)
class _Measured:
    bandwidth: float
    flops: float


def roofline(documents: Documents) -> str:
    """Figure 1: time of a target pass by its positions, measured and idealized."""
    cost = needed(documents, "measure cost")
    if cost["dtype"] not in _BYTES:
        raise LeftOutError(f"the bytes of a parameter in {cost['dtype']} are not known")
    batches = [batch for batch in cost["batches"] if batch["target"]]
    if not batches:
        raise LeftOutError("the document has no passes of a target")
    return "".join(_roofline(cost, number, batch) for number, batch in enumerate(batches))


def _roofline(cost: dict[str, Any], count: int, batch: dict[str, Any]) -> str:
    passes, slots, draft = batch["target"], batch["slots"], batch["draft"]
    size = _BYTES[cost["dtype"]]
    parameters = passes[0]["moved"] / size
    here = f"{cost['platform']} here"

    def ms(machine: theory.Machine, positions: int, bytes_: float, utilization: float) -> float:
        # Weights are read once, however many slots share the pass.
        return 1e3 * theory.roofline(parameters, positions * slots, machine,
                                     bytes_per_parameter=bytes_, utilization=utilization).seconds

    machines: list[tuple[str, theory.Machine, float, float, str]] = [
        (here, _Measured(batch["copy_bytes_per_s"], batch["product_flops_per_s"]), size, 1.0, "s1")]
    machines += [(name, chip, 2.0, 0.5, "quiet") for name, chip in CHIPS.items()]
    wide = [2**i for i in range(int(math.log2(_WIDEST)) + 1)]
    curves = {name: [(float(n), ms(machine, n, *options)) for n in wide]
              for name, machine, *options, _ in machines}
    times = [y for points in curves.values() for _, y in points] + [one["ms"] for one in passes]
    if draft is not None:
        times.append(draft["ms"])
    low, high, ticks = decades(min(times), max(times))
    chart = Chart(
        f"roofline{count}", Axis("positions of one pass", 1, _WIDEST, wide[::2], log=True),
        Axis("milliseconds", low, high, ticks, log=True), title="Time of a target pass",
        summary=f"Measured passes of {cost['target']} at {slots} at once, beside the idealized "
                "time of this machine and of TPU chips; the table has the numbers.")
    for name, _, _, _, kind in machines:
        chart.line(curves[name], kind)
    chart.labels(_WIDEST, [(curves[name][-1][1], name, kind) for name, *_, kind in machines])
    for one in passes:
        chart.dot(one["width"], one["ms"], "s1", "circle",
                  title=f"measured: {one['width']} positions, {one['ms']:.3f} ms")
    if draft is not None:
        chart.dot(draft["width"], draft["ms"], "s2", "square",
                  title=f"measured: a draft pass of {draft['width']}, {draft['ms']:.3f} ms",
                  label="draft")
    rows = [[f"measured, G = {one['width']}", number(one["ms"], ".4g"),
             number(one["widening"]), number(1e-6 * one["moved"], ".1f"),
             number(1e-9 * one["bytes_per_s"], ".1f")] for one in passes]
    if draft is not None:
        rows.append(["measured, draft", number(draft["ms"], ".4g"), "–",
                     number(1e-6 * draft["moved"], ".1f"),
                     number(1e-9 * draft["bytes_per_s"], ".1f")])
    rows += [[f"idealized, {name}, G = 1", number(curves[name][0][1], ".3g"), "–",
              number(1e-6 * parameters * bytes_, ".1f"), number(1e-9 * machine.bandwidth, ".1f")]
             for name, machine, bytes_, _, _ in machines]
    c = "not known" if batch["c"] is None else f"{batch['c']:.4f}"
    return (
        f"<p>{escape(cost['target'])}, {slots} at once, source {cost['source']}, length "
        f"{cost['length']}, {escape(cost['dtype'])} on {escape(cost['platform'])}; c = {c}. "
        "<b>Measured</b>: circles (target) and square (draft). <b>Idealized</b>, not measured: "
        "lines; for this machine by what a copy and a matrix product reached on it, for TPU chips "
        "by published figures, bfloat16, at half of the peak.</p>" + chart.svg()
        + table("passes", ["pass", "ms", "T(G)/T(1)", "MB", "GB/s"], rows)
        + "<p class=\"note\">Lines take all that a pass of one position moves for weights, which "
        "is an estimate: caches are among it. A circle below the line means that weights came "
        "from the processor's own caches, faster than a copy.</p>")


def runs(tokens: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Tokens by target run, which ends with the target's own token; the last may be cut."""
    found: list[list[dict[str, Any]]] = []
    ended = True
    for token in tokens:
        if ended:
            found.append([])
        found[-1].append(token)
        ended = token["origin"] != "accepted_draft"
    return found


def strip(documents: Documents) -> str:
    """Figure 2: where each token of some outputs came from."""
    demo = needed(documents, "demo")
    samples = [one for one in demo["samples"] if one["tokens"]]
    if not samples:
        raise LeftOutError("the document of tpuspec demo does not say where its tokens came "
                           "from; one of this version does")
    parts, rows = [], []
    for sample in samples:
        groups = runs(sample["tokens"])
        count = len(sample["tokens"])
        shown = " ".join(  # lines break between runs
            f'<span class="run" role="group" aria-label="target run {at}">'
            + "".join(_token(token) for token in group) + "</span>"
            for at, group in enumerate(groups, 1))
        parts.append(f"<p class=\"source\">{escape(sample['source'])}<br><b>{len(groups)} target "
                     f"runs for {count} tokens</b></p><p class=\"strip\">{shown}</p>")
        rows.append([sample["source"], sample["text"], str(count), str(len(groups)),
                     *(str(sum(token["origin"] == origin for token in sample["tokens"]))
                       for origin in ("accepted_draft", "correction", "bonus"))])
    legend = " ".join(f'<span class="t {name}"><i>{sign}</i>{said}</span>'
                      for name, (said, sign) in ORIGINS.items() if name != "plain")
    return (
        f"<p><b>Measured</b>, by tpuspec demo with γ = {demo['gamma']}. A frame is one run of the "
        f"target, which plain decoding takes for every token. {legend} "
        f'<span class="t rejected"><i>✕</i></span> a draft was rejected here; which one, the '
        "stream does not say.</p>" + "".join(parts)
        + table("outputs", ["source", "output", "tokens", "target runs", "accepted",
                            "corrections", "bonus"], rows))


def _token(token: dict[str, Any]) -> str:
    origin = token["origin"] if token["origin"] in ORIGINS else "plain"
    said, sign = ORIGINS[origin]
    text = token["text"].strip() or f"id {token['id']}"
    rejected = '<span class="t rejected"><i>✕</i></span>' if origin == "correction" else ""
    return (f'{rejected}<span class="t {origin}" title="{said}, id {token["id"]}"><i '
            f'aria-label="{said}">{sign}</i>{escape(text)}</span>')


def frequencies(documents: Documents) -> str:
    """Figure 3: how often ids came, on the target's probabilities."""
    verify = needed(documents, "verify")
    if not verify.get("frequencies"):
        raise LeftOutError("the document of tpuspec verify has no frequencies; one of this "
                           "version does")
    least = min((test["adjusted_p_value"] for test in verify["tests"]), default=None)
    verdict = "passed" if verify["passed"] else "FAILED"
    parts, rows = [], []
    for count, one in enumerate(verify["frequencies"]):
        parts.append(_bars(count, one))
        rows += [[f"source {one['source']}, position {one['position']}: {_name(cell)}",
                  number(cell["target"], ".4f"), number(cell["draft"], ".4f"),
                  number(cell["count"] / one["outputs"], ".4f"), str(cell["count"])]
                 for cell in one["ids"]]
    return (
        f"<p><b>Measured</b>, by tpuspec verify: outputs of speculative sampling with γ = "
        f"{verify['gamma']} under top-k 3, {escape(verify['target'])} with "
        f"{escape(verify['draft'])}, {escape(verify['dtype'])}. Filled bars: the target's exact "
        "probability. Outlined, narrow: outputs of the draft alone. Strokes: how often an id came "
        "(with 95 % of what chance makes of the exact probability as a thin line). "
        f"All {len(verify['tests'])} tests: <b>{verdict}</b>, smallest adjusted p-value "
        f"{number(least, '.2g')}.</p><div class=\"bars\">" + "".join(parts) + "</div>"
        + table("frequencies", ["id", "target", "draft", "frequency", "count"], rows))


def _name(cell: dict[str, Any]) -> str:
    if cell["id"] is None:
        return "ended before"
    return (cell["text"] or "").strip() or f"id {cell['id']}"


def _bars(count: int, one: dict[str, Any]) -> str:
    cells = one["ids"][:_MOST_BARS]
    left = len(one["ids"]) - len(cells)
    title = f"Source {one['source']}, position {one['position']}"
    chart = Chart(f"bars{count}", Axis(title + (f" ({left} rarer ids are in the table)" if left
                                                else ""), 0, len(cells) + 0.01, ()),
                  Axis("probability", 0, 1, (0, 0.25, 0.5, 0.75, 1)), title=title,
                  summary="; ".join(f"{_name(cell)}: target {cell['target']:.3f}, came "
                                    f"{cell['count'] / one['outputs']:.3f}" for cell in cells),
                  width=420, height=230, margin=14)
    for at, cell in enumerate(cells):
        middle, p, seen = at + 0.5, cell["target"], cell["count"] / one["outputs"]
        chart.bar(middle, p, 26, "s1")
        chart.bar(middle, cell["draft"], 10, "outline")
        spread = 1.96 * math.sqrt(max(0.0, p * (1 - p)) / one["outputs"])
        chart.line([(middle, p - spread), (middle, p + spread)], "whisker ink")
        chart.tick(middle, seen, 34, f"{_name(cell)}: {cell['count']} of {one['outputs']}")
        x, y = chart.at(middle, 0)
        name = _name(cell)
        chart.text(x, y + 16, name if len(name) <= 8 else name[:7] + "…", "tick middle")
    return chart.svg()
