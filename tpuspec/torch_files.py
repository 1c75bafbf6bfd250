"""Reads ``pytorch_model.bin`` without PyTorch and without running what it says.

Both forms: a zip archive (since PyTorch 1.6), and several pickles in a row, then the
storages. A pickle is a program; this one may call nothing but the four functions that
put a dictionary of tensors together, and gets ours in their place.
"""

import dataclasses
import functools
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import jax.numpy as jnp
import numpy as np

from tpuspec.lazy_tensor import Tensor, read_at

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_STORAGES = {"FloatStorage": np.dtype(np.float32), "HalfStorage": np.dtype(np.float16),
             "BFloat16Storage": jnp.dtype(jnp.bfloat16), "DoubleStorage": np.dtype(np.float64),
             "LongStorage": np.dtype(np.int64), "IntStorage": np.dtype(np.int32),
             "CharStorage": np.dtype(np.int8), "ByteStorage": np.dtype(np.uint8),
             "BoolStorage": np.dtype(bool)}
_SUPPORTED = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class _Storage:
    key: str
    dtype: np.dtype
    numel: int


@dataclasses.dataclass(frozen=True)
class _View:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def open_torch(file: Path) -> dict[str, Tensor]:
    """Raises ValueError naming the file, or what it holds that is no tensor."""
    try:
        if zipfile.is_zipfile(file):
            state, offsets = _read_zip(file)
        else:
            state, offsets = _read_pickles(file)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError,
            pickle.UnpicklingError, zipfile.BadZipFile, struct.error) as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from error
    size = file.stat().st_size
    tensors = {}
    for name, view in state.items():
        try:
            tensors[name] = _tensor(file, name, view, offsets, size)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file.name}: {name} is no tensor: {error}") from error
    return tensors


def _tensor(file: Path, name: str, view: Any, offsets: Mapping[str, int], size: int) -> Tensor:
    if not isinstance(view, _View):
        raise ValueError(f"{file.name}: {name} is a {type(view).__name__}, not a tensor")
    storage, dtype = view.storage, view.storage.dtype
    if dtype.name not in _SUPPORTED:
        raise ValueError(f"{name} is stored as {dtype.name}; supported are "
                         f"{', '.join(_SUPPORTED)}")
    if len(view.shape) != len(view.stride) or min((*view.shape, *view.stride, view.offset)) < 0:
        raise ValueError(f"{file.name}: {name} has the impossible shape {view.shape}")
    extent = 1 + sum((n - 1) * step for n, step in zip(view.shape, view.stride, strict=True))
    if 0 in view.shape or view.offset + extent > storage.numel:
        raise ValueError(f"{file.name}: {name} reaches beyond its storage")
    begin = offsets[storage.key] + view.offset * dtype.itemsize
    if begin + extent * dtype.itemsize > size:
        raise ValueError(f"{file.name} cannot be read: it is cut short in {name}")

    def read() -> np.ndarray:
        flat = read_at(file, begin, (extent,), dtype)
        return np.lib.stride_tricks.as_strided(
            flat, view.shape, [step * dtype.itemsize for step in view.stride], writeable=False)

    return Tensor(view.shape, dtype, read)


def _read_zip(file: Path) -> tuple[Mapping[str, Any], dict[str, int]]:
    with zipfile.ZipFile(file) as archive, file.open("rb") as raw:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise ValueError("its numbers are big-endian")
        offsets = {}
        for name, info in entries.items():
            if not name.startswith("data/"):
                continue
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{name} is compressed")
            raw.seek(info.header_offset)
            head = raw.read(30)  # the local header, which repeats two lengths at its end
            names, extra = struct.unpack("<HH", head[26:30])
            offsets[name.removeprefix("data/")] = info.header_offset + 30 + names + extra
        with archive.open(entries["data.pkl"]) as stream:
            return _dictionary(_Unpickler(stream).load()), offsets


def _read_pickles(file: Path) -> tuple[Mapping[str, Any], dict[str, int]]:
    with file.open("rb") as stream:
        if _Unpickler(stream).load() != _MAGIC or _Unpickler(stream).load() != _PROTOCOL:
            raise ValueError("it is no PyTorch file")
        if _Unpickler(stream).load().get("little_endian") is not True:
            raise ValueError("its numbers are big-endian")
        unpickler = _Unpickler(stream)
        state = _dictionary(unpickler.load())
        offsets = {}
        keys = _Unpickler(stream).load()
        position = stream.tell()
        for key in keys:
            stream.seek(position)
            numel = int.from_bytes(stream.read(8), "little")
            offsets[key] = position + 8
            position += 8 + numel * unpickler.storages[key].dtype.itemsize
        return state, offsets


def _dictionary(state: Any) -> Mapping[str, Any]:
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, not a dictionary of tensors")
    return state


def _rebuild_tensor(storage: _Storage, offset: int, shape: tuple[int, ...],
                    stride: tuple[int, ...], *_: Any) -> _View:
    return _View(storage, offset, tuple(shape), tuple(stride))


def _rebuild_parameter(view: _View, *_: Any) -> _View:
    return view


class _Unpickler(pickle.Unpickler):
    """Names in a pickle stand for these and nothing else."""

    _ALLOWED: Mapping[tuple[str, str], Callable[..., Any]] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    }

    def __init__(self, stream: IO[bytes]):
        super().__init__(stream)
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return functools.partial(_Storage, dtype=_STORAGES[name])
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it wants to call {module}.{name}; nothing but tensors "
                                         "is taken from a pickle")
        return self._ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, make, key, _, numel, *view = pid
        if kind != "storage" or any(view):  # views of storages went out of use in 2019
            raise pickle.UnpicklingError(f"it refers to {pid}")
        return self.storages.setdefault(key, make(key=key, numel=numel))
