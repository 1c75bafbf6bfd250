"""How near outputs are to their targets: BLEU, chrF and ROUGE, line by line.

BLEU and chrF are sacrebleu's, with its defaults; ROUGE is here, since the packages for
it bring much with them and know no letters beyond a to z.
"""

import collections
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

_WORD = re.compile(r"[^\W_]+")
_BATCH = 1000  # lines that sacrebleu gets at once


def check_installed(first_target: int) -> None:
    """Raises ValueError where sacrebleu is missing; ``first_target`` is a line's number."""
    if importlib.util.find_spec("sacrebleu") is None:
        raise ValueError(f"line {first_target} has a target and sacrebleu is not installed: "
                         "pip install '.[score]', or leave the targets out")


class Scores:
    """Adds up what the scores of a whole corpus need; memory does not grow with it."""

    def __init__(self) -> None:
        from sacrebleu.metrics import BLEU, CHRF

        # force: sacrebleu's advice on tokenized text is not ours to print.
        self._metrics: dict[str, Any] = {"bleu": BLEU(force=True), "chrf": CHRF()}
        self._sums: dict[str, list[int]] = {}
        self._waiting: list[tuple[str, str]] = []
        self._rouge: dict[str, float] = dict.fromkeys(("rouge1", "rouge2", "rougeL"), 0.0)
        self._lines = 0

    def add(self, output: str, target: str) -> None:
        self._lines += 1
        for name, score in rouge(output, target).items():
            self._rouge[name] += score
        self._waiting.append((output, target))
        if len(self._waiting) == _BATCH:
            self._digest()

    def result(self) -> dict[str, Any]:
        """Scores from 0 to 100: BLEU and chrF of the corpus, ROUGE F1 as the lines' mean."""
        self._digest()
        return {"lines": self._lines,
                # The second half of sacrebleu's corpus_score.
                **{name: float(metric._compute_score_from_stats(self._sums[name]).score)
                   for name, metric in self._metrics.items()},
                **{name: 100 * total / self._lines for name, total in self._rouge.items()}}

    def _digest(self) -> None:
        if not self._waiting:
            return
        outputs, targets = zip(*self._waiting, strict=True)
        for name, metric in self._metrics.items():
            # The first half of it: the counts of every line.
            rows = metric._extract_corpus_statistics(outputs, [targets])
            sums = self._sums.get(name, [0] * len(rows[0]))
            self._sums[name] = [sum(column) for column in zip(sums, *rows, strict=True)]
        self._waiting = []


def rouge(output: str, target: str) -> dict[str, float]:
    """F1 from 0 to 1 of words, of pairs of words, and of the longest common subsequence.

    Words are runs of letters and digits in any script, in lower case, not stemmed.
    """
    a, b = (_WORD.findall(text.lower()) for text in (output, target))
    scores = {"rouge1": _f1(_common(a, b, 1), len(a), len(b)),
              "rouge2": _f1(_common(a, b, 2), len(a) - 1, len(b) - 1)}
    return scores | {"rougeL": _f1(common_subsequence(a, b), len(a), len(b))}


def _f1(common: int, a: int, b: int) -> float:
    return 2 * common / (a + b) if common else 0.0


def _common(a: Sequence[str], b: Sequence[str], n: int) -> int:
    """N-grams of both, each as often as in the one that has it less often."""
    counts = [collections.Counter(zip(*(words[i:] for i in range(n)), strict=False))
              for words in (a, b)]
    return (counts[0] & counts[1]).total()


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest one: Hyyrö's bit-parallel method, one bit a word of ``a``."""
    places: dict[str, int] = {}
    for place, word in enumerate(a):
        places[word] = places.get(word, 0) | 1 << place
    full = (1 << len(a)) - 1
    row = full
    for word in b:
        matches = row & places.get(word, 0)
        row = (row + matches | row - matches) & full
    return len(a) - row.bit_count()
