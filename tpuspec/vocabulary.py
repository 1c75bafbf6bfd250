"""SentencePiece with T5's conventions, and text that grows token by token.

Rules, the same for one reply and for a stream of chunks:

* ``encode`` ends with exactly one EOS. Text never yields a control id: what a
  user types as ``</s>`` or ``<pad>`` is split like any other text, and so are
  sentinels (``<extra_id_0>``), which requests give as ids.
* Sentinels stand after the pieces and count backwards: ``<extra_id_0>`` is the
  last id. They decode to their names.
* Control ids decode to nothing, the unknown id to SentencePiece's surface
  (a double question mark between spaces), byte pieces to UTF-8 with U+FFFD for
  each byte that fits nowhere.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

MODEL_FILE = "spiece.model"
OPTIONS_FILE = "vocabulary.json"
_DEFAULT_EXTRA_IDS = 100
_SPACE = "\u2581"
_BAD_BYTE = "\ufffd"


class Vocabulary:
    """Immutable, so that threads may share it.

    Attributes:
      size: pieces and sentinels; ids at or beyond it do not exist, whatever the
        rows of a model's (padded) embedding.
      extra_ids: number of sentinels.
      eos_id, pad_id, unk_id: 1, 0 and 2 in T5; read from the model file.
    """

    def __init__(self, proto: bytes, extra_ids: int):
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
        self._proto = proto
        parsed = sentencepiece_model_pb2.ModelProto.FromString(proto)
        self._pieces = [(p.piece, p.type) for p in parsed.pieces]
        self.extra_ids = extra_ids
        self.size = len(self._pieces) + extra_ids
        self.unk_id = self._processor.unk_id()
        self.eos_id = self._processor.eos_id()
        self.pad_id = max(self._processor.pad_id(), 0)
        if self.eos_id < 0:
            raise ValueError("the SentencePiece model has no end-of-sequence piece")
        self._strip_all = parsed.normalizer_spec.remove_extra_whitespaces
        self._strip_one = parsed.normalizer_spec.add_dummy_prefix
        kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
        unknown = self._processor.decode([self.unk_id])
        self._surfaces: list[str | int] = [
            "" if kind == kinds.CONTROL
            else unknown if kind == kinds.UNKNOWN
            else int(piece[3:-1], 16) if kind == kinds.BYTE
            else piece.replace(_SPACE, " ")
            for piece, kind in self._pieces]
        self._surfaces += self._sentinels()
        self._whole = {self.unk_id, *range(len(self._pieces), self.size)}

    @classmethod
    def from_bytes(cls, proto: bytes, extra_ids: int | None = None, *,
                   rows: int | None = None) -> "Vocabulary":
        """From the content of a SentencePiece file.

        Args:
          extra_ids: None means 100, or 0 if the pieces hold the sentinels (mT5), or as
            many as there is room for.
          rows: of the model's embedding, if known.
        """
        try:
            parsed = sentencepiece_model_pb2.ModelProto.FromString(proto)
        except Exception as error:
            raise ValueError(f"not a SentencePiece model: {error}") from error
        if extra_ids is None:
            inside = any("<extra_id_0>" in p.piece for p in parsed.pieces)
            extra_ids = 0 if inside else _DEFAULT_EXTRA_IDS
            if rows is not None:  # MADLAD has none
                extra_ids = max(0, min(extra_ids, rows - len(parsed.pieces)))
        if extra_ids < 0:
            raise ValueError(f"extra_ids must be at least 0, got {extra_ids}")
        return cls(proto, extra_ids)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Vocabulary":
        """From a SentencePiece file, or the directory that holds it as spiece.model."""
        file = Path(path).expanduser()
        if file.is_dir():
            file = file / MODEL_FILE
        if not file.is_file():
            raise ValueError(f"no SentencePiece model at {file}")
        options = file.parent / OPTIONS_FILE
        extra_ids = json.loads(options.read_text())["extra_ids"] if options.is_file() else None
        return cls.from_bytes(file.read_bytes(), extra_ids)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes spiece.model and the number of sentinels beside it."""
        (Path(directory) / MODEL_FILE).write_bytes(self._proto)
        (Path(directory) / OPTIONS_FILE).write_text(
            json.dumps({"extra_ids": self.extra_ids}) + "\n")

    def encode(self, text: str) -> list[int]:
        # Half a surrogate pair is a string in Python, and no text.
        text = text.encode("utf-8", "replace").decode("utf-8")
        return [*self._processor.encode(text), self.eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Raises ValueError naming an id that does not exist."""
        detokenizer = self.detokenizer()
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self)

    def surface(self, token: int) -> str | int:
        """Text of one id in the middle of a text; an int for a byte piece."""
        if not 0 <= token < self.size:
            raise ValueError(f"token id must be in [0, {self.size - 1}], got {token}")
        return self._surfaces[token]

    def first_surface(self, token: int) -> tuple[str, bool]:
        """Text of one id at the start of a text, and whether the text has begun.

        As SentencePiece does, takes off the space that encoding put in front.
        """
        surface = self._surfaces[token]
        assert isinstance(surface, str)
        if token in self._whole or not surface.startswith(" "):
            return surface, surface != ""
        if self._strip_all:
            surface = surface.lstrip(" ")
            return surface, surface != ""
        return surface[self._strip_one:], True

    def differences(self, other: "Vocabulary", *, kinds: bool = True) -> str | None:
        """The first difference in words, or None if every id means the same.

        Rows that pad an embedding are no part of a vocabulary.

        Args:
          kinds: whether the kinds of pieces count, which not every form tells.
        """
        for i, (mine, theirs) in enumerate(zip(self._pieces, other._pieces, strict=False)):
            if mine[0] != theirs[0]:
                return f"id {i} is {mine[0]!r} in one and {theirs[0]!r} in the other"
            if kinds and mine[1] != theirs[1]:
                return f"id {i}, {mine[0]!r}, is of another kind in the other"
        if (len(self._pieces), self.size) != (len(other._pieces), other.size):
            return (f"{len(self._pieces)} pieces and {self.extra_ids} sentinels in one, "
                    f"{len(other._pieces)} and {other.extra_ids} in the other")
        return None

    def _sentinels(self) -> list[str]:
        return [f"<extra_id_{n}>" for n in reversed(range(self.extra_ids))]


class Detokenizer:
    """Text of one output as it grows; work per call is that of the new ids alone."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._bytes = b""
        self._started = False

    def push(self, ids: Sequence[int]) -> str:
        """New text of these ids; the bytes of an unfinished character wait.

        The joined chunks, ``flush()`` last, equal ``vocabulary.decode(all ids)``.
        """
        chunks = []
        for token in ids:
            surface = self._vocabulary.surface(token)
            if isinstance(surface, int):
                self._bytes += bytes([surface])
                chunks.append(self._characters(final=False))
                self._started = True
                continue
            chunks.append(self._characters(final=True))
            if not self._started:
                surface, self._started = self._vocabulary.first_surface(token)
            chunks.append(surface)
        return "".join(chunks)

    def flush(self) -> str:
        """What is still held back at the end."""
        return self._characters(final=True)

    def _characters(self, *, final: bool) -> str:
        text = ""
        while self._bytes:
            length = _utf8_length(self._bytes[0])
            if len(self._bytes) < length and not final:
                break
            try:
                text += self._bytes[:length].decode("utf-8")
            except UnicodeDecodeError:
                text, length = text + _BAD_BYTE, 1
            self._bytes = self._bytes[length:]
        return text


def _utf8_length(lead: int) -> int:
    """Bytes of the character that starts with ``lead`` (1 for what starts none)."""
    if lead < 0xC2 or lead >= 0xF5:
        return 1
    return 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
