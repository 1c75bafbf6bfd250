"""What every checkpoint is to us, whoever wrote it: named tensors that are read one at
a time, and for each of our parameters the tensors that are its parts."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuspec.checkpoint import (
    AbstractModel,
    Description,
    LoadedModel,
    Shardings,
    describe_model,
)
from tpuspec.checkpoint_writer import has_parts
from tpuspec.config import T5Config
from tpuspec.lazy_tensor import Tensor
from tpuspec.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a parameter: ``take`` makes it, in our layout, of the whole tensor."""

    tensor: str
    take: Callable[[np.ndarray], np.ndarray] = lambda array: array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A model in files.

    Attributes:
      path: what was opened.
      layout: of its tensors, in one word.
      tensors: by their own names.
      parts: our dotted parameter name -> its parts along its first axis, or the one
        that is the parameter.
      vocabulary: None if there is none beside the tensors.
      guesses: what the files leave open and how it was taken, for people.
    """

    path: Path
    layout: str
    config: T5Config
    tensors: Mapping[str, Tensor]
    parts: Mapping[str, tuple[Part, ...]]
    vocabulary: Vocabulary | None
    provenance: Mapping[str, Any]
    guesses: tuple[str, ...] = ()

    def dtype(self, wanted: jnp.dtype | str | None = None) -> jnp.dtype:
        """The dtype wanted, or that of the embedding.

        Raises:
          ValueError: the weights are float16 and nothing else is wanted.
        """
        if wanted is not None:
            return jnp.dtype(wanted)
        stored = self.tensors[self.parts["embedding"][0].tensor].dtype
        if stored == np.float16:
            raise ValueError("the weights are float16, in which T5 overflows: ask for "
                             "dtype float32 or bfloat16")
        return jnp.dtype(stored)

    def describe(self) -> Description:
        """As ``checkpoint.describe``; float16 counts as what it would be cast to."""
        stored = self.tensors[self.parts["embedding"][0].tensor].dtype
        return describe_model(self.path, self.layout, self.config, jnp.dtype(stored).name,
                              self.vocabulary, self.provenance)

    def pieces(self) -> Iterator[tuple[str, list[tuple[str, int, Part]]]]:
        """Each tensor once, with the (parameter, index along its first axis, part) that
        it holds: a tensor of all layers is in many."""
        uses: dict[str, list[tuple[str, int, Part]]] = {}
        for name, parts in self.parts.items():
            for index, part in enumerate(parts):
                uses.setdefault(part.tensor, []).append((name, index, part))
        yield from uses.items()

    def load(self, *, dtype: jnp.dtype | str | None = None,
             shardings: Shardings | None = None) -> LoadedModel:
        """The model in memory; ``shardings`` as in ``checkpoint.load``.

        Args:
          dtype: of the weights in memory. None means that of the embedding on disk;
            float16 on disk needs an answer here.
        """
        abstract = AbstractModel(self.config, self.dtype(dtype), shardings)
        waiting: dict[str, dict[int, np.ndarray]] = {}
        arrays: dict[str, jax.Array] = {}
        for tensor, uses in self.pieces():
            whole = self.tensors[tensor].read()
            for name, index, part in uses:
                leaf, parts = abstract.leaves[name], waiting.setdefault(name, {})
                parts[index] = part.take(whole).astype(leaf.dtype)
                if len(parts) == len(self.parts[name]):
                    ordered = [parts[i] for i in range(len(parts))]
                    del waiting[name]
                    arrays[name] = jax.device_put(
                        np.stack(ordered) if has_parts(name, leaf.shape) else ordered[0],
                        leaf.sharding)
        return LoadedModel(model=abstract.build(arrays), config=self.config,
                           vocabulary=self.vocabulary, provenance=dict(self.provenance))
