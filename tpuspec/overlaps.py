"""Σ min(p, q) at every position of finished texts: α without a speculative run.

The target reads each text once, whatever the number of drafts.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np
from flax import nnx

from tpuspec.programs import OverlapRows, overlap_of_logits, teacher_forced_logits
from tpuspec.sampling import SamplingParams, SlotSampling
from tpuspec.t5 import T5

_LOGITS_BYTES = 2**28  # of a batch, of one model
_MOST_ROWS = 16
_SHORTEST = 8  # padded length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """A finished text of the target.

    Attributes:
      source: encoder ids, EOS included.
      tokens: ids, the end id included; at least one.
      block: of which it is part, for intervals; its prompt's number.
    """

    source: tuple[int, ...]
    tokens: tuple[int, ...]
    block: int


class Logits(Protocol):
    """A model, or what stands in for one."""

    def logits(self, outputs: Sequence[Output], width: int) -> jax.Array | np.ndarray:
        """[B, width, V] float32 before each token of each text; beyond a text they are
        defined but meaningless."""


class ModelLogits:
    """A model that reads whole texts without a cache."""

    def __init__(self, model: T5):
        self._graph, self._params = nnx.split(model)
        self._start = model.config.decoder_start_token_id

    def logits(self, outputs: Sequence[Output], width: int) -> jax.Array:
        sources = [output.source for output in outputs]
        lengths = np.array([len(source) for source in sources], np.int32)
        inputs = [(self._start, *output.tokens[:-1]) for output in outputs]
        return teacher_forced_logits(
            self._graph, self._params, padded(sources, padded_length(int(lengths.max()))), lengths,
            padded(inputs, width))


class Acceptance:
    """Of one draft along all texts; see ``acceptance_figures``.

    Attributes:
      texts: arrays [length] for each.
    """

    def __init__(self, texts: int):
        self.texts = [OverlapRows(*[np.empty(0)] * len(OverlapRows._fields))] * texts

    @property
    def overlaps(self) -> list[np.ndarray]:
        return [text.overlap for text in self.texts]

    @property
    def kept(self) -> list[np.ndarray]:
        return [text.kept for text in self.texts]

    @property
    def impossible(self) -> int:
        """Tokens that the target itself gives probability 0: where it wrote the text and
        where it read it, rounding decided a tie, or a cut, in two ways."""
        return sum(int((~text.possible).sum()) for text in self.texts)


def measure(target: Logits, drafts: Mapping[str, Logits], outputs: Sequence[Output],
            sampling: SamplingParams, vocabulary_size: int, *,
            progress: Callable[[int], object] = lambda texts: None) -> dict[str, Acceptance]:
    """How the drafts do along texts that the target wrote with these parameters.

    Args:
      target, drafts: give logits; by the drafts' names.
      outputs: texts, at least one.
      sampling: warps target and drafts alike. Penalties, biases and bans are left out.
      vocabulary_size: ids that exist.
      progress: called with the number of texts that were just done.

    Raises:
      ValueError: logits were not finite.
    """
    found = {name: Acceptance(len(outputs)) for name in drafts}
    order = sorted(range(len(outputs)), key=lambda i: len(outputs[i].tokens))
    while order:
        width = padded_length(len(outputs[order[-1]].tokens))
        rows = max(1, min(_MOST_ROWS, _LOGITS_BYTES // (4 * width * vocabulary_size)))
        chosen, order = order[-rows:], order[:-rows]
        # Full batches, so that a length is compiled once.
        batch = [outputs[i] for i in chosen] + [outputs[chosen[-1]]] * (rows - len(chosen))
        tokens = padded([output.tokens for output in batch], width)
        options = SlotSampling.of([sampling] * rows).options()
        p = target.logits(batch, width)
        for name, draft in drafts.items():
            found_rows = overlap_of_logits(p, draft.logits(batch, width), tokens, options,
                                           vocabulary_size=vocabulary_size)
            rows_of = OverlapRows(*(np.asarray(array) for array in found_rows))
            for row, i in enumerate(chosen):
                text = OverlapRows(*(array[row, :len(outputs[i].tokens)] for array in rows_of))
                if not text.sound.all():
                    raise ValueError(f"logits of the target or of {name} are not finite")
                found[name].texts[i] = text
        progress(len(chosen))
    return found


def padded_length(length: int) -> int:
    """The power of two, at least 8, that holds it."""
    return max(_SHORTEST, 1 << (length - 1).bit_length())


def padded(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """[B, width] int32, filled with 0."""
    array = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(array, rows, strict=True):
        row[:len(ids)] = ids
    return array
