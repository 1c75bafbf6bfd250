"""The charts of a report as PNG files: the page's own SVG, drawn by resvg.

resvg knows no custom properties of CSS, by which the page has its two schemes; they are put
in beforehand.
"""

import pathlib
import re
from collections.abc import Mapping

from tpuspec.serving.report_page import STYLE

SCALE = 2  # pixels for one of the chart's units
_PLAIN = re.sub(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*\s*\}", "", STYLE)  # light, and wide
_KINDS = ("s1", "s2", "s3", "s4", "ink", "quiet")


def check_installed() -> None:
    """Raises ValueError where resvg is missing."""
    try:
        import resvg_py  # noqa: F401
    except ImportError:
        raise ValueError(
            "png needs resvg, which is not installed: pip install 'tpuspec[png]'") from None


def write(charts: Mapping[str, str], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes NAME.png for each chart, in the light scheme; returns the files.

    Args:
      charts: SVG elements of a page, by name.
      folder: made where it is not there.
    """
    import resvg_py

    folder.mkdir(parents=True, exist_ok=True)
    paper, style = _palette()["--paper"], _style()
    files = []
    for name, svg in charts.items():
        alone = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        files.append(folder / f"{name}.png")
        files[-1].write_bytes(resvg_py.svg_to_bytes(
            svg_string=alone.encode(errors="replace").decode(), background=paper, zoom=SCALE,
            style_sheet=style, font_family="DejaVu Sans"))
    return files


def _palette() -> dict[str, str]:
    return dict(re.findall(r"(--\w+): (#[0-9a-f]{6})", _PLAIN))


def _style() -> str:
    """The page's rules for charts, with a rule for each kind of mark in place of --on."""
    palette = _palette()
    rules = []
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", _PLAIN):
        if ":" in selectors or "[" in selectors or "--on:" in body:
            continue
        for kind in _KINDS if "var(--on)" in body else (None,):
            names = [name.strip() + (f".{kind}" if kind else "")
                     for name in selectors.split(",")]
            values = body if kind is None else body.replace("var(--on)", palette[f"--{kind}"])
            rules.append(", ".join(names) + " {" + re.sub(
                r"var\((--\w+)\)", lambda found: palette[found[1]], values) + "}")
    return "\n".join(rules)
