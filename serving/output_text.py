"""Ids to the text that is shown: whole characters, and never a part of a stop string."""

from collections.abc import Sequence

from tpuspec.serving.interfaces import Detokenizer


class StopStrings:
    """Finds stops in a text that arrives in pieces.

    The stop that is complete first wins, the longest of several that end together.
    So the result does not depend on how the text is cut into pieces. Text is held
    back exactly as long as it may still become a stop:

        stops = StopStrings(["three four"])
        stops.push("two th")           -> "two "
        stops.push("ree five")         -> "three five"
        stops.push(", three four six") -> ", "  and stops.found == "three four"
    """

    def __init__(self, stops: Sequence[str]):
        if "" in stops:
            raise ValueError("stop must not contain an empty string")
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Returns what is certain to be shown; nothing once a stop was found."""
        if self.found is not None:
            return ""
        held = self._held + text
        matches = [(held.index(stop) + len(stop), stop) for stop in self._stops if stop in held]
        if matches:
            end, self.found = min(matches, key=lambda match: match[0])
            self._held = ""
            return held[:end - len(self.found)]
        keep = self._length_to_keep(held)
        self._held = held[len(held) - keep:]
        return held[:len(held) - keep]

    def flush(self) -> str:
        """Returns the held text; no more comes."""
        held, self._held = self._held, ""
        return held

    def _length_to_keep(self, text: str) -> int:
        """Length of the longest end of the text that is the beginning of a stop."""
        longest = len(self._stops[0]) if self._stops else 1
        for length in range(min(len(text), longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class OutputText:
    """The text of one request's output, id by id.

    Args:
      prompt: ids before the output, whose text is not shown: what is shown continues it.
      unsearched: ids in whose text no stop is looked for: it is shown as it comes, so that
        a stop cannot begin in it either.
    """

    def __init__(self, detokenizer: Detokenizer | None, stops: Sequence[str], *,
                 prompt: Sequence[int] = (), unsearched: int = 0):
        self._detokenizer = detokenizer
        if detokenizer is not None:
            detokenizer.push(prompt)
        self._unsearched = unsearched
        self._stops = StopStrings(stops)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.found

    def push(self, token_id: int) -> str:
        """The text that became certain with this id."""
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push([token_id])
        if self._unsearched:
            self._unsearched -= 1
            return text
        return self._stops.push(text)

    def flush(self) -> str:
        """The rest of the text; a stop may still be found in it."""
        if self._detokenizer is None:
            return ""
        shown = self._stops.push(self._detokenizer.flush())
        return shown + self._stops.flush()
