"""A source, tensor by tensor, into a checkpoint: never more than one tensor in memory."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuspec import checkpoint
from tpuspec.checkpoint_writer import Block, CheckpointWriter, blocks
from tpuspec.config import Quantization
from tpuspec.int8_weights import quantize_weight
from tpuspec.tensor_source import Source

Progress = Callable[[int, int], None]


def convert(source: Source, directory: str | os.PathLike[str], *,
            dtype: jnp.dtype | str | None = None, quantization: Quantization | None = None,
            progress: Progress = lambda done, total: None) -> None:
    """Writes a new checkpoint. Interrupted, it leaves what is done behind, and the same
    call goes on with it.

    Args:
      dtype: of the weights that are not quantized; None keeps that of the source.
      quantization: of a source that is not quantized yet.
      progress: called with bytes written and in all.

    Raises:
      ValueError: naming a tensor that cannot be read or is not finite; nothing is left
        behind.
      OSError: too little room on the disk, and whatever else it says.
    """
    kept = source.dtype(dtype)
    config, provenance = source.config, dict(source.provenance)
    if quantization is not None:
        if config.quantization is not None:
            raise ValueError(f"the weights are {config.quantization} already, and what "
                             "rounding took from them is gone: quantize what they were made of")
        config = dataclasses.replace(config, quantization=quantization)
        # Scores that it tells of are not those of the quantized model.
        provenance = {"quantized_from": provenance}

    def fill(writer: CheckpointWriter, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        progress(writer.done_bytes, writer.total_bytes)
        for tensor, uses in source.pieces():
            whole = None
            for name, index, part in uses:
                quantized = quantization is not None and leaves[name].dtype == jnp.int8
                wanted = _lacking(writer, leaves, name, index, quantized)
                if not wanted:
                    continue
                whole = source.tensors[tensor].read() if whole is None else whole
                try:
                    _write(writer, leaves, wanted, part.take(whole), quantized)
                except _NotFinite as error:
                    raise ValueError(f"{tensor} holds numbers that are not finite") from error
                progress(writer.done_bytes, writer.total_bytes)
        writer.commit()
        progress(writer.done_bytes, writer.total_bytes)

    checkpoint.write(directory, config, kept, fill, source.vocabulary, provenance,
                     resume=_identity(source, config.to_json(), kept))


class _NotFinite(Exception):
    pass


def _lacking(writer: CheckpointWriter, leaves: Mapping[str, jax.ShapeDtypeStruct], name: str,
             index: int, quantized: bool) -> list[Block]:
    """Blocks to be made of one part: of itself, and of its scales if it becomes int8."""
    names = [name]
    if quantized:
        names.append(name.removesuffix("weight") + "scale")
    return [block for n in names for block in blocks(n, leaves[n], index) if writer.lacks(block)]


def _write(writer: CheckpointWriter, leaves: Mapping[str, jax.ShapeDtypeStruct],
           wanted: list[Block], rows: np.ndarray, quantized: bool) -> None:
    """Cast in blocks, for a copy of a whole embedding would be as large as all the rest."""
    if quantized:
        # Rounded to the dtype of the rest first, as if it had been stored so before.
        rows = rows.astype(leaves["embedding"].dtype)
        _check_finite(rows)
        steps, scale = (np.asarray(part) for part in quantize_weight(jnp.asarray(rows)))
    for block in wanted:
        name, _, start, stop = block
        whole = rows if not quantized else scale if name.endswith(".scale") else steps
        piece = whole[start:stop].astype(leaves[name].dtype)
        _check_finite(piece)
        writer.write(block, piece)


def _check_finite(piece: np.ndarray) -> None:
    if piece.dtype == np.int8:
        return
    # By the bits: asking each bfloat16 takes many times as long.
    kind, exponent = {2: (np.uint16, 0x7F80), 4: (np.uint32, 0x7F800000)}[piece.dtype.itemsize]
    if ((piece.view(kind) & kind(exponent)) == kind(exponent)).any():
        raise _NotFinite


def _identity(source: Source, config: Mapping[str, Any], dtype: jnp.dtype) -> dict[str, Any]:
    """What makes two conversions the same: the files, as far as they can be told apart by
    size and time, and what is made of them."""
    files = sorted(f for f in source.path.rglob("*") if f.is_file())
    stamps = [[str(f.relative_to(source.path)), f.stat().st_size, f.stat().st_mtime_ns]
              for f in files]
    return {"source": str(source.path), "model": config, "dtype": dtype.name,
            "files": hashlib.sha256(json.dumps(stamps).encode()).hexdigest()}
