"""UNI and BYTE: SentencePiece models trained here in seconds on made-up lines."""

import functools
import io
import random
from typing import Any

import sentencepiece

from tpuspec.vocabulary import Vocabulary


@functools.cache
def lines() -> tuple[str, ...]:
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyzäöß"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(400)]
    words += ["one", "two", "three", "four", "five"] * 20

    def line() -> str:
        chosen = [w.capitalize() if rng.random() < 0.2 else w for w in rng.choices(words, k=8)]
        return " ".join(chosen) + rng.choice(".!?,") + f" {rng.randint(0, 99)}"

    return tuple(line() for _ in range(2000))


def train(vocab_size: int, **options: Any) -> bytes:
    """T5's conventions: pad 0, EOS 1, unk 2, no BOS."""
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines()), model_writer=proto, vocab_size=vocab_size,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, num_threads=1, minloglevel=2, **options)
    return proto.getvalue()


@functools.cache
def uni() -> bytes:
    """300 unigram pieces; braces and newlines are unknown."""
    return train(300)


@functools.cache
def byte() -> bytes:
    """600 pieces with byte fallback, nothing normalised away."""
    return train(600, byte_fallback=True, normalization_rule_name="identity",
                 remove_extra_whitespaces=False)


def uni_vocabulary(extra_ids: int = 0) -> Vocabulary:
    return Vocabulary.from_bytes(uni(), extra_ids)


def byte_vocabulary(extra_ids: int = 0) -> Vocabulary:
    return Vocabulary.from_bytes(byte(), extra_ids)
