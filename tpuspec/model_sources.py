"""Opens whatever people have as a ``Source``, told apart by looking."""

import operator
import os
from pathlib import Path

import jax.numpy as jnp

from tpuspec import checkpoint, huggingface, t5x_files, t5x_layout
from tpuspec.checkpoint_location import CONFIG_FILE, find, path_of, reading
from tpuspec.checkpoint_writer import WEIGHTS, has_parts
from tpuspec.config import Activation
from tpuspec.tensor_source import Part, Source
from tpuspec.tensorstore_files import FLOATS, array_spec, open_array
from tpuspec.vocabulary_files import find_vocabulary


def open_source(directory: str | os.PathLike[str], *, activation: Activation | None = None,
                ) -> Source:
    """A checkpoint of ours, of Hugging Face's layout, or of T5X.

    Args:
      activation: for T5X, whose files do not say which gate a model has.

    Raises:
      ValueError: it is none of them, more than one, or damaged; a hint where it may be.
    """
    with reading(directory):
        return _open_source(directory, activation)


def _open_source(directory: str | os.PathLike[str], activation: Activation | None) -> Source:
    if "://" in os.fspath(directory):
        raise ValueError(f"{directory} is not on this machine: copy it here first")
    path = path_of(directory)
    if (path / "state").is_dir() and t5x_files.is_t5x(path / "state"):
        path = path / "state"  # where Orbax puts the item that T5X saves
    kinds = {
        f"a checkpoint ({CONFIG_FILE})": (path / CONFIG_FILE).is_file(),
        f"Hugging Face's layout ({huggingface.CONFIG_FILE})":
            (path / huggingface.CONFIG_FILE).is_file(),
        "T5X's layout": t5x_files.is_t5x(path) and not (
            path.parent / CONFIG_FILE).is_file()}  # then these are weights of ours
    if sum(kinds.values()) > 1:
        raise ValueError(f"{path} looks like several things: "
                         + " and ".join(kind for kind, found in kinds.items() if found))
    ours, theirs, t5x = kinds.values()
    if t5x:
        return _open_t5x(path, activation)
    if activation is not None:
        raise ValueError("activation is for T5X checkpoints: this one says its own")
    if theirs:
        return huggingface.open_huggingface(path)
    if ours or not path.is_dir():
        return _open_ours(find(path))
    near = [str(p) for p in sorted(path.iterdir()) if p.is_dir() and (
        t5x_files.is_t5x(p) or (p / huggingface.CONFIG_FILE).is_file()
        or t5x_files.is_t5x(p / "state"))]
    if near:
        raise ValueError(f"no model at {path}; did you mean {' or '.join(near[:6])}?")
    return _open_ours(find(path))


def describe(directory: str | os.PathLike[str]) -> checkpoint.Description:
    """What any of them is, without reading its arrays."""
    with reading(directory):
        if (path_of(directory) / CONFIG_FILE).is_file():
            return checkpoint.describe(directory)
        return open_source(directory).describe()


def _open_ours(path: Path) -> Source:
    found = checkpoint.describe(path)
    leaves = checkpoint.AbstractModel(found.config, checkpoint.checked_dtype(found.dtype)).leaves
    tensors = {name: open_array(array_spec(path / WEIGHTS, name), name,
                                dtypes=("int8",) if leaf.dtype == jnp.int8 else FLOATS)
               for name, leaf in leaves.items()}
    checkpoint.check_leaves({name: tensor.shape for name, tensor in tensors.items()},
                            {name: leaf.shape for name, leaf in leaves.items()}, str(path))
    parts = {name: tuple(Part(name, operator.itemgetter(i)) for i in range(leaf.shape[0]))
             if has_parts(name, leaf.shape) else (Part(name),) for name, leaf in leaves.items()}
    return Source(path=path, layout=found.layout, config=found.config, tensors=tensors,
                  parts=parts, vocabulary=found.vocabulary, provenance=found.provenance)


def _open_t5x(path: Path, activation: Activation | None) -> Source:
    layout, tensors = t5x_files.open_t5x(path)
    config, parts, guesses = t5x_layout.read_layout(tensors, str(path), activation)
    name = path.parent.name if path.name == "state" else path.name
    return Source(path=path, layout=layout, config=config, tensors=tensors, parts=parts,
                  vocabulary=find_vocabulary(path, rows=config.vocab_size), guesses=guesses,
                  provenance={"imported_from": name, "layout": layout})
