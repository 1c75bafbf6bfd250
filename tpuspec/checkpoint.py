"""Checkpoints: a directory with everything that a model needs to be served.

    NAME/
      model.json        configuration of the model, provenance
      weights/          one Orbax tree of arrays, named as the module's parameters
      spiece.model      the vocabulary, if it has one (and vocabulary.json)

``save`` writes under a temporary name and renames at the end, so NAME exists
only when it is whole. ``load`` checks every leaf's name and shape before it
reads any array, and reads each array straight into the sharding asked for.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from tpuspec.checkpoint_location import CONFIG_FILE, UNFINISHED, find, reading
from tpuspec.checkpoint_writer import (
    CHECKSUMS,
    WEIGHTS,
    CheckpointWriter,
    all_blocks,
    checksum,
    has_parts,
    of_block,
)
from tpuspec.config import T5Config
from tpuspec.t5 import T5
from tpuspec.tensorstore_files import array_spec, open_store
from tpuspec.vocabulary import Vocabulary
from tpuspec.vocabulary_files import find_vocabulary

LAYOUT = "tpuspec"
_LOCK = "lock"

Shardings = Callable[[nnx.State, T5Config], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with what belongs to it; ``provenance`` says where it came from."""

    model: T5
    config: T5Config
    vocabulary: Vocabulary | None
    provenance: dict[str, Any]


class AbstractModel:
    """Names, shapes and shardings of a model's parameters, without memory.

    Names are dotted paths in the module, such as ``decoder_layers.0.mlp.wo.weight``.
    """

    def __init__(self, config: T5Config, dtype: jnp.dtype, shardings: Shardings | None = None):
        abstract = nnx.eval_shape(lambda: T5(config, dtype=dtype, rngs=nnx.Rngs(0)))
        self._graph, self._state = nnx.split(abstract)
        names, leaves = _named(self._state)
        if shardings is None:
            wanted = [jax.sharding.SingleDeviceSharding(jax.devices()[0])] * len(leaves)
        else:
            wanted = jax.tree.leaves(shardings(self._state, config))
        self.leaves = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
                       for name, leaf, sharding in zip(names, leaves, wanted, strict=True)}

    def build(self, arrays: Mapping[str, jax.Array]) -> T5:
        treedef = jax.tree.structure(self._state)
        return nnx.merge(self._graph, jax.tree.unflatten(
            treedef, [arrays[name] for name in self.leaves]))


def named_parameters(model: T5) -> dict[str, jax.Array]:
    """A model's parameters by dotted name."""
    return dict(zip(*_named(nnx.state(model, nnx.Param)), strict=True))


def check_leaves(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]],
                 source: str) -> None:
    """Raises ValueError that names every missing, unexpected and misshaped leaf."""
    problems = [
        *(f"missing {name} {list(wanted[name])}" for name in sorted(wanted.keys() - found.keys())),
        *(f"unexpected {name} {list(found[name])}"
          for name in sorted(found.keys() - wanted.keys())),
        *(f"misshaped {name}: {list(found[name])}, wanted {list(shape)}"
          for name, shape in sorted(wanted.items())
          if name in found and tuple(found[name]) != tuple(shape))]
    if problems:
        more = f" and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise ValueError(f"{source} does not fit its configuration: "
                         + "; ".join(problems[:12]) + more)


def save(directory: str | os.PathLike[str], model: T5, vocabulary: Vocabulary | None, *,
         provenance: Mapping[str, Any] | None = None, dtype: jnp.dtype | None = None) -> None:
    """Writes a new checkpoint; ``dtype`` is that of the weights on disk, other than int8.

    Raises:
      ValueError: the directory exists, or dtype is neither float32 nor bfloat16.
      OSError: and whatever else the disk says; then nothing is left behind.
    """
    arrays = named_parameters(model)
    dtype = checked_dtype(dtype if dtype is not None else arrays["embedding"].dtype)

    def fill(writer: CheckpointWriter, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        for name, array in arrays.items():
            whole = np.asarray(array.astype(leaves[name].dtype))
            for block in all_blocks(name, leaves[name]):
                writer.write(block, of_block(whole, block))

    write(directory, model.config, dtype, fill, vocabulary, provenance or {})


def write(directory: str | os.PathLike[str], config: T5Config, dtype: jnp.dtype,
          fill: Callable[[CheckpointWriter, Mapping[str, jax.ShapeDtypeStruct]], None],
          vocabulary: Vocabulary | None, provenance: Mapping[str, Any], *,
          resume: Mapping[str, Any] | None = None) -> None:
    """A new checkpoint whose arrays ``fill`` hands to the writer, all of them.

    Args:
      resume: what this run would write, in JSON: what an interrupted run that would
        have written the same left behind is gone on with, and left behind again. None:
        nothing is left behind by any failure.

    Raises:
      ValueError: the directory exists, another process writes it, or fill says so;
        then nothing is left behind.
    """
    final = Path(directory).expanduser().absolute()
    if os.path.lexists(final):  # a link to nothing, too
        raise ValueError(f"{final} exists already; choose another name or remove it first")
    name = secrets.token_hex(4) if resume is None else "resumable"
    scratch = final.with_name(f"{final.name}{UNFINISHED}{name}")
    scratch.mkdir(parents=True, exist_ok=resume is not None)
    leaves = AbstractModel(config, dtype).leaves
    with _alone(scratch):
        try:
            writer = CheckpointWriter(scratch, leaves, resume or {})
            with contextlib.closing(writer):
                fill(writer, leaves)
                writer.finish()
            if vocabulary is not None:
                vocabulary.save(scratch)
            (scratch / CONFIG_FILE).write_text(json.dumps(
                {"model": config.to_json(), "dtype": dtype.name,
                 "provenance": dict(provenance)}, indent=1) + "\n")
            (scratch / _LOCK).unlink()
            scratch.rename(final)
        except BaseException as error:
            if resume is None or isinstance(error, ValueError):
                shutil.rmtree(scratch, ignore_errors=True)
            raise


@contextlib.contextmanager
def _alone(scratch: Path) -> Iterator[None]:
    with (scratch / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another process is writing {scratch}") from error
        yield


def load(directory: str | os.PathLike[str], *, dtype: jnp.dtype | None = None,
         shardings: Shardings | None = None, verify: bool = False) -> LoadedModel:
    """Reads a checkpoint that ``save`` wrote, on any number of devices.

    Args:
      directory: relative, with ``~`` or a trailing slash as you like, or ``gs://``.
      dtype: of the weights in memory, other than int8; None for that on disk.
      shardings: called with the abstract parameters and the configuration,
        returns a tree of shardings like the parameters, for example
        ``functools.partial(mesh.param_shardings, mesh=mesh)``; None puts
        everything on the first device.
      verify: compare checksums first, which reads everything once more.

    Raises:
      ValueError: no such checkpoint (with a hint where it may be), an
        unfinished one, or one whose leaves do not fit its configuration.
    """
    path = find(directory)
    if verify:
        check_sums(path)
    config, stored_dtype, provenance = _configuration(path / CONFIG_FILE)
    dtype = checked_dtype(dtype if dtype is not None else stored_dtype)
    abstract = AbstractModel(config, dtype, shardings)
    # Arrays pass through the host on their way, but never more than these at once.
    largest = max(math.prod(leaf.shape) * 4 for leaf in abstract.leaves.values())
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=2 + 2 * largest // 10**9)
    with ocp.Checkpointer(handler) as checkpointer:
        metadata = checkpointer.metadata(path / WEIGHTS).item_metadata
        if metadata is None:
            raise ValueError(f"{path / WEIGHTS} is damaged: its arrays cannot be listed")
        names, leaves = _named(metadata.tree)
        stored = dict(zip(names, leaves, strict=True))
        check_leaves({name: leaf.shape for name, leaf in stored.items()},
                     {name: leaf.shape for name, leaf in abstract.leaves.items()}, str(path))
        _check_int8({name: leaf.dtype for name, leaf in stored.items()}, abstract.leaves,
                    str(path))
        item = _nest(abstract.leaves)
        restored = checkpointer.restore(path / WEIGHTS, args=ocp.args.PyTreeRestore(
            item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)))
    names, arrays = _named(restored)
    return LoadedModel(model=abstract.build(dict(zip(names, arrays, strict=True))),
                       config=config, provenance=provenance, vocabulary=find_vocabulary(path))


def check_sums(directory: str | os.PathLike[str]) -> None:
    """Reads every array, a piece at a time, and compares it with the sums kept beside.

    Raises:
      ValueError: naming the first array that changed since it was written, or that has
        no sums, as checkpoints of before they were kept.
    """
    path = find(directory)
    if not (path / CHECKSUMS).is_file():
        raise ValueError(f"{path} has no {CHECKSUMS} to compare with")
    config, dtype, _ = _configuration(path / CONFIG_FILE)
    with reading(path / CHECKSUMS):
        stored = json.loads((path / CHECKSUMS).read_text(encoding="utf-8"))["blocks"]
        sums = {name: sorted((int(part), int(start), int(stop), str(wanted))
                             for part, start, stop, wanted in rows)
                for name, rows in stored.items()}
    for name, leaf in AbstractModel(config, checked_dtype(dtype)).leaves.items():
        store = open_store(array_spec(path / WEIGHTS, name), name)
        parts = has_parts(name, leaf.shape)
        reached = [0] * (leaf.shape[0] if parts else 1)
        for part, start, stop, wanted in sums.get(name, []):
            if not (part < len(reached) and reached[part] == start < stop <= leaf.shape[parts]):
                break
            reached[part] = stop
            if checksum(of_block(store, (name, part, start, stop)).read().result()) != wanted:
                raise ValueError(f"{name} in {path} is not what was written: its checksum differs")
        if min(reached) < leaf.shape[parts]:
            raise ValueError(f"{path / CHECKSUMS} has no sums of all of {name}")


def _check_int8(found: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct],
                source: str) -> None:
    """Between float types a cast is rounding; to and from int8 it makes other numbers."""
    wrong = [f"{name} is {jnp.dtype(found[name]).name}, wanted {leaf.dtype.name}"
             for name, leaf in sorted(wanted.items())
             if (found[name] == jnp.int8) != (leaf.dtype == jnp.int8)]
    if wrong:
        more = f" and {len(wrong) - 12} more" if len(wrong) > 12 else ""
        raise ValueError(f"{source} does not fit its configuration: "
                         + "; ".join(wrong[:12]) + more)


def _configuration(file: Path) -> tuple[T5Config, str, dict[str, Any]]:
    """Model, dtype on disk and provenance, or a ValueError that names the file."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        return T5Config.from_json(stored["model"]), str(stored["dtype"]), dict(stored["provenance"])
    except KeyError as error:
        raise ValueError(f"{file} is damaged: it lacks {error}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a model in files says of itself; no array is read.

    ``layout`` is of the files. ``dtype`` is of the weights that are not quantized,
    ``parameters`` does not count the scales of those that are, ``weight_bytes`` does.
    """

    path: Path
    layout: str
    config: T5Config
    dtype: str
    parameters: int
    weight_bytes: int
    vocabulary: Vocabulary | None
    provenance: dict[str, Any]


def describe(directory: str | os.PathLike[str]) -> Description:
    """Raises ValueError as ``load`` does for what is no whole checkpoint."""
    path = find(directory)
    config, dtype, provenance = _configuration(path / CONFIG_FILE)
    return describe_model(path, LAYOUT, config, dtype, find_vocabulary(path), provenance)


def describe_model(path: Path, layout: str, config: T5Config, dtype: str,
                   vocabulary: Vocabulary | None, provenance: Mapping[str, Any]) -> Description:
    """Args: dtype: float16 has the shapes and, cast to bfloat16, the size of that."""
    dtype_in_memory = checked_dtype("bfloat16" if dtype == "float16" else dtype)
    leaves = AbstractModel(config, dtype_in_memory).leaves
    return Description(
        path=path, layout=layout, config=config, dtype=dtype, provenance=dict(provenance),
        vocabulary=vocabulary,
        parameters=sum(math.prod(leaf.shape) for name, leaf in leaves.items()
                       if not name.endswith(".scale")),
        weight_bytes=sum(math.prod(leaf.shape) * leaf.dtype.itemsize
                         for leaf in leaves.values()))


def checked_dtype(dtype: Any) -> jnp.dtype:
    dtype = jnp.dtype(dtype)
    if dtype.name not in ("float32", "bfloat16"):
        raise ValueError("dtype must be float32 or bfloat16 (T5 activations overflow in "
                         f"float16), got {dtype.name}")
    return dtype


def _named(tree: Any) -> tuple[list[str], list[Any]]:
    """Dotted names and leaves, in the tree's order."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [".".join(str(getattr(key, "key", getattr(key, "idx", ""))) for key in path
                      if not isinstance(key, jax.tree_util.GetAttrKey))
             for path, _ in pairs]
    return names, [leaf for _, leaf in pairs]


def _nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries of dotted names: what Orbax stores."""
    root: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return root
