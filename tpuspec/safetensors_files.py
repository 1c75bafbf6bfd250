"""Reads safetensors files: a header in JSON, then the tensors, one after the other."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpuspec.lazy_tensor import Tensor, read_at

_DTYPES = {"F32": np.dtype(np.float32), "BF16": jnp.dtype(jnp.bfloat16),
           "F16": np.dtype(np.float16)}
_LONGEST_HEADER = 100 * 1000 * 1000  # as in the format's own reader


def open_safetensors(file: Path) -> dict[str, Tensor]:
    """Raises ValueError naming the file, or a tensor of a type that is not supported."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= _LONGEST_HEADER:
                raise ValueError(f"its header cannot be {length} bytes long")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        start, size = 8 + length, file.stat().st_size
        return {name: _tensor(file, name, entry, start, size) for name, entry in header.items()}
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, _Unsupported):
            raise
        raise ValueError(f"{file.name} cannot be read: {error}") from error


class _Unsupported(ValueError):
    pass


def _tensor(file: Path, name: str, entry: dict[str, Any], start: int, size: int) -> Tensor:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] not in _DTYPES:
        raise _Unsupported(f"{name} is stored as {entry['dtype']}; supported are "
                           f"{', '.join(_DTYPES)}")
    dtype = _DTYPES[entry["dtype"]]
    if end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
        raise ValueError(f"{name} {list(shape)} cannot lie in bytes {begin} to {end}")
    if start + end > size:
        raise ValueError(f"it is cut short: {name} ends at byte {start + end:,} of {size:,}")
    return Tensor(shape, dtype, functools.partial(read_at, file, start + begin, shape, dtype))
