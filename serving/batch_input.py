"""The lines of a batch job's input: counted beforehand, then read as they are needed."""

import dataclasses
import hashlib
import json
import sqlite3
from collections.abc import Generator, Mapping
from typing import Any

from tpuspec.serving.batch_engine import line_seed
from tpuspec.serving.client import make_request
from tpuspec.serving.records import Failure, Row, read_row
from tpuspec.serving.storage import MAX_LINE, File

_KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".ndjson": "json"}


def split_name(file: File) -> tuple[str, str]:
    """Name without endings, and what its lines are: "json" or "text".

    Raises:
      ValueError: the name does not say.
    """
    stem, dot, ending = file.name.removesuffix(".gz").rpartition(".")
    if dot + ending not in _KINDS or not stem:
        raise ValueError(f"{file.url} must end in {', '.join(_KINDS)}, or one of these "
                         "and .gz")
    return stem, _KINDS[dot + ending]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survey:
    """What one pass over the input says.

    Attributes:
      lines: their number, blank ones included.
      sha256: of the uncompressed content.
      first_target: number of the first line with a target; None without any.
    """

    lines: int
    sha256: str
    first_target: int | None


def survey(file: File) -> Survey:
    """Reads everything once, at the speed of the disk.

    Raises:
      OSError, ValueError: the input cannot be read to its end.
    """
    digest, number, first_target = hashlib.sha256(), 0, None
    is_json = split_name(file)[1] == "json"
    for number, line in enumerate(file.lines(), 1):
        digest.update(line)
        if first_target is None and is_json and b'"target"' in line:
            first_target = number if _has_target(line) else None
    return Survey(lines=number, sha256=digest.hexdigest(), first_target=first_target)


class Ids:
    """Ids that were seen, in a temporary file and not in memory."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("")  # SQLite's name for such a file
        self._database.execute("CREATE TABLE seen (id TEXT PRIMARY KEY, line INTEGER) "
                               "WITHOUT ROWID")

    def line_of(self, value: str | int, number: int) -> int:
        """Number of the line that had this id first; ``number`` if it is new."""
        self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (str(value), number))
        line, = self._database.execute("SELECT line FROM seen WHERE id = ?", (str(value),))
        return int(line[0])

    def close(self) -> None:
        self._database.close()


def read(file: File, defaults: Mapping[str, Any], seed: int) -> Generator[Row | None]:
    """One row for each line of the input, None for blank lines of JSON.

    Every request has its seed: its own, or ``line_seed`` of the job's and the row's id.

    Args:
      file: JSON lines as ``records.read_row`` takes them, or text, every line a source.
      defaults: parameters of ``make_request`` for rows that do not name them.
      seed: of the job.
    """
    read_line = read_row if split_name(file)[1] == "json" else _read_text
    ids = Ids()
    try:
        for number, line in enumerate(file.lines(), 1):
            if len(line) > MAX_LINE:
                failure = Failure("INVALID_ARGUMENT", f"line {number}: must have at most "
                                  f"{MAX_LINE} bytes")
                yield Row(number, failure)
                continue
            row = read_line(number, line, defaults)
            if row is None or isinstance(row.request, Failure):
                yield row
                continue
            if (first := ids.line_of(row.id, number)) != number:
                yield Row(row.id, Failure("INVALID_ARGUMENT", f"line {number}: id must be new, "
                                          f"got {row.id!r} as on line {first}"))
                continue
            if not row.request.HasField("seed"):
                row.request.seed = line_seed(seed, row.id)
            yield row
    finally:
        ids.close()


def _read_text(number: int, line: bytes, defaults: Mapping[str, Any]) -> Row:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        return Row(number, make_request(text, **defaults))
    except ValueError as error:
        return Row(number, Failure("INVALID_ARGUMENT", f"line {number}: {error}"))


def _has_target(line: bytes) -> bool:
    try:
        return json.loads(line.decode("utf-8-sig")).get("target") is not None
    except (ValueError, AttributeError, RecursionError):
        return False
