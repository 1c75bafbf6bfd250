"""What ``tpuspec bench`` measured, as a page of charts over the rate, which needs no other file."""

from collections.abc import Mapping, Sequence
from typing import Any

from tpuspec.serving import report_page
from tpuspec.serving.report_svg import Axis, Chart, escape, number, table, ticks

_KINDS = {"plain": "s2", "speculative": "s1"}
_SHAPES = {"": "circle", "p50": "circle", "p99": "triangle"}  # "" is of a figure without any
_FIGURES = (("tokens a second", "tokens_per_s"), ("requests in time a second", "goodput_per_s"),
            ("time to the first token, ms", "first_token_ms"), ("time per token, ms", "token_ms"))

type _Points = Sequence[tuple[float, float]]
type _Lines = Mapping[tuple[str, str], _Points]


def page(document: Mapping[str, Any]) -> str:
    """A chart each for throughput, goodput, both times and the gain, and all rows as a table.

    Args:
      document: what ``bench.measure`` gives.
    """
    rows = document["rows"]
    charts = [_chart(figure, title, lines(rows, figure)) for title, figure in _FIGURES]
    gains = {(name, ""): [(gain["rate"], gain[name]) for gain in document["speedup"]]
             for name in ("request", "throughput")}
    kinds = {"request": "s3", "throughput": "s4"}
    if document["speedup"]:
        charts.append(_chart("speedup", "speculative over plain, times", gains, kinds))
    return report_page.page(
        f"{document['model']} on {document['platform']} under load",
        f"<p>{document['slots']} slots, c {number(document['c'], '.3f')}. Requests leave at random "
        "times of a Poisson process, whether or not earlier ones were answered; at each rate the "
        "same requests plain (γ = 0) and as the server drafts, in turns. Circles are medians, or "
        "the one figure there is; hollow triangles are 99th percentiles.</p>"
        + "".join(charts) + _table(rows), None)


def lines(rows: Sequence[Mapping[str, Any]], figure: str) -> _Lines:
    """Rate and value by mode and percentile ("" where a figure has none), in order of the rate.
    What is not known is left out."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["rate"]):
        value = row[figure]
        values = value if isinstance(value, Mapping) else {} if value is None else {"": value}
        for percentile in _SHAPES:
            if percentile in values:
                found.setdefault((row["mode"], percentile), []).append(
                    (row["rate"], values[percentile]))
    return found


def _chart(name: str, title: str, drawn: _Lines, kinds: Mapping[str, str] = _KINDS) -> str:
    points = [point for line in drawn.values() for point in line]
    across, up = (ticks(max((point[axis] for point in points), default=0.0)) for axis in (0, 1))
    chart = Chart(name, Axis("requests a second", 0, across[-1], across),
                  Axis(title, 0, up[-1], up), title=f"{title}, by requests a second",
                  summary=f"{len(points)} points; the table has the numbers.")
    for (of, percentile), line in drawn.items():
        chart.line(line, kinds[of] if percentile != "p99" else f"{kinds[of]} thin")
        hollow = " hollow" if percentile == "p99" else ""
        for rate, value in line:
            chart.dot(rate, value, kinds[of] + hollow, _SHAPES[percentile],
                      title=f"{of} {percentile}: {value:.4g} at {rate:g}/s")
    if points:
        chart.labels(max(rate for rate, _ in points), [
            (line[-1][1], f"{of} {percentile}", kinds[of])
            for (of, percentile), line in drawn.items()])
    return f"<section><h2>{escape(title[0].upper() + title[1:])}</h2>{chart.svg()}</section>"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    def times(row: Mapping[str, Any], name: str) -> str:
        return "–" if row[name] is None else " / ".join(
            number(row[name][p], ".1f") for p in ("p50", "p90", "p99"))

    return table(
        "all rates", ["requests a second, mode", "requests", "statuses", "tokens/s", "goodput/s",
                      "first token ms p50 / p90 / p99", "token ms p50 / p90 / p99", "α"],
        ([f"{row['rate']:g}, {row['mode']}", str(row["requests"]),
          ", ".join(f"{code} {count}" for code, count in row["statuses"].items()),
          number(row["tokens_per_s"], ".1f"), number(row["goodput_per_s"]),
          times(row, "first_token_ms"), times(row, "token_ms"), number(row["alpha"])]
         for row in rows), unfolded=True)
