"""Where a checkpoint is, or why there is none."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from etils import epath

from tpuspec.checkpoint_writer import WEIGHTS

CONFIG_FILE = "model.json"
UNFINISHED = ".unfinished-"  # in the names of directories that are being written


@contextlib.contextmanager
def reading(what: str | os.PathLike[str]) -> Iterator[None]:
    """What reads damaged files raises errors of every kind, which tell people no more than that
    they are damaged. Raises ValueError for those that are not clear already."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except ImportError as error:
        raise ValueError(f"{os.fspath(what)} cannot be read: {error} (for gs:// pip install "
                         "'.[gcs]')") from error
    except Exception as error:
        raise ValueError(f"{os.fspath(what)} is damaged: {type(error).__name__}: {error}"
                         ) from error


def path_of(directory: str | os.PathLike[str]) -> Path:
    """Absolute; of an object store where it begins with ``gs://``, which then reads and
    lists as a path does (with gcsfs installed)."""
    if "://" in os.fspath(directory):
        return epath.Path(directory)
    return Path(directory).expanduser().absolute()


def find(directory: str | os.PathLike[str]) -> Path:
    """The absolute path of a whole checkpoint, or a ValueError with a hint."""
    path = path_of(directory)
    try:
        there = path.is_dir()
    except ImportError as error:  # of gcsfs
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not there:
        kind = "is a file" if path.exists() else "does not exist"
        holder = _holders([path.parent]) if path.exists() else ""
        raise ValueError(f"no checkpoint at {path}: it {kind}; a checkpoint is a "
                         f"directory that holds {CONFIG_FILE}{holder}")
    if UNFINISHED in path.name:
        raise ValueError(f"{path} is what an interrupted save left behind, not a checkpoint")
    if (path / CONFIG_FILE).is_file():
        if not (path / WEIGHTS / "_METADATA").is_file():
            raise ValueError(f"{path / WEIGHTS} is missing or unfinished")
        return path
    layouts = {"config.json": "the Hugging Face layout", "checkpoint": "T5X's layout"}
    for file, layout in layouts.items():
        if (path / file).is_file():
            raise ValueError(f"{path} is in {layout}: tpuspec convert makes a checkpoint of it")
    found = sorted(p.name for p in path.iterdir())[:6]
    near = _holders([path.parent, *(p for p in sorted(path.iterdir()) if p.is_dir())])
    raise ValueError(f"no checkpoint at {path}: it holds {found or 'nothing'}, "
                     f"not {CONFIG_FILE}{near}")


def _holders(candidates: Iterable[Path]) -> str:
    near = [str(p) for p in candidates
            if (p / CONFIG_FILE).is_file() and UNFINISHED not in p.name]
    return f"; did you mean {' or '.join(near)}?" if near else ""
