"""``tpuspec report``: what measure, verify and demo found, as one page with figures.

The page stands alone: no network, no other file. What no document has is left out, and the
page says so.
"""

import argparse
import pathlib
import re
from collections.abc import Callable

from tpuspec.serving import (
    report_curves,
    report_documents,
    report_figures,
    report_page,
    report_png,
)
from tpuspec.serving.report_documents import Document
from tpuspec.serving.report_figures import Documents, LeftOutError
from tpuspec.serving.report_svg import escape, number, table

_FIGURES: tuple[tuple[str, Callable[[Documents], str]], ...] = (
    ("Figure 1. A pass waits for memory", report_figures.roofline),
    ("Figure 2. Where tokens came from", report_figures.strip),
    ("Figure 3. Sampled frequencies on the target's probabilities", report_figures.frequencies),
    ("Figure 4. Tokens per target run against α", report_curves.tokens),
    ("Figure 5. Speed-up and operations against γ", report_curves.gain))


def run(args: argparse.Namespace) -> int:
    output = pathlib.Path(args.output)
    if any(output.resolve() == pathlib.Path(path).resolve() for path in args.document):
        raise ValueError(f"output must be another file than the documents, got {args.output}")
    if args.png is not None:
        report_png.check_installed()
    page, left_out = make(report_documents.read(args.document))
    output.write_bytes(page.encode(errors="replace"))  # JSON can spell half a surrogate pair
    print(f"{output}: {len(_FIGURES) - len(left_out)} of {len(_FIGURES)} figures.")
    for title, why in left_out.items():
        print(f"Left out: {title}: {why}.")
    if args.png is not None:
        files = report_png.write(charts(page), pathlib.Path(args.png))
        print(f"{args.png}: {', '.join(file.name for file in files)}.")
    return 0


def charts(page: str) -> dict[str, str]:
    """The SVG elements of a page, by their ids; what documents say is escaped in it."""
    return {found[1]: found[0]
            for found in re.finditer(r'<svg id="(\w+)".*?</svg>', page, re.DOTALL)}


def make(documents: Documents) -> tuple[str, dict[str, str]]:
    """The page, and by title why a figure is not on it."""
    parts: list[str] = []
    left_out: dict[str, str] = {}
    start = report_curves.setting(documents)
    for title, figure in _FIGURES:
        if figure is report_curves.tokens and start is not None:
            parts.append(report_page.settings(
                start.to_json(), start.said, max(7, start.gamma), cost=start.c is not None))
        parts.append(f"<section><h2>{title}</h2>")
        try:
            parts.append(figure(documents))
        except LeftOutError as why:
            left_out[title] = str(why)
            parts.append(f"<p class=\"note\">Left out: {escape(why)}.</p>")
        parts.append("</section>")
    return report_page.page(
        _title(documents), _head(documents) + "".join(parts) + _speedups(documents),
        None if start is None else start.to_json()), left_out


def _title(documents: Documents) -> str:
    for document in documents.values():
        if draft := document.content.get("draft"):
            return f"Speculative decoding of {document.content['target']} with {draft}, measured"
    return "Speculative decoding, measured"


def _head(documents: Documents) -> str:
    """What each document is of, as far as it says."""
    rows = [[document.file, f"tpuspec {kind} --json",
             *(document.content.get(name) or "does not say"
               for name in ("target", "draft", "platform", "dtype")), _amount(document)]
            for kind, document in documents.items()]
    missing = [kind for kind in report_documents.KINDS if kind not in documents]
    said = "" if not missing else (
        "<p>Not given, and so not on this page: documents of "
        + ", ".join(f"tpuspec {kind}" for kind in missing) + ".</p>")
    targets = {target for document in documents.values()
               if (target := document.content.get("target"))}
    if len(targets) > 1:
        said += (f"<p><b>These documents are of different targets</b>: "
                 f"{escape(', '.join(sorted(targets)))}.</p>")
    return ("<p>Made of the documents below and of nothing else. <b>Measured</b> and "
            "<b>observed</b> figures are theirs; <b>expected</b> and <b>idealized</b> ones are "
            "computed from them.</p>" + table(
                "documents", ["file", "command", "target", "draft", "platform", "dtype", "of"],
                rows, unfolded=True) + said)


def _amount(document: Document) -> str:
    content = document.content
    if document.kind == "measure alpha":
        return f"{sum(row['tokens'] for row in content['rows'])} positions read"
    if document.kind == "measure speedup":
        return f"{content['prompts']} prompts, {content['repeats']} repeats, one at a time"
    if document.kind == "measure cost":
        return f"source {content['source']}, length {content['length']}"
    if document.kind == "verify":
        return f"{content['samples']} outputs of each kind and source, γ = {content['gamma']}"
    return f"{len(content['samples'])} sources, γ = {content['gamma']}"


def _speedups(documents: Documents) -> str:
    """All rows of α and of the speed-up, as the documents have them."""
    parts = []
    if "measure speedup" in documents:
        content = documents["measure speedup"].content
        parts.append(table(
            "measure speedup", ["temperature, γ", "α", "c", "T(γ+1)/T(1)", "plain tokens/s",
                                "speculative tokens/s", "expected", "observed", "95 %"],
            ([f"{row['temperature']:g}, {row['gamma']}", number(row["alpha"], ".3f"),
              number(row["c"], ".3f"), number(row["widening"]),
              number(row["plain_tokens_per_s"], ".1f"),
              number(row["speculative_tokens_per_s"], ".1f"),
              number(row["predicted_speedup"]), number(row["observed_speedup"]),
              f"{number(row.get('observed_speedup_low'))} to "
              f"{number(row.get('observed_speedup_high'))}"] for row in content["rows"]))
            + f"<p class=\"note\">c and widening: {escape(content['cost_method'])}.</p>")
    if "demo" in documents:
        demo = documents["demo"].content
        parts.append(table("demo", ["γ", "α", "c", "tokens a run", "expected", "observed"], [[
            str(demo["gamma"]), number(demo["alpha"], ".3f"), number(demo["c"], ".3f"),
            number(demo["tokens_per_target_run"]), number(demo["predicted_speedup"]),
            number(demo["observed_speedup"])]]))
    if "measure alpha" in documents:
        parts.append(table(
            "measure alpha", ["draft", "temperature", "α", "95 %", "positions", "prompts"],
            ([row["draft"], f"{row['temperature']:g}", number(row["alpha"], ".3f"),
              f"{number(row.get('alpha_low'), '.3f')} to {number(row.get('alpha_high'), '.3f')}",
              str(row["tokens"]), str(row["prompts"])]
             for row in documents["measure alpha"].content["rows"])))
    return f"<h2>The figures as measured</h2>{''.join(parts)}" if parts else ""
