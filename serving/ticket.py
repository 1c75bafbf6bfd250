"""One sample of an accepted request on its way through the engine loop."""

import dataclasses
from collections.abc import Sequence

from tpuspec.decode_state import FinishReason, StepOutput
from tpuspec.measurement import SpeculationStats
from tpuspec.serving.errors import ErrorCode, RequestError
from tpuspec.serving.output_text import OutputText
from tpuspec.serving.request import Ending, Finish, Origin, Request, Timings, Token, TokenChunk
from tpuspec.serving.token_stream import ChunkSink

PRIORITY_SECONDS = 10.0  # that one level of priority is worth in the queue

_ENDINGS = {FinishReason.EOS: Ending.EOS, FinishReason.LENGTH: Ending.LENGTH}


def origin(place: int, *, accepted: int, drafted: int) -> Origin:
    """Origin of the token at a place of a step's new tokens."""
    if place < accepted:
        return Origin.ACCEPTED_DRAFT
    if drafted == 0:
        return Origin.PLAIN
    return Origin.BONUS if accepted == drafted else Origin.CORRECTION


class Ticket:
    """Times, counters and text of a sample; used by the engine loop's thread only.

    Attributes:
      request: what was asked, of this sample alone.
      index: of the sample.
      stream: where the answer goes; that of all samples.
      siblings: the other samples.
      done: ended in any way; results of steps still in flight are dropped.
      stats: counters since the beginning.
    """

    def __init__(self, request: Request, index: int, stream: ChunkSink, text: OutputText,
                 now: float):
        self.request = request
        self.index = index
        self.stream = stream
        self.siblings: Sequence[Ticket] = ()
        self.done = False
        self.stats = SpeculationStats()
        self._text = text
        self._submitted = self._admitted = self._first_token = now
        self._first_step_tokens = 0

    @property
    def deadline(self) -> float | None:
        return self.request.deadline

    @property
    def rank(self) -> float:
        """Place in the queue: the time of arrival, put forward or back by the priority. It never
        changes, so that whoever waits is overtaken for a limited time only."""
        return self._submitted - PRIORITY_SECONDS * self.request.priority

    @property
    def tokens(self) -> int:
        return self.request.most_tokens

    def age(self, now: float) -> float:
        """Seconds since it was accepted."""
        return now - self._submitted

    def admitted(self, now: float) -> None:
        self._admitted = now

    def advance(self, output: StepOutput, slot: int, now: float) -> TokenChunk:
        """The chunk of one step's results.

        The earliest ending wins: a stop string before an end id or the length limit
        drops what the same step brought after it.

        Raises:
          RequestError: the model's logits were not finite.
        """
        reason = FinishReason(int(output.finish[slot]))
        if reason is FinishReason.NON_FINITE:
            raise RequestError(ErrorCode.INTERNAL, "the model gave non-finite logits after "
                               f"{self.stats.emitted} tokens of this request")
        tokens = self._tokens(output, slot, reason)
        if self.stats.emitted == 0:
            self._first_token, self._first_step_tokens = now, len(tokens)
        step = SpeculationStats.of_slot(output, slot)
        if len(tokens) < step.emitted:
            # A stop string cut the block: as with an end id, drafts after it were never
            # judged. Their overlap is not known one by one, so it is shared out evenly.
            examined = min(step.examined, len(tokens))
            step = dataclasses.replace(
                step, emitted=len(tokens), examined=examined,
                accepted=min(step.accepted, len(tokens)),
                overlap=step.overlap * examined / max(step.examined, 1))
        self.stats += step
        return TokenChunk(tokens=tuple(tokens), steps=step, stats=self.stats,
                          finish=self._finish(reason, now), index=self.index)

    def _tokens(self, output: StepOutput, slot: int, reason: FinishReason) -> list[Token]:
        drafted, accepted = int(output.drafted[slot]), int(output.accepted[slot])
        ids = output.tokens[slot, :int(output.num_tokens[slot])].tolist()
        tokens: list[Token] = []
        for place, token_id in enumerate(ids):
            end = reason is FinishReason.EOS and place == len(ids) - 1
            text = "" if end else self._text.push(token_id)
            tokens.append(Token(token_id, origin(place, accepted=accepted, drafted=drafted), text,
                                *self._logprobs(output, slot, place)))
            if self._text.stop is not None:
                return tokens
        if reason is not FinishReason.NONE:
            last = tokens[-1]
            tokens[-1] = dataclasses.replace(last, text=last.text + self._text.flush())
        return tokens

    def _logprobs(self, output: StepOutput, slot: int, place: int,
                  ) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        count = self.request.logprobs
        if count is None:
            return None, ()
        top_ids, top = (x[slot, place, :count].tolist()
                        for x in (output.logprobs.top_ids, output.logprobs.top))
        return float(output.logprobs.tokens[slot, place]), tuple(zip(top_ids, top, strict=True))

    def _finish(self, reason: FinishReason, now: float) -> Finish | None:
        stop = self._text.stop
        if stop is None and reason is FinishReason.NONE:
            return None
        return Finish(
            ending=Ending.STOP if stop is not None else _ENDINGS[reason], stop=stop or "",
            seed=self.request.seed,
            decode_tokens=self.stats.emitted - self._first_step_tokens,
            timings=Timings(queue=self._admitted - self._submitted,
                            first_token=self._first_token - self._submitted,
                            decode=now - self._first_token, total=now - self._submitted))
