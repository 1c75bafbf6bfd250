"""Files by path or URL: local ones, and what fsspec reaches, such as ``gs://``.

Nothing is ever seen half written. A local file is written under another name and
renamed; an object in a store appears when its upload is complete.
"""

import contextlib
import fcntl
import gzip
import io
import os
import pathlib
import tempfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from tpuspec.serving.channel import MAX_MESSAGE_BYTES

MAX_LINE = MAX_MESSAGE_BYTES  # bytes; of a longer line only the beginning is kept
_GZIP_LEVEL = 6


class File:
    """A file that may not exist yet.

    Raises:
      ValueError: the package for this kind of URL is not installed, or there is none.
    """

    def __init__(self, url: str):
        self.url = url
        try:
            self._fs, self._path = url_to_fs(url)
        except ImportError as error:
            raise ValueError(f"{url}: {error} (for gs:// pip install '.[gcs]')") from None
        except ValueError as error:
            raise ValueError(f"{url}: {error}") from None

    @property
    def name(self) -> str:
        return self._path.rsplit("/", 1)[-1]

    @property
    def compressed(self) -> bool:
        return self.name.endswith(".gz")

    @property
    def local(self) -> bool:
        return isinstance(self._fs, LocalFileSystem)

    def sibling(self, name: str) -> "File":
        """Another file in the same folder."""
        folder, slash, _ = self.url.rpartition("/")
        return File(folder + slash + name)

    def exists(self) -> bool:
        return bool(self._fs.exists(self._path))

    def lines(self) -> Iterator[bytes]:
        """The lines with their ends, uncompressed; a line has at most MAX_LINE + 1 bytes.

        Raises:
          OSError: it cannot be read.
          ValueError: it is no whole gzip file.
        """
        with contextlib.ExitStack() as stack:
            file: Any = stack.enter_context(self._fs.open(self._path, "rb"))
            if self.compressed:
                if self._fs.size(self._path) == 0:
                    raise ValueError(f"{self.url} is not a whole gzip file: it is empty")
                file = stack.enter_context(gzip.open(file))
            try:
                while line := file.readline(MAX_LINE + 1):
                    yield line
                    while line and not line.endswith(b"\n"):  # the rest of too long a line
                        line = file.readline(MAX_LINE + 1)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{self.url} is not a whole gzip file: {error}") from None

    def publish(self, draft: pathlib.Path) -> None:
        """Makes a complete local file the content of this one; the draft is gone."""
        if self.local:
            with open(draft, "rb") as file:
                os.fsync(file.fileno())
            os.replace(draft, self._path)
        else:
            self._fs.put_file(str(draft), self._path)
            draft.unlink()


@contextlib.contextmanager
def draft(folder: str | None) -> Iterator[pathlib.Path]:
    """A place for files that will be published: a folder beside them, or a temporary one."""
    with tempfile.TemporaryDirectory(prefix="draft-", dir=folder) as name:
        yield pathlib.Path(name)


@contextlib.contextmanager
def write_text(path: pathlib.Path, *, compress: bool) -> Iterator[IO[str]]:
    """UTF-8; the same text gives the same bytes, compressed or not."""
    with contextlib.ExitStack() as stack:
        binary: Any = stack.enter_context(open(path, "wb"))
        if compress:
            binary = stack.enter_context(gzip.GzipFile(
                filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=binary, mtime=0))
        yield stack.enter_context(io.TextIOWrapper(binary, encoding="utf-8", newline="\n"))


class Folder:
    """Small files under names of their own, each written at once."""

    def __init__(self, file: File):
        self.url, self._fs, self._path = file.url, file._fs, file._path
        self._locked: int | None = None

    @property
    def local_path(self) -> str | None:
        """The folder on this machine, if it is one."""
        return self._path if isinstance(self._fs, LocalFileSystem) else None

    def lock(self) -> bool:
        """Makes the folder and keeps other processes out of it until this one ends.

        Returns False if another process has it. An object store has no such lock: there
        ``create`` refuses the second writer.
        """
        self._fs.makedirs(self._path, exist_ok=True)
        if self.local_path is not None:
            self._locked = os.open(self.local_path, os.O_RDONLY)
            try:
                fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.unlock()
                return False
        return True

    def unlock(self) -> None:
        if self._locked is not None:
            os.close(self._locked)
            self._locked = None

    def exists(self, name: str) -> bool:
        return bool(self._fs.exists(f"{self._path}/{name}"))

    def names(self) -> list[str]:
        self._fs.invalidate_cache()
        if not self._fs.exists(self._path):  # a store has no empty folders
            return []
        return sorted(path.rsplit("/", 1)[-1] for path in self._fs.ls(self._path, detail=False))

    def read(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(f"{self._path}/{name}"))

    def create(self, name: str, content: bytes) -> None:
        """Raises FileExistsError if it is there already."""
        path = f"{self._path}/{name}"
        if self.local_path is None:
            self._fs.pipe_file(path, content, mode="create")
        elif os.path.exists(path):
            raise FileExistsError(path)
        else:
            self.replace(name, content)

    def replace(self, name: str, content: bytes) -> None:
        path = f"{self._path}/{name}"
        if self.local_path is None:
            self._fs.pipe_file(path, content)
            return
        with open(f"{path}.draft", "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.draft", path)

    def remove(self, names: list[str]) -> None:
        for name in names:
            self._fs.rm(f"{self._path}/{name}", recursive=True)
