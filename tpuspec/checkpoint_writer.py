"""Writes the arrays of a checkpoint part by part, in little memory, so that a run that was
cut off goes on where it was.

The arrays lie as Orbax lays them (zarr in one OCDBT database). A block is one
transaction; after it a line in the journal tells of it, with its checksum. Whatever
stands in the journal is on disk.
"""

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

WEIGHTS, CHECKSUMS, JOURNAL = "weights", "checksums.json", "progress.jsonl"
_CHUNK = 1024  # rows and columns; small beside a shard, so that few are read in vain
_BLOCK_BYTES = 64 << 20
_GIB = 1 << 30
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"

Block = tuple[str, int, int, int]  # parameter, part, first row, row behind the last


class CheckpointWriter:
    """Arrays of these names, shapes and dtypes, into ``directory / WEIGHTS``."""

    def __init__(self, directory: Path, leaves: Mapping[str, jax.ShapeDtypeStruct],
                 identity: Mapping[str, Any]):
        """What another ``identity`` left behind in the directory is thrown away.

        Raises:
          OSError: there is not enough room on the disk.
        """
        self._directory, self._leaves = directory, leaves
        self._sums = _read_journal(directory / JOURNAL, identity)
        self._pending: list[tuple[Block, np.ndarray]] = []
        self._context = ts.Context()  # one for all arrays, so that they share data files
        if not self._sums:
            shutil.rmtree(directory / WEIGHTS, ignore_errors=True)
            (directory / JOURNAL).write_text(json.dumps({"identity": identity}) + "\n")
        self.total_bytes = sum(_bytes(leaf) for leaf in leaves.values())
        self.done_bytes = sum(_bytes(leaves[block[0]], block) for block in self._sums)
        needed, free = self.total_bytes - self.done_bytes, shutil.disk_usage(directory).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"the weights need {needed / _GIB:.1f} GiB more and "
                                        f"{free / _GIB:.1f} GiB are free at {directory.parent}")
        self._journal = (directory / JOURNAL).open("a")

    def lacks(self, block: Block) -> bool:
        return block not in self._sums

    def write(self, block: Block, piece: np.ndarray) -> None:
        """Args: piece: the rows of the block, in the dtype of its parameter."""
        self._pending.append((block, np.ascontiguousarray(piece)))
        if sum(piece.nbytes for _, piece in self._pending) >= _BLOCK_BYTES:
            self.commit()

    def commit(self) -> None:
        """All that was written is on disk, and in the journal.

        Raises:
          OSError: what the disk says, such as that it is full.
        """
        try:
            self._store()
        except ValueError as error:  # as TensorStore calls whatever goes wrong
            raise OSError(f"{self._directory} cannot be written: {error}") from error
        for block, piece in self._pending:
            self._sums[block] = checksum(piece)
            self._journal.write(json.dumps([*block, self._sums[block]]) + "\n")
            self.done_bytes += piece.nbytes
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self._pending.clear()

    def _store(self) -> None:
        transaction = ts.Transaction(atomic=True)
        stores = {}  # opened once, for a transaction makes an array only once
        for name in dict.fromkeys(block[0] for block, _ in self._pending):
            spec = array_spec(self._directory / WEIGHTS, name, self._leaves[name])
            stores[name] = ts.open(spec, open=True, create=True, transaction=transaction,
                                   context=self._context)
        for block, piece in self._pending:
            of_block(stores[block[0]].result(), block).write(piece).result()
        transaction.commit_sync()

    def finish(self) -> None:
        """Raises RuntimeError naming a parameter that was not written."""
        self.commit()
        self._journal.close()
        sums: dict[str, list[list[Any]]] = {}
        for name, leaf in self._leaves.items():
            for block in all_blocks(name, leaf):
                if block not in self._sums:
                    raise RuntimeError(f"{name} was never written")
                sums.setdefault(name, []).append([*block[1:], self._sums[block]])
        weights = self._directory / WEIGHTS
        (weights / "_METADATA").write_text(json.dumps(_orbax_metadata(self._leaves)))
        (weights / "_CHECKPOINT_METADATA").write_text(json.dumps(
            {"item_handlers": _HANDLER, "metrics": {}, "performance_metrics": {},
             "init_timestamp_nsecs": None, "commit_timestamp_nsecs": None, "custom_metadata": {}}))
        (weights / "commit_success.txt").write_text("complete\n")
        (self._directory / CHECKSUMS).write_text(
            json.dumps({"algorithm": "sha256", "blocks": sums}, indent=0) + "\n")
        (self._directory / JOURNAL).unlink()

    def close(self) -> None:
        """What is in the journal stays."""
        self._journal.close()


def checksum(rows: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows).view(np.uint8).data).hexdigest()


def has_parts(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the first axis counts maps that read the same input (see ``Linears``)."""
    return len(shape) == (2 if name.endswith(".scale") else 3)


def blocks(name: str, leaf: jax.ShapeDtypeStruct, part: int) -> Iterator[Block]:
    """The pieces in which one part is written and summed."""
    rows, *columns = leaf.shape[has_parts(name, leaf.shape):]
    step = max(_CHUNK, _BLOCK_BYTES // (math.prod(columns) * leaf.dtype.itemsize)
               // _CHUNK * _CHUNK)
    for start in range(0, rows, step):
        yield name, part, start, min(start + step, rows)


def all_blocks(name: str, leaf: jax.ShapeDtypeStruct) -> Iterator[Block]:
    for part in range(leaf.shape[0] if has_parts(name, leaf.shape) else 1):
        yield from blocks(name, leaf, part)


def of_block(array: Any, block: Block) -> Any:
    """That piece of a whole parameter, or of an array in files."""
    name, part, start, stop = block
    return (array[part] if has_parts(name, array.shape) else array)[start:stop]


def array_spec(weights: Path, name: str, leaf: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """One array as Orbax stores it, in chunks of at most 1024 by 1024."""
    parts = has_parts(name, leaf.shape)
    chunks = [1] * parts + [min(n, _CHUNK) for n in leaf.shape[parts:]]
    return {
        "driver": "zarr", "store_data_equal_to_fill_value": True,
        "kvstore": {"driver": "ocdbt", "base": f"file://{weights}/", "path": f"{name}/"},
        "metadata": {"shape": list(leaf.shape), "chunks": chunks,
                     "dtype": _zarr_dtype(leaf.dtype), "dimension_separator": ".",
                     "compressor": {"id": "zstd", "level": 1}}}


def _zarr_dtype(dtype: np.dtype) -> str:
    return "bfloat16" if dtype.name == "bfloat16" else np.dtype(dtype).str


def _bytes(leaf: jax.ShapeDtypeStruct, block: Block | None = None) -> int:
    shape = leaf.shape
    if block is not None:
        name, _, start, stop = block
        shape = (stop - start, *shape[has_parts(name, shape):][1:])
    return math.prod(shape) * leaf.dtype.itemsize


def _read_journal(file: Path, identity: Mapping[str, Any]) -> dict[Block, str]:
    """The blocks that an earlier run of the same identity wrote."""
    if not file.is_file():
        return {}
    lines = file.read_text().splitlines(keepends=True)
    if not lines or lines[0] != json.dumps({"identity": identity}) + "\n":
        return {}
    kept = [line for line in lines if line.endswith("\n")]  # the last may be half a line
    file.write_text("".join(kept))
    rows = [json.loads(line) for line in kept[1:]]
    return {(name, part, start, stop): digest for name, part, start, stop, digest in rows}


def _orbax_metadata(leaves: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """What Orbax reads to know the tree: names in nested dictionaries (key type 2), and
    arrays that belong to no device until somebody asks for a sharding."""
    tree = {}
    for name, leaf in leaves.items():
        keys = tuple(name.split("."))
        tree[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False,
                               "write_shape": list(leaf.shape)}}
    return {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True, "custom_metadata": None}
