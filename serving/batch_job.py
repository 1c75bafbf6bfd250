"""What a batch job has done so far, in a folder beside its output; it survives kill -9.

    out.jsonl.job/
      job.json                                  settings, input, models; at the end the summary
      records-000000000001-000000000256.jsonl   the first 256 records, in the order of completion

Each line of the input gets one record. A file of records appears whole or not at all, so
that nothing has to be repaired: the job goes on with the lines that have none. They are
all near each other, since lines are read a bounded way ahead. ``job.json`` stays when the job is
complete and says how the output was made; the records are removed.
"""

import hashlib
import json
import pathlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from tpuspec.serving.storage import File, Folder

_JOB = "job.json"
_RECORDS = re.compile(r"records-(\d+)-(\d+)\.jsonl")
_MOST_RECORDS = 1000  # in one file
_MOST_SECONDS = 5.0  # between files while records come
_SAMPLE = 1 << 20  # bytes of each file that count for a checkpoint's identity


def checkpoint_identity(directory: pathlib.Path) -> str:
    """Changes with any name, size or first MiB of the files: weights get new names or
    contents with every save, and reading all of them would take minutes."""
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            content = file.read(_SAMPLE)
        head = [path.relative_to(directory).as_posix(), path.stat().st_size, len(content)]
        digest.update(json.dumps(head).encode() + content)
    return digest.hexdigest()


class Job:
    """Made by ``open``; one process at a time has it.

    Attributes:
      settings: of the first run.
      done: number of lines that have their record.
      summary: of a complete job, else None.
    """

    def __init__(self, folder: Folder, document: Mapping[str, Any]):
        self.settings: Mapping[str, Any] = document["settings"]
        self.summary: dict[str, Any] | None = document.get("summary")
        self._folder = folder
        self._document = document
        self._files: list[str] = []
        self._buffer: list[str] = []
        self._saved = 0  # records in files
        self._done_lines = Lines()
        self._last_save = time.monotonic()

    @classmethod
    def open(cls, output: File, errors: File, *, identity: Mapping[str, Mapping[str, Any]],
             settings: Mapping[str, Any], fresh: Mapping[str, Any]) -> Self:
        """Begins the job or takes it up again.

        Args:
          output, errors: what it writes at the end.
          identity: by kind ("input", "model"), what must be the same in every run.
          settings: of this run, JSON values; None means as in the first run.
          fresh: what None means in the first run.

        Raises:
          ValueError: another process has the job, it was begun with something else, or
            there is an output already that is not the job's.
        """
        folder = Folder(output.sibling(f"{output.name}.job"))
        if not folder.exists(_JOB):
            for file in (output, errors):
                if file.exists():
                    raise ValueError(f"{file.url} exists and is not of this job: remove it or "
                                     "choose another name")
        if not folder.lock():
            raise ValueError(f"another process is writing {output.url}")
        try:
            names = folder.names()
            if _JOB in names:
                job = cls(folder, _decode(folder))
                job._take_up(names)
                if job.done or job.summary is not None:
                    job._check({**identity, "settings": {
                        name: value for name, value in settings.items() if value is not None}})
                    if job.summary is not None and not output.exists():
                        raise ValueError(f"{output.url} was made and is gone: remove "
                                         f"{folder.url} to make it again")
                    return job
            else:
                folder.remove(names)
            # New, or begun and nothing is done: then it may be begun with something else.
            first = {name: fresh.get(name) if value is None else value
                     for name, value in settings.items()}
            document = {**identity, "settings": first}
            folder.replace(_JOB, _encode(document))
            return cls(folder, document)
        except BaseException:
            folder.unlock()
            raise

    @property
    def done(self) -> int:
        return self._saved + len(self._buffer)

    def has(self, line: int) -> bool:
        """Whether a line, by its number from 1, has its record."""
        return line in self._done_lines

    @property
    def local_path(self) -> str | None:
        return self._folder.local_path

    def append(self, record: Mapping[str, Any]) -> None:
        """The record of the line that its "line" says; it is safe within seconds.

        Raises:
          ValueError: another process has written this part of the output.
        """
        self._done_lines.add(record["line"])
        self._buffer.append(json.dumps(record, ensure_ascii=False) + "\n")
        if (len(self._buffer) >= _MOST_RECORDS
                or time.monotonic() - self._last_save >= _MOST_SECONDS):
            self.save()

    def save(self) -> None:
        if self._buffer:
            name = f"records-{self._saved + 1:012d}-{self.done:012d}.jsonl"
            try:
                self._folder.create(name, "".join(self._buffer).encode())
            except FileExistsError:
                raise ValueError(f"another process is writing {self._folder.url}") from None
            self._files.append(name)
            self._saved, self._buffer = self.done, []
        self._last_save = time.monotonic()

    def records(self) -> Iterator[dict[str, Any]]:
        """Every record, in the order of the input; those that came early wait in memory.

        Raises:
          ValueError: one is missing.
        """
        early: dict[int, dict[str, Any]] = {}
        line = 1
        for name in self._files:
            for text in self._folder.read(name).splitlines():
                record = json.loads(text)
                early[record["line"]] = record
                while line in early:
                    yield early.pop(line)
                    line += 1
        if line <= self._saved:
            raise ValueError(f"{self._folder.url} is damaged: it lacks the record of line {line}")

    def complete(self, summary: Mapping[str, Any]) -> None:
        """After the output: from here on the job is never run again."""
        self._folder.replace(_JOB, _encode({**self._document, "summary": summary}))
        self._folder.remove(self._files)

    def close(self) -> None:
        self._folder.unlock()

    def _check(self, now: Mapping[str, Mapping[str, Any]]) -> None:
        before = self._document
        different = [f"{kind} {name} was {before[kind].get(name)!r}, now {value!r}"
                     for kind, values in now.items() for name, value in values.items()
                     if before[kind].get(name) != value]
        if different:
            raise ValueError(
                f"{self._folder.url} was begun with something else: {'; '.join(different)}. "
                "Run it as before, or remove that folder and the output to start again")

    def _take_up(self, names: Sequence[str]) -> None:
        """Keeps the files that follow on each other from the first; the rest is removed."""
        for name in sorted(names):
            if self.summary is None and self._take(name):
                self._files.append(name)
            elif name != _JOB:
                self._folder.remove([name])

    def _take(self, name: str) -> bool:
        match = _RECORDS.fullmatch(name)
        if match is None or int(match[1]) != self._saved + 1:
            return False
        content = self._folder.read(name)
        if not content.endswith(b"\n") or content.count(b"\n") != int(match[2]) - self._saved:
            return False
        try:
            lines = [json.loads(text)["line"] for text in content.splitlines()]
        except (ValueError, KeyError, TypeError):
            return False
        for line in lines:
            self._done_lines.add(line)
        self._saved = int(match[2])
        return True


class Lines:
    """Numbers from 1, added in nearly ascending order; memory holds only the early ones."""

    def __init__(self) -> None:
        self._all_to = 0
        self._early: set[int] = set()

    def add(self, line: int) -> None:
        self._early.add(line)
        while self._all_to + 1 in self._early:
            self._all_to += 1
            self._early.remove(self._all_to)

    def __contains__(self, line: int) -> bool:
        return line <= self._all_to or line in self._early


def _encode(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, ensure_ascii=False, indent=1) + "\n").encode()


def _decode(folder: Folder) -> dict[str, Any]:
    try:
        document = json.loads(folder.read(_JOB))
        return {**document, "settings": dict(document["settings"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder.url}/{_JOB} is damaged: {error}") from None
