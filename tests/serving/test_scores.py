"""ROUGE against rouge-score's figures, streamed BLEU and chrF against sacrebleu's own."""

import itertools
import random
import sys

import pytest
import sacrebleu

from tpuspec.serving import scores

# By rouge-score 0.1.2 without stemming: rouge1, rouge2, rougeL.
BY_ROUGE_SCORE = [
    ("the cat sat on the mat", "the cat was on the mat", 0.833333, 0.6, 0.833333),
    ("A b c d. A b!", "b a; b c a d e", 0.923077, 0.363636, 0.615385),
    ("one", "one two", 0.666667, 0.0, 0.666667),
    ("", "a b", 0.0, 0.0, 0.0),
    ("The quick brown fox jumps over the lazy dog 42 times",
     "a lazy dog jumped over 42 quick foxes, the brown fox", 0.727273, 0.2, 0.272727),
    ("x y z x y z x", "z x y x y y z z", 0.8, 0.615385, 0.666667),
    ("same words", "same words", 1.0, 1.0, 1.0)]


@pytest.mark.parametrize("output, target, one, two, longest", BY_ROUGE_SCORE)
def test_rouge_is_that_of_another_implementation(output, target, one, two, longest):
    found = scores.rouge(output, target)
    assert found == pytest.approx({"rouge1": one, "rouge2": two, "rougeL": longest}, abs=1e-6)


def test_rouge_knows_letters_beyond_a_to_z():
    assert scores.rouge("Schöne Grüße", "schöne Füße")["rouge1"] == 0.5


def test_longest_common_subsequence_against_every_subsequence():
    rng = random.Random(0)
    for _ in range(50):
        a, b = (rng.choices("xyz", k=rng.randint(0, 8)) for _ in range(2))
        subsequences = [{s for n in range(len(w) + 1) for s in itertools.combinations(w, n)}
                        for w in (a, b)]
        assert scores.common_subsequence(a, b) == max(map(len, set.intersection(*subsequences)))


def test_scores_added_up_line_by_line_are_those_of_the_corpus(monkeypatch):
    monkeypatch.setattr(scores, "_BATCH", 7)
    rng = random.Random(1)
    words = "der die das Haus Baum geht , . schön nicht".split()
    outputs = [" ".join(rng.choices(words, k=rng.randint(0, 12))) for _ in range(40)]
    targets = [" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(40)]
    total = scores.Scores()
    for output, target in zip(outputs, targets, strict=True):
        total.add(output, target)
    found = total.result()
    assert found["lines"] == 40
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(outputs, [targets]).score)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(outputs, [targets]).score)


def test_missing_sacrebleu_is_said_with_the_line_that_needs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    monkeypatch.setattr(scores.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="line 3 has a target and sacrebleu is not installed"):
        scores.check_installed(3)
