"""Data of the demo pair: two tasks over everyday English sentences."""

import dataclasses
import gzip
import io
import json
import pathlib
import re
from collections.abc import Iterator

import numpy as np
import sentencepiece

TRANSLATE = "translate English to German: "
RESTORE = "restore: "
EXTRA_IDS = 100
PIECES = 4096
# Batches have one of these widths on both sides, so that few programs compile.
WIDTHS = (9, 12, 15, 20, 28, 64)


@dataclasses.dataclass(frozen=True)
class Example:
    source: str
    references: tuple[str, ...]


def degrade(text: str) -> str:
    """Lower case without punctuation: the source of the ``restore`` task."""
    return " ".join(re.sub(r"[^\w\s']", " ", text.lower()).split())


def load(data: pathlib.Path, split: str) -> dict[str, list[Example]]:
    """``translate`` and ``restore`` examples of one split."""
    tasks: dict[str, list[Example]] = {"translate": [], "restore": []}
    with gzip.open(data / f"en-de.{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            english = row["input"].removeprefix(TRANSLATE)
            references = tuple(row.get("references", [row["target"]]))
            tasks["translate"].append(Example(row["input"], references))
            tasks["restore"].append(Example(RESTORE + degrade(english), (english,)))
    return tasks


def train_tokenizer(data: pathlib.Path, path: pathlib.Path) -> None:
    """A unigram model of T5's conventions: pad 0, EOS 1, unk 2, no BOS.

    The two task prefixes are pieces of their own: a fifth of the source saved.
    """
    def sentences() -> Iterator[str]:
        tasks = load(data, "train")
        for i, (translate, restore) in enumerate(
                zip(tasks["translate"], tasks["restore"], strict=True)):
            yield restore.references[0]
            yield from translate.references
            if i % 3 == 0:
                yield restore.source.removeprefix(RESTORE)

    model = io.BytesIO()  # a file name would be kept in the model
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(), model_writer=model, vocab_size=PIECES,
        model_type="unigram", character_coverage=1.0, pad_id=0, eos_id=1, unk_id=2,
        bos_id=-1, user_defined_symbols=[
            "\u2581" + p.strip().replace(" ", "\u2581") for p in (TRANSLATE, RESTORE)])
    path.write_bytes(model.getvalue())


@dataclasses.dataclass(frozen=True)
class Batch:
    """Right-padded int32 arrays: source [B, S] and target [B, T], both ending in EOS."""

    source: np.ndarray
    source_lengths: np.ndarray
    target: np.ndarray
    target_lengths: np.ndarray


def encode(processor: sentencepiece.SentencePieceProcessor, texts: list[str]) -> list[list[int]]:
    # One by one: a call with a list starts threads, which for short lists is slower.
    return [processor.encode(text) + [1] for text in texts]


def width(length: int) -> int:
    if length > WIDTHS[-1]:
        raise ValueError(f"a source must have at most {WIDTHS[-1]} pieces, got {length}")
    return next(w for w in WIDTHS if w >= length)


def collate(sources: list[list[int]], targets: list[list[int]], size: int,
            rows: int) -> Batch:
    """Missing rows have length 0 and weigh nothing."""
    source, target = np.zeros((2, rows, size), np.int32)
    source_lengths, target_lengths = np.zeros((2, rows), np.int32)
    for i, (s, t) in enumerate(zip(sources, targets, strict=True)):
        source[i, :len(s)], target[i, :len(t)] = s, t
        source_lengths[i], target_lengths[i] = len(s), len(t)
    return Batch(source, np.maximum(source_lengths, 1), target, target_lengths)


def batches(sources: list[list[int]], targets: list[list[int]], tokens: int,
            rng: np.random.Generator) -> Iterator[Batch]:
    """One epoch of batches of about ``tokens`` padded target pieces, sorted by
    length inside a batch, in random order."""
    limit = WIDTHS[-1]
    by_width: dict[int, list[int]] = {w: [] for w in WIDTHS}
    for i in rng.permutation(len(sources)):
        longest = max(len(sources[i]), len(targets[i]))
        if longest <= limit:
            by_width[width(longest)].append(int(i))
    groups = []
    for w, members in by_width.items():
        rows = max(1, tokens // w)
        groups += [(w, rows, members[j:j + rows]) for j in range(0, len(members), rows)]
    for k in rng.permutation(len(groups)):
        w, rows, members = groups[k]
        yield collate([sources[i] for i in members], [targets[i] for i in members], w, rows)
