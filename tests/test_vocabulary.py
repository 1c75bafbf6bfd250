"""Tokenizer and text: SentencePiece itself is the oracle."""

import random
import threading
from collections.abc import Sequence

import pytest
import sentencepiece
from tiny_vocabularies import byte, lines, train, uni

from tpuspec.vocabulary import Detokenizer, Vocabulary


@pytest.fixture(scope="module", params=["uni", "byte", "no_prefix"])
def pair(request) -> tuple[Vocabulary, sentencepiece.SentencePieceProcessor]:
    proto = {"uni": uni, "byte": byte, "no_prefix": lambda: train(
        300, add_dummy_prefix=False, remove_extra_whitespaces=False)}[request.param]()
    return (Vocabulary.from_bytes(proto, 10),
            sentencepiece.SentencePieceProcessor(model_proto=proto))


def stream(vocabulary: Vocabulary, ids: Sequence[int], chunk: int) -> list[str]:
    detokenizer = vocabulary.detokenizer()
    chunks = [detokenizer.push(ids[i:i + chunk]) for i in range(0, len(ids), chunk)]
    return [*chunks, detokenizer.flush()]


@pytest.mark.parametrize("chunk", [1, 6])
def test_spaces_do_not_vanish_when_streaming(pair, chunk):
    vocabulary, oracle = pair
    for text in (*lines()[:20], "Ein Satz", "  two  spaces ", "A1b2, c!"):
        ids = vocabulary.encode(text)
        assert ("".join(stream(vocabulary, ids, chunk)) == vocabulary.decode(ids)
                == oracle.decode(ids))


def test_any_ids_decode_as_sentencepiece_decodes_them(pair):
    """Random ids: control ids inside, runs of spaces, bytes that are no UTF-8, unknown ids."""
    vocabulary, oracle = pair
    rng, pieces = random.Random(1), oracle.get_piece_size()
    spaces = [i for i in range(pieces) if oracle.id_to_piece(i).startswith("\u2581")]
    pools = [range(pieces), [0, 1, 2, *spaces[:3], *range(3, 259)], [0, 2, *spaces[:5]]]
    for _ in range(3000):
        ids = rng.choices(rng.choice(pools), k=rng.randint(0, 12))
        joined = "".join(stream(vocabulary, ids, rng.randint(1, 4)))
        assert joined == vocabulary.decode(ids) == oracle.decode(ids), ids


def test_no_half_character_is_ever_sent():
    vocabulary = Vocabulary.from_bytes(byte(), 0)
    text = "naïve 日本 🎉 {x}"
    chunks = stream(vocabulary, vocabulary.encode(text), 1)
    assert "".join(chunks) == text
    assert not any("\ufffd" in chunk for chunk in chunks)
    detokenizer = vocabulary.detokenizer()
    *first, _eos = vocabulary.encode("🎉")
    assert detokenizer.push(first[:-1]) == ""
    assert detokenizer.flush() == "\ufffd" * 3  # an output cut inside a character says so


def test_unknown_characters_and_runs_of_white_space_are_normalised_once():
    vocabulary = Vocabulary.from_bytes(uni(), 0)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=uni())
    for text in ('{"a": 1}', "a\n\n b   c", "a\tb", "a\u200db", " " * 10_000, ""):
        ids = vocabulary.encode(text)
        assert ids == [*oracle.encode(text), 1]
        assert "".join(stream(vocabulary, ids, 1)) == vocabulary.decode(ids)
    assert vocabulary.decode([2]) == " \u2047 "
    vocabulary.encode("half a surrogate \ud800")


@pytest.mark.parametrize("text", ["a", "a </s>", "", "</s>", "abc </s> def", "<pad>", "<unk>",
                                  "<extra_id_0>"])
def test_text_yields_one_eos_and_no_control_id(pair, text):
    vocabulary, _ = pair
    *inside, last = vocabulary.encode(text)
    assert last == vocabulary.eos_id == 1
    assert not {0, 1} & set(inside)
    assert max(inside, default=0) < vocabulary.size - 10  # no sentinel either
    if "def" in text:
        assert len(inside) > len(vocabulary.encode("abc </s>")) - 1


def test_sentinels_count_backwards_from_the_last_id():
    vocabulary = Vocabulary.from_bytes(uni())
    assert vocabulary.size == 400
    assert vocabulary.decode([399]) == "<extra_id_0>"
    assert vocabulary.decode([300]) == "<extra_id_99>"
    *word, _ = vocabulary.encode("one")
    assert vocabulary.decode([399, *word, 398]) == "<extra_id_0> one<extra_id_1>"


def test_ids_that_do_not_exist_are_refused():
    vocabulary = Vocabulary.from_bytes(uni(), 0)
    for bad in (-1, 300, 350):
        with pytest.raises(ValueError, match=rf"token id must be in \[0, 299\], got {bad}"):
            vocabulary.decode([5, bad])


def test_sentinels_among_the_pieces_are_not_added_again():
    proto = train(300, user_defined_symbols=["<extra_id_0>", "<extra_id_1>"])
    assert Vocabulary.from_bytes(proto).size == 300


def test_vocabulary_survives_its_file(tmp_path):
    vocabulary = Vocabulary.from_bytes(uni(), 28)
    vocabulary.save(tmp_path)
    for path in (tmp_path, tmp_path / "spiece.model"):
        loaded = Vocabulary.load(path)
        assert loaded.size == 328 and vocabulary.differences(loaded) is None
    with pytest.raises(ValueError, match="no SentencePiece model"):
        Vocabulary.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        Vocabulary.from_bytes(b"weights, perhaps")


def test_vocabularies_are_compared_piece_by_piece():
    """Padding of the embedding is no part of it: sizes of models are not asked for."""
    base = Vocabulary.from_bytes(uni(), 0)
    assert base.differences(Vocabulary.from_bytes(uni(), 0)) is None
    found = base.differences(Vocabulary.from_bytes(train(300, user_defined_symbols=["X"]), 0))
    assert found == f"id 3 is {base._pieces[3][0]!r} in one and 'X' in the other"
    assert "10 in the other" in (base.differences(Vocabulary.from_bytes(uni(), 10)) or "")


def test_one_vocabulary_serves_many_threads():
    vocabulary = Vocabulary.from_bytes(byte(), 0)
    texts = list(lines()[:50])
    wanted = [(vocabulary.encode(text), text) for text in texts]
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(100):
            ids, text = rng.choice(wanted)
            if vocabulary.encode(text) != ids or "".join(stream(vocabulary, ids, 2)) != text:
                failures.append(text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_work_per_token_does_not_grow_with_the_output():
    """What a token is added to is the rest of an unfinished character, however long the text."""
    vocabulary = Vocabulary.from_bytes(byte(), 0)
    ids = vocabulary.encode(" ".join(lines()[:60]))[:-1]
    detokenizer, held = Detokenizer(vocabulary), set()
    for token in 3 * ids:
        detokenizer.push([token])
        held |= {(name, len(value)) for name, value in vars(detokenizer).items()
                 if name != "_vocabulary" and not isinstance(value, bool)}
    assert held <= {("_bytes", length) for length in range(4)}
