"""Stop strings: nothing of a stop is ever shown, and pieces do not matter."""

import random

import pytest
from tiny_vocabularies import byte_vocabulary

from tpuspec.serving.output_text import OutputText, StopStrings


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: read on until some stop is complete, take the longest that is."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            found = max(ending, key=len)
            return text[:end - len(found)], found
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops)
    shown = [matcher.push(piece) for piece in pieces]
    return [*shown, matcher.flush()], matcher.found


def test_beginning_of_a_stop_is_held_back():
    shown, found = run(["one ", "two ", "three ", "four ", "five"], ["three four"])
    assert shown == ["one ", "two ", "", "", "", ""]
    assert found == "three four"


def test_held_text_is_released_as_soon_as_it_cannot_match():
    shown, found = run(["one ", "three ", "four"], ["three fish"])
    # The "f" of "four" may still match when it comes alone.
    assert shown == ["one ", "", "three four", ""]
    assert found is None
    assert run(["three ", "f", "our"], ["three fish"])[0] == ["", "", "three four", ""]


def test_text_that_ends_in_the_beginning_of_a_stop_is_complete():
    assert run(["one thr"], ["three"]) == (["one ", "thr"], None)


def test_empty_stop_is_refused():
    with pytest.raises(ValueError, match="stop must not contain an empty string"):
        StopStrings(["a", ""])


def test_first_complete_stop_wins_however_the_text_is_cut():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randint(0, 12)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5)))
                 for _ in range(rng.randint(0, 3))]
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 4)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        shown, found = run(pieces, stops)
        want = expected(text, stops)
        assert ("".join(shown), found) == want, (pieces, stops)
        # What is shown at any time is a beginning of what is shown in the end.
        so_far = ""
        for piece in shown:
            so_far += piece
            assert want[0].startswith(so_far), (pieces, stops)


class Halves:
    """A detokenizer that holds the last id's text back until it is flushed."""

    def __init__(self):
        self.held = ""

    def push(self, ids):
        text, self.held = self.held, "".join(chr(i) for i in ids)
        return text

    def flush(self):
        text, self.held = self.held, ""
        return text


def test_stop_is_found_in_text_that_comes_with_the_flush():
    text = OutputText(Halves(), ["bc"])
    assert [text.push(ord(c)) for c in "abc"] == ["", "a", ""]
    assert text.stop is None
    assert text.flush() == ""
    assert text.stop == "bc"


def test_without_a_vocabulary_there_is_no_text():
    text = OutputText(None, [])
    assert text.push(5) + text.flush() == ""


def test_no_stop_is_looked_for_in_the_text_of_the_first_ids():
    class Letters:
        def push(self, ids):
            return "".join(chr(i) for i in ids)

        def flush(self):
            return ""

    for unsearched, shown in ((0, ""), (1, "ab"), (2, "ab"), (3, "abab"), (4, "abab"),
                              (7, "abababc")):
        text = OutputText(Letters(), ["ab"], unsearched=unsearched)
        assert "".join(text.push(ord(c)) for c in "abababc") + text.flush() == shown, unsearched


def test_text_continues_that_of_the_prompt_and_stops_do_not_begin_in_it():
    vocabulary = byte_vocabulary()
    whole = vocabulary.encode("one two three four")[:-1]
    for cut in range(len(whole)):
        text = OutputText(vocabulary.detokenizer(), ["e t"], prompt=whole[:cut])
        before = OutputText(vocabulary.detokenizer(), [])
        shown = "".join(before.push(i) for i in whole[:cut])
        rest = "one two three four"[len(shown):]
        found = "".join(text.push(i) for i in whole[cut:]) + text.flush()
        assert found == (rest[:rest.index("e t")] if "e t" in rest else rest)
