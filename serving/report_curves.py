"""Figures 4 and 5 of a report: tokens per target run against α, speed-up and operations
against γ. The page's script draws them again when a slider moves."""

import collections
import dataclasses
from typing import Any

from tpuspec import theory
from tpuspec.serving.report_figures import Documents, LeftOutError, runs
from tpuspec.serving.report_svg import Axis, Chart, number, table

LONGEST = 16  # draft length of figure 5
_CURVES = {1: ("s1", "circle"), 3: ("s2", "triangle"), 5: ("s3", "square"), 7: ("s4", "diamond")}
_LOW, _HIGH = 0.125, 32.0  # factors of figure 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Where the curves begin: figures of the documents, and which these are.

    Attributes:
      widening: T(γ+1)/T(1) measured, by γ.
      slope: by which it grows with γ, a fit through 1 at γ = 0; 0 where it was not measured.
      c_hat: operations of a draft pass over those of a target pass, by what they read.
    """

    alpha: float
    gamma: int
    c: float | None
    c_hat: float | None
    widening: dict[int, float]
    said: str

    @property
    def slope(self) -> float:
        over = sum(gamma * (width - 1) for gamma, width in self.widening.items())
        return max(0.0, over / sum(gamma**2 for gamma in self.widening)) if over else 0.0

    def width(self, gamma: int) -> float:
        """As measured, straight between, and by the slope beyond."""
        known = {0: 1.0, **self.widening}
        if gamma in known:
            return known[gamma]
        low, high = max(g for g in known if g < gamma), [g for g in known if g > gamma]
        slope = (known[min(high)] - known[low]) / (min(high) - low) if high else self.slope
        return known[low] + slope * (gamma - low)

    def to_json(self) -> dict[str, Any]:
        """For the script."""
        return {"alpha": self.alpha, "gamma": self.gamma, "c": self.c or 0.0, "slope": self.slope,
                "c_hat": self.c_hat, "longest": LONGEST,
                "widening": [self.width(g) for g in range(LONGEST + 1)] if self.widening else None}


def setting(documents: Documents) -> Setting | None:
    """None where no document has α."""
    content = {kind: document.content for kind, document in documents.items()}
    alpha, gamma, c, said = None, 3, None, ""
    widening: dict[int, float] = {}
    c_hat = None
    rows = [row for row in content.get("measure speedup", {}).get("rows", ())
            if row["alpha"] is not None]
    if rows:
        coldest = min(row["temperature"] for row in rows)
        of = max((row for row in rows if row["temperature"] == coldest),
                 key=lambda row: row["observed_speedup"] or 0.0)
        alpha, gamma, c = of["alpha"], of["gamma"], of["c"]
        widening = {row["gamma"]: row["widening"] for row in rows}
        said = f"α and c of measure speedup at temperature {coldest:g}, γ = {gamma}"
    elif (demo := content.get("demo")) is not None and demo["alpha"] is not None:
        alpha, gamma, c, said = demo["alpha"], demo["gamma"], demo["c"], "α and c of demo"
    elif content.get("measure alpha", {}).get("rows"):
        row = content["measure alpha"]["rows"][0]
        alpha = row["alpha"]
        said = f"α of measure alpha for {row['draft']} at temperature {row['temperature']:g}"
    for batch in content.get("measure cost", {}).get("batches", ())[:1]:
        if batch["c"] is not None and batch["draft"] is not None and batch["target"]:
            c, c_hat = batch["c"], batch["draft"]["moved"] / batch["target"][0]["moved"]
        widening = {one["width"] - 1: one["widening"] for one in batch["target"]
                    if one["width"] > 1} or widening
        said += f"; c and widening of measure cost at {batch['slots']} at once"
    if alpha is None:
        return None
    return Setting(alpha=min(1.0, alpha), gamma=gamma, c=c, c_hat=c_hat, widening=widening,
                   said=said)


def _points(documents: Documents) -> list[tuple[int, float, float, tuple[float, float] | None,
                                                bool, str]]:
    """γ, α, tokens per run, α's interval, whether runs were counted, and what it is of."""
    found = []
    for kind, document in documents.items():
        if kind == "measure alpha":
            found += [(run["gamma"], min(1.0, row["alpha"]), run["of_these_texts"], _across(row),
                       False, f"{row['draft']}, temperature {row['temperature']:g}")
                      for row in document.content["rows"] for run in row["tokens_per_target_run"]]
        elif kind in ("measure speedup", "demo"):
            rows = document.content.get("rows", [document.content])
            found += [(row["gamma"], min(1.0, row["alpha"]), row["tokens_per_target_run"],
                       _across(row), True, kind + (f", temperature {row['temperature']:g}"
                                                   if "temperature" in row else ""))
                      for row in rows
                      if None not in (row["alpha"], row["tokens_per_target_run"])]
    return found


def _across(row: dict[str, Any]) -> tuple[float, float] | None:
    low, high = row.get("alpha_low"), row.get("alpha_high")
    return None if low is None or high is None else (low, high)


def tokens(documents: Documents) -> str:
    """Figure 4: Eq. (1) and what was seen, and how many tokens runs give."""
    start = setting(documents)
    if start is None:
        raise LeftOutError("no document has α: measure alpha, measure speedup or demo")
    most = max(7, start.gamma)
    chart = Chart("tokens", Axis("α", 0, 1, (0, 0.2, 0.4, 0.6, 0.8, 1)),
                  Axis("tokens per target run", 1, most + 1, range(1, most + 2)),
                  title="Tokens per target run against α",
                  summary="Eq. (1) for draft lengths 1, 3, 5 and 7, and measured points; the "
                          "table has the numbers.")
    steps = [i / 50 for i in range(51)]
    for gamma, (kind, _) in _CURVES.items():
        chart.line([(a, theory.expected_tokens(a, gamma)) for a in steps], kind, f"γ = {gamma}")
    chart.line([(a, theory.expected_tokens(a, start.gamma)) for a in steps], "ink", name="chosen")
    points = _points(documents)
    for gamma, alpha, count, across, counted, of in points:
        kind, shape = _CURVES.get(gamma, ("ink", "circle"))
        chart.dot(alpha, count, kind if counted else f"{kind} hollow", shape, across=across,
                  title=f"{of}: γ = {gamma}, α = {alpha:.3f}, {count:.2f} tokens a run")
    at = theory.expected_tokens(start.alpha, start.gamma)
    chart.dot(start.alpha, at, "ink", "ring", title="expected at the sliders", name="at")
    rows = [[of, str(gamma), number(alpha, ".3f"), number(count),
             number(theory.expected_tokens(alpha, gamma)),
             "counted in runs" if counted else "of texts, without a run"]
            for gamma, alpha, count, _, counted, of in points]
    return (
        "<p>Lines: <b>expected</b> by Eq. (1), which takes acceptances as independent; the ring "
        "is at the sliders. Marks: <b>measured</b>, filled where target runs were counted, hollow "
        "where they follow from texts that the target wrote alone; circle γ = 1 or another, "
        "triangle 3, square 5, diamond 7, with 95 % intervals of α. Measured ones lie lower where "
        "ends of short texts cut runs.</p>" + chart.svg()
        + table("measured and expected", ["of", "γ", "α", "measured", "Eq. (1)", "kind"], rows)
        + _run_lengths(documents, start, most))


def _run_lengths(documents: Documents, start: Setting, most: int) -> str:
    shares = theory.run_length_distribution(start.alpha, start.gamma)
    shares += [0.0] * (most + 1 - len(shares))
    seen = _seen(documents)
    total = sum(seen.values())
    chart = Chart("runs", Axis("tokens of a run", 0.4, most + 1.6, range(1, most + 2)),
                  Axis("share of runs", 0, 1, (0, 0.25, 0.5, 0.75, 1)), height=250, margin=14,
                  title="How many tokens a run gives",
                  summary="Expected shares at the sliders; the table has the numbers.")
    for k, share in enumerate(shares, 1):
        chart.bar(k, share, 34, "s1", name=f"k{k}")
        if total:
            chart.tick(k, seen[k] / total, 44, f"measured: {seen[k]} of {total} runs")
    said = (f" Strokes: <b>measured</b>, {total} runs of figure 2 (γ = "
            f"{documents['demo'].content['gamma']}), without the last of each text, which its "
            "end may cut." if total else "")
    rows = [[str(k), number(share, ".3f"), number(seen[k] / total if total else None, ".3f")]
            for k, share in enumerate(shares, 1)]
    return (f"<p>Bars: <b>expected</b> at the sliders, α<sup>k−1</sup>(1−α), and α<sup>γ</sup> "
            f"for all drafts.{said}</p>" + chart.svg()
            + table("tokens of a run", ["tokens", "expected", "measured"], rows, "runs-table"))


def _seen(documents: Documents) -> collections.Counter[int]:
    if "demo" not in documents:
        return collections.Counter()
    return collections.Counter(
        len(run) for sample in documents["demo"].content["samples"]
        for run in runs(sample.get("tokens") or ())[:-1])


def gain(documents: Documents) -> str:
    """Figure 5: Eq. (5) and Theorem 3.11 by γ, and what was observed."""
    start = setting(documents)
    if start is None or start.c is None:
        raise LeftOutError("it takes α and c: measure speedup, or demo, or measure cost and "
                           "measure alpha")
    c, c_hat = start.c, start.c if start.c_hat is None else start.c_hat
    lengths = range(LONGEST + 1)
    speeds = [theory.speedup(start.alpha, g, c, start.width(g)) for g in lengths]
    operations = [theory.operations_factor(start.alpha, g, c_hat) for g in lengths]
    best = theory.best_draft_length(start.alpha, c, longest=LONGEST, widening=start.width)
    chart = Chart("gain", Axis("γ, drafts per target run", 0, LONGEST, range(0, LONGEST + 1, 2)),
                  Axis("factor", _LOW, _HIGH, (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32), log=True),
                  title="Speed-up and operations against γ",
                  summary=f"Expected speed-up is largest, {speeds[best]:.2f}, at γ = {best}; the "
                          "table has the numbers.")
    chart.line([(0, 1), (LONGEST, 1)], "ink thin")
    chart.line(zip(lengths, operations, strict=True), "s2", name="operations")
    chart.line(zip(lengths, speeds, strict=True), "s1", name="speed")
    for y, label, kind in ((speeds[-1], "speed-up", "s1"), (operations[-1], "operations", "s2")):
        x, py = chart.at(LONGEST, y)
        chart.text(x + 6, py + 4, label, f"label {kind}", name=f"{label}-label")
    observed = _observed(documents)
    for gamma, value, up, of in observed:
        if gamma <= LONGEST:
            chart.dot(gamma, value, "s3", "diamond", up=up,
                      title=f"observed, {of}: γ = {gamma}, {value:.2f}x")
    chart.dot(best, speeds[best], "ink", "ring", title="the best draft length", name="best")
    rows = [[str(g), number(theory.expected_tokens(start.alpha, g)), number(start.width(g)),
             number(speeds[g]), number(operations[g]),
             "; ".join(f"{value:.2f} ({of})" for gamma, value, _, of in observed if gamma == g)]
            for g in lengths]
    widths = (f"measured for γ = {', '.join(map(str, start.widening))}, straight between and by "
              "the slope of the slider beyond" if start.widening else "not measured, taken as 1")
    by = ("bytes that passes read, an estimate" if start.c_hat is not None
          else "c, as bytes were not measured")
    return (
        "<p>Lines: <b>expected</b>, solid by Eq. (5) with the widening of the verify pass, dashed "
        "by Theorem 3.11; the ring marks the γ with the largest expected speed-up. Diamonds: "
        "<b>observed</b>, with 95 % intervals between prompts where there are some. Widening: "
        f"{widths}. ĉ of operations: {c_hat:.4f}, by {by}.</p>" + chart.svg()
        + table("speed-up and operations", ["γ", "tokens a run", "T(γ+1)/T(1)", "speed-up",
                                            "operations", "observed"], rows, "gain-table"))


def _observed(documents: Documents) -> list[tuple[int, float, tuple[float, float] | None, str]]:
    found = []
    for kind in ("measure speedup", "demo"):
        if kind in documents:
            content = documents[kind].content
            for row in content.get("rows", [content]):
                if row["observed_speedup"] is not None:
                    low, high = (row.get(f"observed_speedup_{end}") for end in ("low", "high"))
                    found.append((row["gamma"], row["observed_speedup"],
                                  None if low is None or high is None else (low, high),
                                  f"temperature {row['temperature']:g}"
                                  if "temperature" in row else kind))
    return found
