"""An array in a file, of which nothing is in memory before it is read."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tensor:
    """``read`` makes a copy in memory, or raises ValueError naming the tensor or its file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


def read_at(file: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that lies in a file as it would in memory.

    With a plain read, not through a mapping of the file, whose pages would count as
    ours for the whole of a large file.

    Raises:
      ValueError: the file ends before it.
    """
    count = math.prod(shape) * dtype.itemsize
    raw = np.fromfile(file, np.uint8, count, offset=offset)
    if len(raw) != count:
        raise ValueError(f"{file.name} is cut short: {len(raw):,} of {count:,} bytes at {offset:,}")
    return raw.view(dtype).reshape(shape)
