"""Checkpoints: a directory with everything that a model needs to be served.

    NAME/
      model.json        configuration of the model, provenance
      weights/          one Orbax tree of arrays, named as the module's parameters
      spiece.model      the vocabulary, if it has one (and vocabulary.json)

``save`` writes under a temporary name and renames at the end, so NAME exists
only when it is whole. ``load`` checks every leaf's name and shape before it
reads any array, and reads each array straight into the sharding asked for.
"""

import dataclasses
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from tpuspec.config import T5Config
from tpuspec.t5 import T5
from tpuspec.vocabulary import MODEL_FILE, Vocabulary

CONFIG_FILE, WEIGHTS = "model.json", "weights"
_UNFINISHED = ".unfinished-"

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
    final = Path(directory).expanduser().absolute()
    if final.exists():
        raise ValueError(f"{final} exists already; choose another name or remove it first")
    arrays = named_parameters(model)
    dtype = _checked_dtype(dtype if dtype is not None else arrays["embedding"].dtype)
    leaves = AbstractModel(model.config, dtype).leaves
    arrays = {name: array.astype(leaves[name].dtype) for name, array in arrays.items()}
    scratch = final.with_name(f"{final.name}{_UNFINISHED}{secrets.token_hex(4)}")
    scratch.mkdir(parents=True)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(scratch / WEIGHTS, args=ocp.args.PyTreeSave(_nest(arrays)))
        # Orbax writes the temporary path into its mark; only its presence counts.
        (scratch / WEIGHTS / "commit_success.txt").write_text("complete\n")
        if vocabulary is not None:
            vocabulary.save(scratch)
        (scratch / CONFIG_FILE).write_text(json.dumps(
            {"model": model.config.to_json(), "dtype": dtype.name,
             "provenance": dict(provenance or {})}, indent=1) + "\n")
        scratch.rename(final)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def load(directory: str | os.PathLike[str], *, dtype: jnp.dtype | None = None,
         shardings: Shardings | None = None) -> LoadedModel:
    """Reads a checkpoint that ``save`` wrote, on any number of devices.

    Args:
      directory: relative, with ``~`` or a trailing slash as you like.
      dtype: of the weights in memory, other than int8; None for that on disk.
      shardings: called with the abstract parameters and the configuration,
        returns a tree of shardings like the parameters, for example
        ``functools.partial(mesh.param_shardings, mesh=mesh)``; None puts
        everything on the first device.

    Raises:
      ValueError: no such checkpoint (with a hint where it may be), an
        unfinished one, or one whose leaves do not fit its configuration.
    """
    path = find(directory)
    config, stored_dtype, provenance = _configuration(path / CONFIG_FILE)
    dtype = _checked_dtype(dtype if dtype is not None else stored_dtype)
    abstract = AbstractModel(config, dtype, shardings)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(path / WEIGHTS).item_metadata.tree
        names, leaves = _named(tree)
        check_leaves({name: leaf.shape for name, leaf in zip(names, leaves, strict=True)},
                     {name: leaf.shape for name, leaf in abstract.leaves.items()}, str(path))
        _check_int8({name: leaf.dtype for name, leaf in zip(names, leaves, strict=True)},
                    abstract.leaves, str(path))
        item = _nest(abstract.leaves)
        restored = checkpointer.restore(path / WEIGHTS, args=ocp.args.PyTreeRestore(
            item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)))
    names, arrays = _named(restored)
    has_vocabulary = (path / MODEL_FILE).is_file()
    return LoadedModel(model=abstract.build(dict(zip(names, arrays, strict=True))),
                       config=config, provenance=provenance,
                       vocabulary=Vocabulary.load(path) if has_vocabulary else None)


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
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a checkpoint says of itself; no array is read.

    ``dtype`` is of the weights that are not quantized, ``parameters`` does not count
    the scales of those that are, ``weight_bytes`` does.
    """

    path: Path
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
    leaves = AbstractModel(config, _checked_dtype(dtype)).leaves
    return Description(
        path=path, config=config, dtype=dtype, provenance=provenance,
        parameters=sum(math.prod(leaf.shape) for name, leaf in leaves.items()
                       if not name.endswith(".scale")),
        weight_bytes=sum(math.prod(leaf.shape) * leaf.dtype.itemsize
                         for leaf in leaves.values()),
        vocabulary=Vocabulary.load(path) if (path / MODEL_FILE).is_file() else None)


def find(directory: str | os.PathLike[str]) -> Path:
    """The absolute path of a whole checkpoint, or a ValueError with a hint."""
    path = Path(directory).expanduser().absolute()
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        holder = _holders([path.parent]) if path.exists() else ""
        raise ValueError(f"no checkpoint at {path}: it {kind}; a checkpoint is a "
                         f"directory that holds {CONFIG_FILE}{holder}")
    if _UNFINISHED in path.name:
        raise ValueError(f"{path} is what an interrupted save left behind, not a checkpoint")
    if (path / CONFIG_FILE).is_file():
        if not (path / WEIGHTS / "_METADATA").is_file():
            raise ValueError(f"{path / WEIGHTS} is missing or unfinished")
        return path
    if (path / "config.json").is_file():
        raise ValueError(f"{path} is in the Hugging Face layout: tpuspec convert makes a "
                         "checkpoint of it")
    found = sorted(p.name for p in path.iterdir())[:6]
    near = _holders([path.parent, *(p for p in sorted(path.iterdir()) if p.is_dir())])
    raise ValueError(f"no checkpoint at {path}: it holds {found or 'nothing'}, "
                     f"not {CONFIG_FILE}{near}")


def _holders(candidates: Iterable[Path]) -> str:
    near = [str(p) for p in candidates
            if (p / CONFIG_FILE).is_file() and _UNFINISHED not in p.name]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _checked_dtype(dtype: Any) -> jnp.dtype:
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
