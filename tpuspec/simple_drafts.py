"""Drafts that are no models: what Σ min(p, q) they reach against a target, for Table 3.

Each gives logits for every place of a finished text, as a model does, so that all drafts
are warped by one function. All but the uniform one are tables of plain counts.
"""

from collections.abc import Sequence

import numpy as np

from tpuspec.overlaps import Output

UNIGRAM, BIGRAM, NGRAM, UNIFORM = "unigram", "bigram", "ngram", "uniform"
NAMES = (UNIGRAM, BIGRAM, NGRAM, UNIFORM)
TABLES = (UNIGRAM, BIGRAM)  # of a corpus
_LONGEST_CONTEXT = 3  # tokens that the copy looks for
_NOISE = np.float32(1e-6)


def log(counts: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(counts, dtype=np.float32)


class Unigram:
    """How often each id came in a corpus."""

    def __init__(self, corpus: Sequence[Sequence[int]], vocabulary_size: int):
        """Raises ValueError on a corpus without tokens."""
        if not any(len(text) for text in corpus):
            raise ValueError("the corpus of a table must have at least 1 token, got 0")
        ids = np.concatenate([np.asarray(text, np.int64) for text in corpus])
        self._row = log(np.bincount(ids, minlength=vocabulary_size).astype(np.float32))

    def logits(self, outputs: Sequence[Output], width: int) -> np.ndarray:
        return np.broadcast_to(self._row, (len(outputs), width, len(self._row)))


class Bigram:
    """How often each id followed the last one; after ids that never came, the unigram."""

    def __init__(self, corpus: Sequence[Sequence[int]], vocabulary_size: int, *, start_id: int):
        self._unigram = Unigram(corpus, vocabulary_size)._row
        self._start = start_id
        self._following: dict[int, dict[int, int]] = {}
        for text in corpus:
            for last, following in zip([start_id, *text[:-1]], text, strict=True):
                row = self._following.setdefault(int(last), {})
                row[int(following)] = row.get(int(following), 0) + 1

    def logits(self, outputs: Sequence[Output], width: int) -> np.ndarray:
        rows = np.empty((len(outputs), width, len(self._unigram)), np.float32)
        for output, row in zip(outputs, rows, strict=True):
            for place, last in enumerate((self._start, *output.tokens)[:width]):
                row[place] = self._after(last)
            row[len(output.tokens):] = self._unigram
        return rows

    def _after(self, last: int) -> np.ndarray:
        counts = self._following.get(last)
        if counts is None:
            return self._unigram
        row = np.full(len(self._unigram), -np.inf, np.float32)
        row[list(counts)] = log(np.array(list(counts.values()), np.float32))
        return row


class NgramCopy:
    """What followed the last tokens where they came before, in the source or the text.

    The longest context of up to 3 tokens that came before counts, at its latest place.
    Where there is none the draft is pad, which no text has.
    """

    def __init__(self, vocabulary_size: int, *, pad_id: int):
        self._size = vocabulary_size
        self._pad = pad_id

    def logits(self, outputs: Sequence[Output], width: int) -> np.ndarray:
        rows = np.full((len(outputs), width, self._size), -np.inf, np.float32)
        for output, row in zip(outputs, rows, strict=True):
            for place in range(width):
                row[place, self._copy(output.source, output.tokens[:place])] = 0.0
        return rows

    def _copy(self, source: Sequence[int], text: Sequence[int]) -> int:
        for length in range(min(_LONGEST_CONTEXT, len(text)), 0, -1):
            context = tuple(text[-length:])
            for before in (text, source):  # the text is the later of the two
                for at in range(len(before) - length - 1, -1, -1):
                    if tuple(before[at:at + length]) == context:
                        return before[at + length]
        return self._pad


class Uniform:
    """Every id alike, up to a little noise: at temperature 0 any of them, not the first."""

    def __init__(self, vocabulary_size: int):
        self._size = vocabulary_size
        self._rng = np.random.default_rng(0)

    def logits(self, outputs: Sequence[Output], width: int) -> np.ndarray:
        return _NOISE * self._rng.random((len(outputs), width, self._size), np.float32)


def make(name: str, corpus: Sequence[Sequence[int]], vocabulary_size: int, *, start_id: int,
         pad_id: int) -> Unigram | Bigram | NgramCopy | Uniform:
    """Args: name: one of ``NAMES``."""
    if name == UNIGRAM:
        return Unigram(corpus, vocabulary_size)
    if name == BIGRAM:
        return Bigram(corpus, vocabulary_size, start_id=start_id)
    if name == NGRAM:
        return NgramCopy(vocabulary_size, pad_id=pad_id)
    return Uniform(vocabulary_size)
