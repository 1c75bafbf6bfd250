"""Vocabularies in the forms that people have them in."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import sentencepiece_model_pb2
from tiny_vocabularies import byte, byte_vocabulary, lines, uni, uni_vocabulary

from tpuspec.byte_vocabulary import ByteVocabulary
from tpuspec.tokenizer_json import read_tokenizer
from tpuspec.vocabulary import Vocabulary
from tpuspec.vocabulary_files import find_vocabulary, read_vocabulary


def tokenizer_of(proto: bytes, sentinels: int) -> dict[str, Any]:
    """As Hugging Face's converter writes a T5's SentencePiece model."""
    parsed = sentencepiece_model_pb2.ModelProto.FromString(proto)
    vocab = [[p.piece, p.score] for p in parsed.pieces]
    vocab += [[f"<extra_id_{n}>", 0.0] for n in reversed(range(sentinels))]
    special = [0, 1, 2, *range(len(parsed.pieces), len(vocab))]
    normalizer = parsed.normalizer_spec
    steps = [{"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True}]
    if normalizer.remove_extra_whitespaces:
        steps.insert(0, {"type": "WhitespaceSplit"})
    table = base64.b64encode(normalizer.precompiled_charsmap).decode()
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": vocab[i][0], "special": True, "lstrip": False,
                          "rstrip": False, "normalized": False, "single_word": False}
                         for i in special],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": table} if table else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {"type": "Unigram", "unk_id": 2, "vocab": vocab,
                  "byte_fallback": parsed.trainer_spec.byte_fallback}}


def write_tokenizer(file: Path, fields: dict[str, Any]) -> Path:
    file.write_text(json.dumps(fields))
    return file


@pytest.mark.parametrize("proto, vocabulary", [(uni, uni_vocabulary), (byte, byte_vocabulary)])
def test_tokenizer_json_gives_the_ids_of_the_sentencepiece_file(tmp_path, proto, vocabulary):
    read = read_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", tokenizer_of(proto(), 7)))
    wanted = vocabulary(7)
    assert wanted.differences(read) is None
    assert (read.size, read.eos_id, read.pad_id, read.unk_id) == (
        wanted.size, wanted.eos_id, wanted.pad_id, wanted.unk_id)
    rng = random.Random(0)
    texts = ["", " ", "a  b\t\nc", '{"x": 1}', "</s> <extra_id_0>", "é\u200d\U0001f600"]
    for _ in range(300):
        line = list(rng.choice(lines()))
        rng.shuffle(line)
        texts += ["".join(line), rng.choice(lines())]
    for text in texts:
        ids = wanted.encode(text)
        assert read.encode(text) == ids
        assert read.decode(ids) == wanted.decode(ids)


def test_tokenizers_that_sentencepiece_could_not_be_are_refused_by_name(tmp_path):
    good = tokenizer_of(uni(), 7)
    for change, told in (
            ({"model": {"type": "BPE"}}, "its model is BPE, not Unigram"),
            ({"normalizer": {"type": "Lowercase"}}, "its normalizer Lowercase is not"),
            ({"pre_tokenizer": {"type": "ByteLevel"}}, "its pre-tokenizer ByteLevel is not"),
            ({"added_tokens": [{"id": 999, "content": "<sep>"}]}, "its added token '<sep>' is"),
            ({"model": {}}, "tokenizer.json cannot be used: 'type'")):
        file = write_tokenizer(tmp_path / "tokenizer.json", good | change)
        with pytest.raises(ValueError, match=told):
            read_tokenizer(file)


def test_two_vocabularies_of_one_model_must_be_the_same(tmp_path):
    (tmp_path / "spiece.model").write_bytes(uni())
    fields = tokenizer_of(uni(), 100)
    write_tokenizer(tmp_path / "tokenizer.json", fields)
    found = find_vocabulary(tmp_path)
    assert found is not None and found.differences(uni_vocabulary(100)) is None
    piece = fields["model"]["vocab"][41][0]
    fields["model"]["vocab"][41][0] = "other"
    write_tokenizer(tmp_path / "tokenizer.json", fields)
    with pytest.raises(ValueError, match=f"differ: id 41 is '{piece}' in one and 'other'"):
        find_vocabulary(tmp_path)
    (tmp_path / "spiece.model").unlink()
    alone = find_vocabulary(tmp_path)
    assert alone is not None and alone.size == 400


def test_sentinels_are_as_many_as_the_files_say_or_as_there_is_room_for(tmp_path):
    (tmp_path / "spiece.model").write_bytes(uni())

    def sentinels(rows: int | None = None) -> int:
        found = find_vocabulary(tmp_path, rows=rows)
        assert found is not None
        return found.extra_ids

    assert [sentinels(rows) for rows in (None, 512, 384, 300)] == [100, 100, 84, 0]
    (tmp_path / "tokenizer_config.json").write_text('{"extra_ids": 5}')
    assert sentinels(512) == 5
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer_config.json is damaged"):
        sentinels()


def test_the_byte_vocabulary_is_byt5s(tmp_path):
    vocabulary = ByteVocabulary()
    # From the published tokenizer: "Life is like a box of chocolates." and the end.
    assert vocabulary.encode("Life")[:4] == [79, 108, 105, 104] and vocabulary.size == 384
    for text in ("", "a </s> b", "Größe \u65e5\u672c \U0001f600\n", "x" * 1000):
        ids = vocabulary.encode(text)
        assert ids == [b + 3 for b in text.encode()] + [1]
        assert vocabulary.decode(ids) == text
        detokenizer = vocabulary.detokenizer()
        pieces = [detokenizer.push([token]) for token in ids]
        assert "".join(pieces) + detokenizer.flush() == text
    assert vocabulary.decode([0, 98, 259, 383, 1]) == "_<extra_id_0><extra_id_124>"
    assert vocabulary.decode([0xC3 + 3, 98]) == "\ufffd_"
    assert vocabulary.encode("\ud800") == [ord("?") + 3, 1]
    with pytest.raises(ValueError, match=r"token id must be in \[0, 383\], got 384"):
        vocabulary.decode([384])
    vocabulary.save(tmp_path)
    kept = find_vocabulary(tmp_path)
    assert isinstance(kept, ByteVocabulary) and kept.differences(vocabulary) is None
    difference = vocabulary.differences(uni_vocabulary())
    assert difference is not None and difference.startswith("id 3 is '<0x00>' in one and")


def test_hugging_faces_byt5_has_the_byte_vocabulary(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}))
    assert isinstance(find_vocabulary(tmp_path), ByteVocabulary)
    assert find_vocabulary(tmp_path / "nothing") is None


def test_a_vocabulary_is_named_by_file_or_word(tmp_path):
    (tmp_path / "mine.model").write_bytes(uni())
    write_tokenizer(tmp_path / "mine.json", tokenizer_of(uni(), 100))
    for name in (str(tmp_path / "mine.model"), str(tmp_path / "mine.json")):
        found = read_vocabulary(name)
        assert type(found) is Vocabulary and found.size == 400
    assert isinstance(read_vocabulary("bytes"), ByteVocabulary)
    with pytest.raises(ValueError, match="no SentencePiece model at"):
        read_vocabulary(str(tmp_path / "gone.model"))
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        read_vocabulary(str(tmp_path / "bad.model"))
