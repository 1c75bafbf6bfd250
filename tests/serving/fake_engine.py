"""An engine and a vocabulary without a model; every output can be computed by hand.

The engine counts. A source ``(start, count, 1)`` gives start+1, start+2, ... start+count
and then the end id 1; ``(start, 1)`` never ends by itself:

    source (10, 3, 1)       -> 11 12 13 1
    source (10, 1)          -> 11 12 13 14 ...
    source (1,)             -> 2 3 4 ...     (the empty text)

At a temperature above 0, every id before the end is one of eight and depends on the seed
and the position only: ``sampled_id(seed, position)``.

A step guesses ``draft_length`` drafts, of which the first ``accepts`` are right (all by
default), and adds the target's own token. So with draft length 3 and all accepted:

    source (10, 9, 1)       -> [11 12 13 14] [15 16 17 18] [19 1]
                                a  a  a  b    a  a  a  b    a  a      (accepted, bonus)

and with ``accepts=1``:

    source (10, 3, 1)       -> [11 12] [13 1]
                                a  c    a  c                          (accepted, correction)

The log-probability of the token at position n of an output is -n / 8; the most likely ids are
the token, its successor and so on, each 1 less likely than the one before.

A decoder prompt takes the first places of a step's window and changes nothing else.

Words: the vocabulary has "zero" "one" ... "twenty" at ids 30 to 50, "w3" at id 3 and so on,
so a source "zero" gives "one two three ...".
"""

import dataclasses
import hashlib
import threading
import time

import numpy as np

from tpuspec.config import EngineConfig
from tpuspec.decode_state import FinishReason, StepOutput
from tpuspec.measurement import CostReport
from tpuspec.token_logprobs import TokenLogprobs

EOS_ID = 1
NON_FINITE_START = 13  # a source that starts with it meets non-finite logits at its third token
_WORDS = ("zero one two three four five six seven eight nine ten eleven twelve thirteen "
          "fourteen fifteen sixteen seventeen eighteen nineteen twenty").split()
_FIRST_WORD = 30

CONFIG = EngineConfig(slots=2, source_buckets=(8, 64), max_target_length=100,
                      draft_lengths=(0, 1, 3, 7), draft_length=3)
COST = CostReport(target_ms=2.0, draft_ms=0.5, verify_ms={0: 2.0, 1: 2.1, 3: 2.5, 7: 3.0},
                  step_ms={0: 2.0, 1: 2.6, 3: 4.0, 7: 6.5}, method="made up")


def sampled_id(seed: int, position: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=1).digest()
    return 20 + digest[0] % 8


@dataclasses.dataclass
class _Row:
    """A request in a slot."""

    source: tuple[int, ...]
    temperature: float
    seed: int
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    draft_length: int
    logprobs: bool
    prompt: int  # tokens of it that are to come
    position: int = 0

    def token(self, position: int) -> int:
        start = self.source[0] if self.source[0] != EOS_ID else 1
        count = self.source[1] if len(self.source) > 2 else None
        if position == count:
            return EOS_ID
        if self.temperature > 0:
            return sampled_id(self.seed, position)
        return start + 1 + position


class FakeHandle:
    def __init__(self, output: StepOutput, ready: float, ended, error: Exception | None):
        self._output, self._ready, self._ended, self._error = output, ready, ended, error

    def read(self) -> StepOutput:
        time.sleep(max(0.0, self._ready - time.monotonic()))
        if self._error is not None:
            raise self._error
        self._ended()
        return self._output


class FakeEngine:
    """Checks what a real engine may rely on: one thread, no insert into a taken slot.

    Args:
      config: slots and limits.
      accepts: drafts accepted per step at the most; None is all.
      step_seconds: how long the "device" takes for a step.
      fail_at_step: the step whose read raises RuntimeError.
      cost: what ``cost`` gives.
    """

    compilations = 0

    def __init__(self, config: EngineConfig = CONFIG, *, accepts: int | None = None,
                 step_seconds: float = 0.0, fail_at_step: int | None = None,
                 cost: CostReport | None = COST):
        self.config = config
        self.vocabulary_size = 2000
        self.cost = cost
        self.steps = 0
        self.rows: dict[int, _Row] = {}
        self._accepts = accepts
        self._step_seconds = step_seconds
        self._fail_at_step = fail_at_step
        self._ready = 0.0
        self._thread: int | None = None

    def insert(self, slot, source, *, sampling, seed, max_new_tokens, eos_ids, draft_length,
               label="", min_new_tokens=0, decoder_prompt=(), logprobs=False):
        self._check_thread()
        assert 0 <= slot < self.config.slots
        assert slot not in self.rows, f"slot {slot} is taken"
        assert 1 <= len(source) <= self.config.max_source_length and source[-1] == EOS_ID
        if source[0] == 17:
            raise ValueError("the fake engine does not like 17")
        self.rows[slot] = _Row(tuple(source), sampling.temperature, seed, max_new_tokens,
                               tuple(eos_ids), 3 if draft_length is None else draft_length,
                               logprobs, len(decoder_prompt))

    def release(self, slot):
        self._check_thread()
        self.rows.pop(slot, None)

    def step(self) -> FakeHandle:
        self._check_thread()
        if not self.rows:
            raise RuntimeError("step needs an active slot")
        rung = self.config.rung(max(row.draft_length for row in self.rows.values()))
        slots = self.config.slots
        output = StepOutput(
            np.zeros((slots, rung + 1), np.int32), *(np.zeros(slots, np.int32) for _ in range(5)),
            np.zeros(slots, np.float32), np.zeros(slots, np.int32), np.zeros(slots, np.int32),
            TokenLogprobs(
                np.zeros((slots, rung + 1), np.float32),
                np.zeros((slots, rung + 1, 20), np.float32),
                np.zeros((slots, rung + 1, 20), np.int32)))
        ended = [(slot, row) for slot, row in self.rows.items()
                 if self._step_row(slot, row, output)]
        self.steps += 1
        error = RuntimeError("the fake device is gone") if (
            self.steps == self._fail_at_step) else None
        self._ready = max(self._ready, time.monotonic()) + self._step_seconds
        return FakeHandle(output, self._ready, lambda: self._forget(ended), error)

    def _step_row(self, slot: int, row: _Row, output: StepOutput) -> bool:
        """Fills the slot's row of the output; True if the request ends here."""
        if row.position < 0:  # ended in a step that the host has not read yet
            return False
        drafted = row.draft_length
        accepted = drafted if self._accepts is None else min(drafted, self._accepts)
        rejected = accepted < drafted
        within = min(row.prompt, drafted + 1)
        row.prompt -= within
        if within == drafted + 1:
            return False
        drafted, accepted = drafted - within, max(accepted - within, 0)
        ids, finish, before = [], FinishReason.NONE, row.position
        while len(ids) < accepted + 1 and finish is FinishReason.NONE:
            ids.append(row.token(row.position))
            row.position += 1
            if row.source[0] == NON_FINITE_START and row.position == 3:
                ids, finish = [], FinishReason.NON_FINITE
            elif ids[-1] in row.eos_ids:
                finish = FinishReason.EOS
            elif row.position == row.max_new_tokens:
                finish = FinishReason.LENGTH
        rejected = rejected and len(ids) == accepted + 1
        output.tokens[slot, :len(ids)] = ids
        output.num_tokens[slot] = len(ids)
        if row.logprobs:
            for place, token_id in enumerate(ids):
                output.logprobs.tokens[slot, place] = -(before + place) / 8
                output.logprobs.top[slot, place] = -(before + place) / 8 - np.arange(20)
                output.logprobs.top_ids[slot, place] = token_id + np.arange(20)
        output.drafted[slot] = drafted
        output.accepted[slot] = min(accepted, len(ids))
        output.examined[slot] = output.accepted[slot] + rejected
        output.overlap[slot] = output.accepted[slot]
        output.finish[slot] = finish
        if finish is not FinishReason.NONE:
            row.position = -1
        return finish is not FinishReason.NONE

    def _forget(self, ended):
        for slot, row in ended:
            if self.rows.get(slot) is row:
                del self.rows[slot]

    def _check_thread(self):
        self._thread = self._thread or threading.get_ident()
        assert self._thread == threading.get_ident(), "the engine is used by two threads"


class _Words:
    """One word an id, joined by spaces; unfinished ids give no text."""

    def __init__(self, vocabulary: "FakeVocabulary"):
        self._vocabulary = vocabulary
        self._empty = True

    def push(self, ids):
        text = self._vocabulary.decode(ids)
        if not text:
            return ""
        space, self._empty = "" if self._empty else " ", False
        return space + text

    def flush(self):
        return ""


class FakeVocabulary:
    eos_id = EOS_ID

    def encode(self, text):
        return [*(self._id(word) for word in text.split()), EOS_ID]

    def decode(self, ids):
        return " ".join(self._word(i) for i in ids if i > EOS_ID)

    def detokenizer(self):
        return _Words(self)

    @staticmethod
    def _id(word):
        if word in _WORDS:
            return _FIRST_WORD + _WORDS.index(word)
        return int(word[1:]) if word[0] == "w" and word[1:].isdigit() else 2

    @staticmethod
    def _word(token_id):
        place = token_id - _FIRST_WORD
        return _WORDS[place] if 0 <= place < len(_WORDS) else f"w{token_id}"
