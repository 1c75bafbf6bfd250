"""Work in pieces, of which only those begin that a budget of time has room for."""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """One thing to do. ``kind`` tells which others take about as long."""

    kind: str
    what: str
    work: Callable[[], None]


def run_pieces(pieces: Sequence[Piece], budget_s: float, done: Callable[[], None], *,
               clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """Does what fits, in order.

    Args:
      done: called after each piece.

    Returns:
      ``seconds`` by piece, and the names of those ``skipped``, and ``failed`` with why.
    """
    began, longest = clock(), dict.fromkeys((piece.kind for piece in pieces), 0.0)
    report: dict[str, Any] = {"seconds": {}, "skipped": [], "failed": {}}
    for piece in pieces:
        start = clock()
        if start - began + longest[piece.kind] >= budget_s:
            report["skipped"].append(piece.what)
            continue
        if sys.stderr.isatty():
            print(f"{start - began:5.0f} s  {piece.what}", file=sys.stderr)
        try:
            piece.work()
        except Exception as error:  # a machine is lent once: the other pieces are still wanted
            report["failed"][piece.what] = f"{type(error).__name__}: {error}"[:500]
        took = clock() - start
        report["seconds"][piece.what] = took
        longest[piece.kind] = max(longest[piece.kind], took)
        done()
    return report
