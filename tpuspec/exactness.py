"""Does a pair sample what its target alone would? The engine's own programs, as they are.

Three kinds of evidence, all about short outputs of a few sources:

* Counts of speculative outputs against the exact distribution, which the target's logits
  give where top-k leaves few outputs: of single positions, neighbours and whole outputs.
* Counts of speculative against plain outputs, over the whole vocabulary.
* Drift of acceptance: min(1, q(x)/p(x)) of a token x drawn from p has the mean
  Σ min(p, q), whatever came before it. An output that leans to what the draft likes, or
  away from it, moves the mean: the most sensitive test of such a bias, since it looks into
  just that direction. What is kept too often and too seldom in turns cancels in it; the
  counts see that.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tpuspec import overlaps, significance
from tpuspec.engine import Engine
from tpuspec.overlaps import Logits, Output, padded_length
from tpuspec.programs import OverlapRows, warped_probabilities
from tpuspec.sampling import SamplingParams, SlotSampling
from tpuspec.significance import Outcome

Ids = tuple[int, ...]
Frequencies = dict[int | None, tuple[float, float, int]]
_ROWS = 16  # prefixes read at once
_ENDED = -1  # the cell of outputs that ended before a position


def sample(engine: Engine, source: Sequence[int], *, count: int, length: int, draft_length: int,
           sampling: SamplingParams, eos_id: int, first_seed: int,
           progress: Callable[[int], object] = lambda outputs: None) -> list[Ids]:
    """Outputs of a source in all slots, by seed.

    Args:
      length: most new tokens.
      first_seed: of ``count`` successive ones.
    """
    found: list[Ids] = [()] * count
    waiting = iter(range(count))
    owner: dict[int, int] = {}

    def fill(slot: int) -> None:
        number = next(waiting, None)
        if number is not None:
            engine.insert(slot, source, sampling=sampling, seed=first_seed + number,
                          max_new_tokens=length, eos_ids=(eos_id,), draft_length=draft_length)
            owner[slot] = number

    for slot in range(engine.config.slots):
        fill(slot)
    while owner:
        output = engine.step().read()
        done = 0
        for slot, number in list(owner.items()):
            found[number] += tuple(
                int(token) for token in output.tokens[slot, :output.num_tokens[slot]])
            if output.finish[slot]:
                del owner[slot]
                done += 1
                fill(slot)
        progress(done)
    return found


def enumerate_outputs(reader: Logits, source: Ids, *, length: int, sampling: SamplingParams,
                      eos_id: int, vocabulary_size: int) -> dict[Ids, float]:
    """Every output and its probability; ``sampling`` must leave few ids at each place.

    Raises:
      ValueError: logits are not finite.
    """
    options = SlotSampling.of([sampling] * _ROWS).options()
    done: dict[Ids, float] = {}
    open_: dict[Ids, float] = {(): 1.0}
    while open_:
        longer: dict[Ids, float] = {}
        for prefixes in itertools.batched(open_, _ROWS):
            rows = [*prefixes, *[()] * (_ROWS - len(prefixes))]
            batch = [Output(source=source, tokens=(*prefix, 0), block=0) for prefix in rows]
            probabilities = np.asarray(warped_probabilities(
                reader.logits(batch, padded_length(length)), options,
                vocabulary_size=vocabulary_size))
            for row, prefix in enumerate(prefixes):
                p = probabilities[row, len(prefix)].astype(np.float64)
                if np.isnan(p).any():
                    raise ValueError("logits of the target or of the draft are not finite")
                for token in np.flatnonzero(p):
                    ids = (*prefix, int(token))
                    ended = len(ids) == length or token == eos_id
                    (done if ended else longer)[ids] = open_[prefix] * float(p[token] / p.sum())
        open_ = longer
    return done


@dataclasses.dataclass(frozen=True)
class View:
    """What of an output is counted: its ids at positions ``first`` to before ``after``."""

    kind: str
    first: int
    after: int

    def __str__(self) -> str:
        last = self.after - 1
        return f"position {last}" if last == self.first else f"positions {self.first} to {last}"

    def group[Value: (int, float)](self, values: Mapping[Ids, Value]) -> dict[Ids, Value]:
        """Sums over outputs that look alike."""
        grouped: dict[Ids, Value] = {}
        for ids, value in values.items():
            part: Ids = ids[self.first:self.after]
            cell = (*part, *[_ENDED] * (self.after - self.first - len(part)))
            grouped[cell] = grouped[cell] + value if cell in grouped else value
        return grouped


def views(length: int) -> list[View]:
    return [*(View("single positions", at, at + 1) for at in range(length)),
            *(View("pairs", at, at + 2) for at in range(length - 1)),
            View("whole outputs", 0, length)]


def against_exact(outputs: Sequence[Ids], target: Mapping[Ids, float], draft: Mapping[Ids, float],
                  *, length: int, where: str) -> list[Outcome]:
    """Args: target, draft: of ``enumerate_outputs``."""
    counts = collections.Counter(outputs)
    return [significance.against_exact(
        f"{view.kind}, exact", f"{where}, {view}", view.group(counts), view.group(target),
        view.group(draft)) for view in views(length)]


def frequencies(outputs: Sequence[Ids], target: Mapping[Ids, float], draft: Mapping[Ids, float],
                *, length: int) -> list[Frequencies]:
    """Of each position: by id (None where an output had ended), the probability under the
    target, that of outputs of the draft alone, and how often it came; likeliest first."""
    counts = collections.Counter(outputs)
    found: list[Frequencies] = []
    for view in views(length)[:length]:
        p, q, seen = view.group(target), view.group(draft), view.group(counts)
        cells = sorted({**p, **q, **seen}, key=lambda cell: (-p.get(cell, 0.0), cell))
        found.append({None if cell == (_ENDED,) else cell[0]:
                      (p.get(cell, 0.0), q.get(cell, 0.0), seen.get(cell, 0)) for cell in cells})
    return found


def against_plain(outputs: Sequence[Ids], plain: Sequence[Ids], *, length: int, where: str,
                  ) -> list[Outcome]:
    one, other = collections.Counter(outputs), collections.Counter(plain)
    return [significance.two_samples(f"{view.kind}, plain", f"{where}, {view}", view.group(one),
                                     view.group(other)) for view in views(length)]


def drift(target: Logits, draft: Logits, outputs: Sequence[Output], sampling: SamplingParams,
          vocabulary_size: int, *, rounding: float, where: str) -> Outcome:
    """Of acceptance, over all tokens of all outputs.

    Args:
      rounding: of a probability, from one way of computing it to another.
    """
    texts = overlaps.measure(target, {"the draft": draft}, outputs, sampling,
                             vocabulary_size)["the draft"].texts
    rows = OverlapRows(*(np.concatenate(columns) for columns in zip(*texts, strict=True)))
    overlap = rows.overlap.astype(np.float64)
    found = significance.of_drift(
        "drift of acceptance", where, rows.kept - overlap,
        np.maximum(0.0, rows.kept_squared - overlap**2), rows.kept_under_draft - overlap,
        rounding=rounding)
    return found if rows.possible.all() else dataclasses.replace(found, p_value=0.0)


def margins(target: Logits, outputs: Sequence[Output], vocabulary_size: int,
            ) -> tuple[list[np.ndarray], float]:
    """Of each text's positions, how far the likeliest id is above the second, in logits;
    and the largest logit, by which rounding is measured."""
    found, largest = [], 0.0
    width = padded_length(max(len(output.tokens) for output in outputs))
    for batch in itertools.batched(outputs, _ROWS):
        rows = [*batch, *[batch[-1]] * (_ROWS - len(batch))]
        logits = np.asarray(target.logits(rows, width))[:len(batch), :, :vocabulary_size]
        for output, row in zip(batch, logits, strict=True):
            row = row[:len(output.tokens)]
            second, first = np.partition(row, -2, axis=-1)[:, -2:].T
            found.append(first - second)
            largest = max(largest, float(np.abs(row).max()))
    return found, largest
