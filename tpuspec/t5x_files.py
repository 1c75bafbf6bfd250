"""Reads what T5X saves: its own form (one msgpack file and zarr folders) and Orbax's."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgpack
import numpy as np

from tpuspec.lazy_tensor import Tensor
from tpuspec.tensorstore_files import array_spec, open_array

STATE_FILE, ORBAX_FILE = "checkpoint", "_METADATA"
_TARGETS = (("optimizer", "target"), ("target",), ("params",))  # legacy, T5X, flax
_SPEC = {"driver", "kvstore", "metadata"}
_PLACEHOLDER = "PLACEHOLDER://"
_CHUNKED = "__msgpack_chunked_array__"


def is_t5x(path: Path) -> bool:
    return (path / STATE_FILE).is_file() or (path / ORBAX_FILE).is_file()


def open_t5x(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The layout's name, and tensors by dotted path, such as ``encoder.encoder_norm.scale``.

    Raises:
      ValueError: naming the file or the array that cannot be read.
    """
    if (path / ORBAX_FILE).is_file():
        return "t5x-orbax", _open_orbax(path)
    content = (path / STATE_FILE).read_bytes()
    if content.startswith(b"model_checkpoint_path"):
        raise ValueError(f"{path} is a TensorFlow (Mesh) checkpoint, which is not read: T5X's "
                         "own checkpoints of the same models are")
    try:
        state = msgpack.unpackb(content, ext_hook=_extension, raw=False, strict_map_key=False)
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"{path / STATE_FILE} cannot be read: {error}") from error
    version = state.get("version")
    if isinstance(version, int) and version < 2:
        raise ValueError(f"{path} is of T5X's version {version}; supported are 2 and 3")
    return ("t5x" if version is not None else "t5x-orbax"), {
        name: _tensor(path, name, stored) for name, stored in _flat(_target(state, path))}


def _target(state: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    for keys in _TARGETS:
        node: Any = state
        for key in keys:
            node = node.get(key) if isinstance(node, Mapping) else None
        if isinstance(node, Mapping):
            inner = node.get("params")  # flax's own name for it, at times once more
            return inner if isinstance(inner, Mapping) else node
    raise ValueError(f"{path} holds no model: its keys are {sorted(state)}, none of "
                     f"{', '.join('.'.join(keys) for keys in _TARGETS)}")


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if str(key).startswith("__"):
            continue  # flaxformer's __save_format_metadata__ and __version__
        if isinstance(value, Mapping) and not _SPEC <= value.keys() and _CHUNKED not in value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _tensor(path: Path, name: str, stored: Any) -> Tensor:
    if isinstance(stored, Mapping) and _CHUNKED in stored:
        chunks = stored["chunks"]
        flat = np.concatenate([np.ravel(chunks[str(i)]) for i in range(len(chunks))])
        stored = flat.reshape([stored["shape"][str(i)] for i in range(len(stored["shape"]))])
    if isinstance(stored, np.ndarray):
        return Tensor(stored.shape, stored.dtype, stored.copy)
    if isinstance(stored, str) and stored.startswith(_PLACEHOLDER):
        return open_array(array_spec(path, stored.removeprefix(_PLACEHOLDER)), name)
    if not isinstance(stored, Mapping):
        raise ValueError(f"{name} is a {type(stored).__name__}, not an array")
    kvstore, metadata = stored["kvstore"], stored["metadata"]
    folder = kvstore.get("path") or stored.get("path")
    if not folder or not (path / folder).resolve().is_relative_to(path.resolve()):
        raise ValueError(f"{name} is said to lie at {folder}, outside of {path}")
    tensor = open_array(array_spec(path, str(folder).rstrip("/")), name)
    if tuple(metadata.get("shape", tensor.shape)) != tensor.shape:
        raise ValueError(f"{name} is {list(tensor.shape)}, and {STATE_FILE} says "
                         f"{list(metadata['shape'])}")
    return tensor


def _open_orbax(path: Path) -> dict[str, Tensor]:
    try:
        stored = json.loads((path / ORBAX_FILE).read_text(encoding="utf-8"))
        entries = [([str(key["key"]) for key in entry["key_metadata"]],
                    entry["value_metadata"]) for entry in stored["tree_metadata"].values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / ORBAX_FILE} cannot be read: {error!r}") from error
    state: dict[str, Any] = {}
    for keys, value in entries:
        if value.get("skip_deserialize"):
            continue  # an empty node
        *parents, last = keys
        node = state
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = ".".join(keys)
    zarr3 = bool(stored.get("use_zarr3"))
    return {name: open_array(array_spec(path, where, zarr3=zarr3), name)
            for name, where in _flat(_target(state, path))}


def _extension(code: int, payload: bytes) -> Any:
    """Flax's extension types: arrays, complex numbers, numbers of NumPy."""
    if code not in (1, 3):
        raise ValueError(f"extension type {code} is not read")
    shape, dtype, raw = msgpack.unpackb(payload, raw=True)
    name = dtype.decode() if isinstance(dtype, bytes) else dtype
    kind = jnp.dtype(jnp.bfloat16) if name == "bfloat16" else np.dtype(name)
    if math.prod(shape) * kind.itemsize != len(raw):
        raise ValueError(f"an array {list(shape)} of {name} has {len(raw):,} bytes")
    return np.frombuffer(raw, kind).reshape(shape)
