"""ByT5's vocabulary: every byte of UTF-8 is an id, and there is no file."""

import json
import os
from pathlib import Path

from tpuspec.config import check_range
from tpuspec.vocabulary import OPTIONS_FILE, Vocabulary

_FIRST = 3  # id of byte 0, after padding, end of sequence and unknown
DEFAULT_EXTRA_IDS = 125
_MOST_EXTRA_IDS = 100_000


class ByteVocabulary(Vocabulary):
    """Padding 0, end 1, unknown 2, the 256 bytes, then sentinels, counted forwards."""

    def __init__(self, extra_ids: int = DEFAULT_EXTRA_IDS):
        if not isinstance(extra_ids, int):
            raise ValueError(f"extra_ids must be a whole number, got {extra_ids!r}")
        check_range("extra_ids", extra_ids, 0, _MOST_EXTRA_IDS)
        control, unknown, byte = 3, 2, 6  # SentencePiece's numbers for the kinds
        self._pieces = [("<pad>", control), ("</s>", control), ("<unk>", unknown),
                        *((f"<0x{b:02X}>", byte) for b in range(256))]
        self.extra_ids = extra_ids
        self.size = len(self._pieces) + extra_ids
        self.pad_id, self.eos_id, self.unk_id = 0, 1, 2
        self._surfaces = ["", "", "", *range(256), *self._sentinels()]
        self._whole = set(range(len(self._pieces), self.size))
        self._strip_all = self._strip_one = False

    def _sentinels(self) -> list[str]:
        return [f"<extra_id_{n}>" for n in range(self.extra_ids)]

    def encode(self, text: str) -> list[int]:
        return [*(_FIRST + byte for byte in text.encode("utf-8", "replace")), self.eos_id]

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes vocabulary.json alone."""
        (Path(directory) / OPTIONS_FILE).write_text(
            json.dumps({"kind": "bytes", "extra_ids": self.extra_ids}) + "\n")
