"""``tokenizer.json`` of a T5 as the SentencePiece model that it was made of.

It holds the same pieces, scores and table of normalisation, so that one tokenizer
serves both; whatever a SentencePiece model could not do is refused by name.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from tpuspec.vocabulary import Vocabulary

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_CONTROLS = ("<pad>", "</s>", "<s>")


def read_tokenizer(file: Path) -> Vocabulary:
    """Raises ValueError naming the file and what in it has no equal in SentencePiece."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        model = fields["model"]
        if model["type"] != "Unigram":
            raise ValueError(f"its model is {model['type']}, not Unigram")
        pieces = [(str(piece), float(score)) for piece, score in model["vocab"]]
        proto = sentencepiece_model_pb2.ModelProto()
        sentinels = _sentinels(pieces)
        added = {str(token["content"]): token for token in fields.get("added_tokens", [])}
        for piece, token in added.items():
            if not 0 <= token["id"] < len(pieces) or pieces[token["id"]][0] != piece:
                raise ValueError(f"its added token {piece!r} is none of the pieces")
        whole = {piece for piece, token in added.items() if not token.get("special")}
        _add_pieces(proto, pieces[:len(pieces) - sentinels], model, whole)
        _set_normalizer(proto.normalizer_spec, fields)
        return Vocabulary.from_bytes(proto.SerializeToString(), sentinels)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} cannot be used: {error}") from error


def _sentinels(pieces: list[tuple[str, float]]) -> int:
    """How many names at the end are <extra_id_N>, counting down to 0."""
    count = 0
    while count < len(pieces) and pieces[-1 - count][0] == f"<extra_id_{count}>":
        count += 1
    return count


def _add_pieces(proto: Any, pieces: list[tuple[str, float]], model: dict[str, Any],
                whole: set[str]) -> None:
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
    falls_back = bool(model.get("byte_fallback"))
    trainer = proto.trainer_spec
    trainer.model_type = sentencepiece_model_pb2.TrainerSpec.UNIGRAM
    trainer.byte_fallback = falls_back
    trainer.pad_piece, trainer.eos_piece, trainer.bos_piece = _CONTROLS
    trainer.pad_id = trainer.bos_id = -1
    for i, (piece, score) in enumerate(pieces):
        kind = kinds.NORMAL
        if i == model["unk_id"]:
            kind, trainer.unk_piece, trainer.unk_id = kinds.UNKNOWN, piece, i
        elif piece in _CONTROLS:
            kind = kinds.CONTROL
            setattr(trainer, {"<pad>": "pad_id", "</s>": "eos_id", "<s>": "bos_id"}[piece], i)
        elif falls_back and _BYTE.fullmatch(piece):
            kind = kinds.BYTE
        elif piece in whole:
            kind = kinds.USER_DEFINED
        proto.pieces.add(piece=piece, score=score, type=kind)
    trainer.vocab_size = len(pieces)


def _set_normalizer(spec: Any, fields: dict[str, Any]) -> None:
    spec.add_dummy_prefix = spec.remove_extra_whitespaces = False
    spec.escape_whitespaces = True
    for step in _steps(fields["normalizer"], "normalizers"):
        match step:
            case {"type": "Precompiled", "precompiled_charsmap": table}:
                spec.precompiled_charsmap = base64.b64decode(table or "")
            case {"type": "Strip", "strip_right": True}:
                pass  # as does what follows
            case {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " " | "\u2581"}:
                spec.remove_extra_whitespaces = True
            case _:
                raise ValueError(f"its normalizer {step.get('type')} is not SentencePiece's")
    for step in _steps(fields["pre_tokenizer"], "pretokenizers"):
        match step:
            case {"type": "WhitespaceSplit"}:
                spec.remove_extra_whitespaces = True
            case {"type": "Metaspace", "replacement": "\u2581"}:
                scheme = step.get("prepend_scheme")
                spec.add_dummy_prefix = (scheme != "never" if scheme is not None
                                         else bool(step.get("add_prefix_space", True)))
            case _:
                raise ValueError(f"its pre-tokenizer {step.get('type')} is not SentencePiece's")


def _steps(node: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if node is None:
        return []
    return list(node[key]) if node["type"] == "Sequence" else [node]
