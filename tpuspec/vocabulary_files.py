"""Finds the vocabulary beside a model, in each of the forms that people have it in."""

import json
from pathlib import Path
from typing import Any

from tpuspec.byte_vocabulary import DEFAULT_EXTRA_IDS, ByteVocabulary
from tpuspec.tokenizer_json import read_tokenizer
from tpuspec.vocabulary import MODEL_FILE, OPTIONS_FILE, Vocabulary

TOKENIZER_FILE, _CLASS_FILE = "tokenizer.json", "tokenizer_config.json"
BYTES = "bytes"


def find_vocabulary(directory: Path, *, rows: int | None = None) -> Vocabulary | None:
    """The vocabulary in a directory of ours or of Hugging Face's, None without one.

    Args:
      rows: of the model's embedding, which an assumed number of sentinels must fit in.

    Raises:
      ValueError: a file that cannot be read, or two that differ.
    """
    options = _json(directory / OPTIONS_FILE)
    if options.get("kind") == BYTES:
        return ByteVocabulary(options.get("extra_ids", DEFAULT_EXTRA_IDS))
    about = _json(directory / _CLASS_FILE)
    if str(about.get("tokenizer_class", "")).startswith("ByT5"):
        return ByteVocabulary(about.get("extra_ids", DEFAULT_EXTRA_IDS))
    found = []
    if (directory / MODEL_FILE).is_file():
        found.append(Vocabulary.from_bytes(
            (directory / MODEL_FILE).read_bytes(),
            options.get("extra_ids", about.get("extra_ids")), rows=rows))
    if (directory / TOKENIZER_FILE).is_file():
        found.append(read_tokenizer(directory / TOKENIZER_FILE))
    if len(found) == 2:
        difference = found[0].differences(found[1], kinds=False)
        if difference is not None:
            raise ValueError(f"{directory} has two vocabularies, and {MODEL_FILE} and "
                             f"{TOKENIZER_FILE} differ: {difference}")
    return found[0] if found else None


def read_vocabulary(name: str) -> Vocabulary:
    """A SentencePiece file, a tokenizer.json, or ByT5's by the word ``bytes``."""
    if name == BYTES:
        return ByteVocabulary()
    file = Path(name).expanduser()
    return read_tokenizer(file) if file.suffix == ".json" else Vocabulary.load(file)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
