"""What ``tpuspec bench`` measured, as a picture: figures over the rate, in SVG by hand."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH, _HEIGHT = 320, 240  # of one panel's axes
_LEFT, _TOP, _RIGHT, _BOTTOM = 70, 64, 16, 48  # around them
_COLOURS = {"plain": "#737373", "speculative": "#0b62c4"}
_DASHES = {"p50": "none", "p90": "7 3", "p99": "2 3"}
_PANELS = (("tokens a second", "tokens_per_s"),
           ("time to the first token, ms", "first_token_ms"),
           ("time per token, ms", "token_ms"))
_TICKS = 5  # about so many

type _Points = Sequence[tuple[float, float]]


def svg(document: Mapping[str, Any]) -> str:
    """A panel each for throughput, time to the first token and time per token.

    Args:
      document: what ``bench.measure`` gives.
    """
    width = len(_PANELS) * (_LEFT + _WIDTH + _RIGHT)
    height = _TOP + _HEIGHT + _BOTTOM + 24
    title = (f"{document['model']} on {document['platform']}, {document['slots']} slots: "
             "by requests a second")
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
             f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
             f"<title>{html.escape(title)}</title>",
             f'<rect width="{width}" height="{height}" fill="white"/>',
             f'<text x="{_LEFT}" y="24" font-size="15">{html.escape(title)}</text>']
    for number, (name, figure) in enumerate(_PANELS):
        x = number * (_LEFT + _WIDTH + _RIGHT) + _LEFT
        parts.append(f'<g transform="translate({x},{_TOP})">')
        parts += _panel(name, lines(document["rows"], figure))
        parts.append("</g>")
    parts += [*_legend(height - 14, document["rows"]), "</svg>"]
    return "\n".join(parts) + "\n"


def lines(rows: Sequence[Mapping[str, Any]], figure: str) -> dict[tuple[str, str], _Points]:
    """Rate and value by mode and percentile ("" where a figure has none), in order of the rate.
    What is not known is left out."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["rate"]):
        value = row[figure]
        values = value if isinstance(value, Mapping) else {} if value is None else {"": value}
        for percentile, number in values.items():
            found.setdefault((row["mode"], percentile), []).append((row["rate"], number))
    return dict(found)


def ticks(highest: float) -> list[float]:
    """Round numbers from 0 to the first at or beyond ``highest``."""
    if highest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest / _TICKS))
    step = next(power * m for m in (1, 2, 5, 10, 20) if power * m * _TICKS >= highest)
    return [step * n for n in range(math.ceil(highest / step - 1e-9) + 1)]


def _panel(name: str, drawn: Mapping[tuple[str, str], _Points]) -> list[str]:
    points = [point for line in drawn.values() for point in line]
    across, up = (ticks(max((point[axis] for point in points), default=0.0)) for axis in (0, 1))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return (round(_WIDTH * point[0] / across[-1], 2),
                round(_HEIGHT * (1 - point[1] / up[-1]), 2))

    parts = [f'<text x="0" y="-10">{name}</text>']
    for value in up:
        y = place((0, value))[1]
        parts += [f'<line x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="#e0e0e0"/>',
                  f'<text x="-6" y="{y + 4}" text-anchor="end">{value:g}</text>']
    for value in across:
        x = place((value, 0))[0]
        parts += [f'<line x1="{x}" x2="{x}" y1="{_HEIGHT}" y2="{_HEIGHT + 4}" stroke="black"/>',
                  f'<text x="{x}" y="{_HEIGHT + 18}" text-anchor="middle">{value:g}</text>']
    parts.append(f'<path d="M0 0V{_HEIGHT}H{_WIDTH}" fill="none" stroke="black"/>')
    for (mode, percentile), line in drawn.items():
        places = [place(point) for point in line]
        path = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_COLOURS[mode]}" '
                     f'stroke-width="1.5" stroke-dasharray="{_DASHES.get(percentile, "none")}"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{_COLOURS[mode]}"><title>{mode} '
                  f"{percentile}: {value:.4g} at {rate:g}/s</title></circle>"
                  for (x, y), (rate, value) in zip(places, line, strict=True)]
    return parts


def _legend(y: int, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    entries = [(mode, _COLOURS[mode], "none") for mode in modes] + [
        (percentile, "black", dash) for percentile, dash in _DASHES.items()]
    parts = []
    for number, (name, colour, dash) in enumerate(entries):
        x = _LEFT + 130 * number
        parts += [f'<line x1="{x}" x2="{x + 30}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" '
                  f'stroke-width="2" stroke-dasharray="{dash}"/>',
                  f'<text x="{x + 36}" y="{y}">{name}</text>']
    return parts
