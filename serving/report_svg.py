"""Charts as SVG, and tables, as strings of HTML. What comes from a document is escaped here."""

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence

LEFT, RIGHT, TOP, BOTTOM = 58, 104, 14, 46  # margins; lines are labelled on the right
_TICKS = 5  # about so many


def escape(text: object) -> str:
    return html.escape(str(text))


def number(value: float | None, form: str = ".2f") -> str:
    """Escaped by its nature; a dash for what is not known."""
    return "–" if value is None or not math.isfinite(value) else format(value, form)


@dataclasses.dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high``, both drawn; values beyond are drawn at the edge."""

    title: str
    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def decades(low: float, high: float) -> tuple[float, float, list[float]]:
    """Powers of ten around positive values, for a logarithmic axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    return 10.0**first, 10.0**last, [10.0**i for i in range(first, last + 1)]


def ticks(highest: float) -> list[float]:
    """Round numbers from 0 to the first at or beyond ``highest``, for an axis from 0."""
    if highest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest / _TICKS))
    step = next(power * m for m in (1, 2, 5, 10, 20) if power * m * _TICKS >= highest)
    return [step * n for n in range(math.ceil(highest / step - 1e-9) + 1)]


class Chart:
    """Draws on top of what it has; ``svg`` ends it.

    Args:
      name: a unique id of the page; the script finds the parts by it.
      title, summary: what a screen reader says.
      margin: on the right.
    """

    def __init__(self, name: str, x: Axis, y: Axis, *, title: str, summary: str,
                 width: int = 660, height: int = 330, margin: int = RIGHT):
        self._x, self._y, self._name = x, y, name
        self._width, self._height, self._right = width, height, width - margin
        self._head = (f'<title id="{name}-title">{escape(title)}</title>'
                      f'<desc id="{name}-desc">{escape(summary)}</desc>')
        self._parts: list[str] = []
        self._axes()

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (LEFT + self._x.share(x) * (self._right - LEFT),
                self._height - BOTTOM - self._y.share(y) * (self._height - TOP - BOTTOM))

    def _axes(self) -> None:
        right, bottom = self._right, self._height - BOTTOM
        for tick in self._x.ticks:
            x, _ = self.at(tick, self._y.low)
            self._add(f'<path class="grid" d="M{x:.1f} {bottom}v5"/>')
            self.text(x, bottom + 18, f"{tick:g}", "tick middle")
        for tick in self._y.ticks:
            _, y = self.at(self._x.low, tick)
            self._add(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
            self.text(LEFT - 7, y + 4, f"{tick:g}", "tick end")
        self.text((LEFT + right) / 2, self._height - 8, self._x.title, "axis middle")
        middle = (TOP + bottom) / 2
        self._add(f'<text class="axis middle" transform="translate(14 {middle:.0f}) rotate(-90)">'
                  f"{escape(self._y.title)}</text>")

    def _add(self, part: str) -> None:
        self._parts.append(part)

    def text(self, x: float, y: float, text: str, kind: str = "", name: str = "") -> None:
        """In pixels."""
        self._add(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{self._id(name)}>'
                  f"{escape(text)}</text>")

    def _id(self, name: str) -> str:
        return f' id="{self._name}-{name}"' if name else ""

    def line(self, points: Iterable[tuple[float, float]], kind: str, label: str = "",
             name: str = "") -> None:
        """A label stands at its last point."""
        places = [self.at(x, y) for x, y in points]
        coordinates = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        self._add(f'<polyline class="line {kind}" points="{coordinates}"{self._id(name)}/>')
        if label:
            x, y = places[-1]
            self.text(x + 6, y + 4, label, f"label {kind}")

    def labels(self, x: float, of: Iterable[tuple[float, str, str]]) -> None:
        """Beside the last points of lines, each y, text and kind; spread where they are close."""
        below = -math.inf
        for y, text, kind in sorted(of, reverse=True):
            px, py = self.at(x, y)
            below = max(py + 4, below + 14)
            self.text(px + 9, below, text, f"label {kind}")

    def dot(self, x: float, y: float, kind: str, shape: str, *, title: str,
            label: str = "", across: tuple[float, float] | None = None,
            up: tuple[float, float] | None = None, name: str = "") -> None:
        """A mark of a shape, with intervals along x or y, and what a pointer is told."""
        px, py = self.at(x, y)
        if across is not None:
            self.line([(across[0], y), (across[1], y)], f"whisker {kind}")
        if up is not None:
            self.line([(x, up[0]), (x, up[1])], f"whisker {kind}")
        path = {"circle": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z", "square": "M-4.5-4.5h9v9h-9z",
                "diamond": "M0-6.5L6 0L0 6.5L-6 0z", "triangle": "M0-6L6 5H-6z",
                "ring": "M-9 0a9 9 0 1 0 18 0a9 9 0 1 0 -18 0z"}[shape]
        self._add(f'<path class="mark {shape} {kind}" transform="translate({px:.1f} {py:.1f})" '
                  f'd="{path}"{self._id(name)}><title>{escape(title)}</title></path>')
        if label:
            self.text(px + 9, py - 7, label, "label")

    def bar(self, x: float, y: float, width: float, kind: str, name: str = "") -> None:
        """From the low end to y, centred at x; ``width`` in pixels."""
        px, py = self.at(x, y)
        bottom = self._height - BOTTOM
        self._add(f'<rect class="bar {kind}" x="{px - width / 2:.1f}" y="{py:.1f}" '
                  f'width="{width:.1f}" height="{bottom - py:.1f}"{self._id(name)}/>')

    def tick(self, x: float, y: float, width: float, title: str) -> None:
        """A short level stroke: a frequency on a bar."""
        px, py = self.at(x, y)
        self._add(f'<path class="seen" d="M{px - width / 2:.1f} {py:.1f}h{width:.1f}">'
                  f"<title>{escape(title)}</title></path>")

    def svg(self) -> str:
        name, right, bottom = self._name, self._right, self._height - BOTTOM
        axes = f"{self._x.low:g} {self._x.high:g} {self._y.low:g} {self._y.high:g}"
        place = f'data-plot="{LEFT} {right} {bottom} {TOP} {axes} {int(self._y.log)}"'
        return (f'<div class="scroll"><svg id="{name}" role="img" '
                f'aria-labelledby="{name}-title {name}-desc" '
                f'viewBox="0 0 {self._width} {self._height}" {place}>'
                f"{self._head}{''.join(self._parts)}</svg></div>")


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], name: str = "",
          *, unfolded: bool = False) -> str:
    """The first cell of a row names it. Cells are text, and escaped."""
    def cells(row: Sequence[str]) -> str:
        first, *rest = row
        return (f'<tr><th scope="row">{escape(first)}</th>'
                + "".join(f"<td>{escape(cell)}</td>" for cell in rest) + "</tr>")

    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "".join(cells(row) for row in rows)
    ident, is_open = f' id="{name}"' if name else "", " open" if unfolded else ""
    return (f"<details{is_open}><summary>As a table: {escape(caption)}</summary>"
            f'<div class="scroll"><table{ident}><thead><tr>{titles}</tr></thead>'
            f"<tbody>{body}</tbody></table></div></details>")
