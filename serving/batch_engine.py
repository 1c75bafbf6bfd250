"""Many requests on one engine, from plain code: answers in order, slots always busy.

    with local.open_engine(slots=8) as engine:
        for answer in engine.generate(["translate English to German: Good morning."]):
            print(answer.text)

Requests are read some way ahead and sorted by length, so that short sources do not pay
for long ones. What runs together shares one compiled program, which a request's own
source and draft length choose: its output is the same, bit for bit, whichever requests
run beside it.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import queue
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

from tpuspec.measurement import SpeculationStats
from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving.client import make_request
from tpuspec.serving.engine_loop import EngineLoop
from tpuspec.serving.errors import ErrorCode, RequestError
from tpuspec.serving.interfaces import SlotEngine, Vocabulary
from tpuspec.serving.records import Failure
from tpuspec.serving.request import Finish, Request, TokenChunk
from tpuspec.serving.ticket import Ticket
from tpuspec.serving.validation import Door

_QUEUED = 4  # requests that wait in the engine's queue, for each slot
_LOOK_AHEAD = 64  # requests sorted together, for each slot
_HELD = 4  # such windows that may wait for the answer before them


def line_seed(seed: int, key: str | int) -> int:
    """The seed of one line of a job, of the job's seed and the line's id.

    It depends on nothing else, so that a line keeps its output in another file, place or
    shard. 53 bits, which every JSON reader keeps.
    """
    digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One output.

    Attributes:
      request: what was asked, with the seed and the draft length used; of this sample.
      text: without the stop string; empty for a model without a vocabulary.
      token_ids: the end id included.
      logprobs: of each token, if asked for, else empty.
      top_logprobs: the same of the most likely ids at each token's place, with their ids.
      finish: why it ended, and how long it took.
      stats: counters; ``stats.alpha``, ``stats.tokens_per_target_run``.
      others: the further samples of a request with ``n`` above 1.
    """

    request: Request
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    finish: Finish
    stats: SpeculationStats
    others: tuple["Answer", ...] = ()

    @classmethod
    def of(cls, request: Request, chunks: Sequence[TokenChunk]) -> "Answer":
        """Of all chunks of one sample."""
        tokens, last = [token for chunk in chunks for token in chunk.tokens], chunks[-1]
        assert last.finish is not None
        return cls(
            request=request.sample(last.index), text="".join(token.text for token in tokens),
            token_ids=tuple(token.id for token in tokens),
            logprobs=tuple(t.logprob for t in tokens if t.logprob is not None),
            top_logprobs=tuple(token.top_logprobs for token in tokens),
            finish=last.finish, stats=last.stats)


class _Place:
    """A request on its way, and where the engine's thread puts its chunks."""

    def __init__(self, number: int, done: "queue.SimpleQueue[_Place]"):
        self.number = number
        self.request: Request | None = None
        self.program = (0, 0)  # what the engine runs it with: draft rung, source bucket
        self.result: Answer | Failure | None = None
        self.given = False  # to the caller
        self._done = done
        self._chunks: dict[int, list[TokenChunk]] = collections.defaultdict(list)
        self._finished = 0

    def order(self) -> tuple[tuple[int, int], int]:
        """What requests are sorted by."""
        return self.program, 0 if self.request is None else len(self.request.source)

    def put(self, chunk: TokenChunk) -> None:
        assert self.request is not None
        self._chunks[chunk.index].append(chunk)
        self._finished += chunk.finish is not None
        if self._finished == self.request.n:
            first, *others = (Answer.of(self.request, self._chunks[index])
                              for index in range(self.request.n))
            self.end(dataclasses.replace(first, others=tuple(others)))

    def fail(self, error: RequestError) -> None:
        self.end(Failure.of(error))

    def end(self, result: Answer | Failure) -> None:
        self.result = result
        self._chunks.clear()
        self._done.put(self)


class BatchEngine:
    """Runs requests on a warm engine."""

    def __init__(self, engine: SlotEngine, vocabulary: Vocabulary | None, *, eos_id: int):
        self._loop = EngineLoop(engine, vocabulary,
                                queue_limit=(_QUEUED + 1) * engine.config.slots)
        self._door = Door(engine.config, vocabulary_size=engine.vocabulary_size, eos_id=eos_id,
                          vocabulary=vocabulary)
        self._busy = False

    @property
    def slots(self) -> int:
        """Requests that run at once."""
        return self._loop.engine.config.slots

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop()

    def check(self, message: pb.GenerateRequest) -> Request:
        """Raises ValueError on the first field that is out of bounds."""
        return self._door.check(message)

    def generate(self, sources: Iterable[str | Sequence[int]], *, seed: int | None = None,
                 **parameters: Any) -> Generator[Answer]:
        """The answers, in the order of the sources, which are read as they are needed.

        Args:
          sources: texts or ids.
          seed: source k (from 1) is sampled with ``line_seed(seed, k)``, as line k of a
            ``tpuspec batch`` job; None draws fresh seeds, echoed in ``answer.request.seed``.
          parameters: the others of ``tpuspec.serving.client.make_request``.

        Raises:
          ValueError: a source or a parameter is out of bounds.
          RequestError: the engine failed, or the model's logits were not finite.
        """
        def requests() -> Iterator[pb.GenerateRequest]:
            for number, source in enumerate(sources, 1):
                own = None if seed is None else line_seed(seed, number)
                yield make_request(source, seed=own, **parameters)

        for number, result in enumerate(self.results(requests()), 1):
            if isinstance(result, Answer):
                yield result
            elif result.code == ErrorCode.INVALID_ARGUMENT.name:
                raise ValueError(f"source {number}: {result.message}")
            else:
                raise RequestError(ErrorCode[result.code], f"source {number}: {result.message}")

    def results(self, messages: Iterable[pb.GenerateRequest | Failure],
                ) -> Iterator[Answer | Failure]:
        """An answer for each message, or why there is none, in their order; as ``completed``."""
        held: dict[int, Answer | Failure] = {}
        place = 0
        with contextlib.closing(self.completed(messages)) as completed:
            for number, result in completed:
                held[number] = result
                while place in held:
                    yield held.pop(place)
                    place += 1

    def completed(self, messages: Iterable[pb.GenerateRequest | Failure],
                  ) -> Generator[tuple[int, Answer | Failure]]:
        """The same as soon as there are any, each with its message's place, from 0.

        Messages are read a few windows beyond the first without a result, and no further.

        Raises:
          RequestError: the engine failed; what was not answered yet stays so.
          RuntimeError: another iteration has not ended.
        """
        if self._busy:
            raise RuntimeError("another iteration over this engine has not ended")
        self._busy = True
        run = _Run(self._loop, self._door)
        try:
            yield from run.completed(messages)
        finally:
            run.cancel()
            self._busy = False


class _Run:
    """One iteration. Requests wait in ``_ready``, then are in flight, then are done."""

    def __init__(self, loop: EngineLoop, door: Door):
        self._loop = loop
        self._door = door
        self._config = loop.engine.config
        self._window = _LOOK_AHEAD * self._config.slots
        self._windows = 0
        self._count = 0
        self._in_order: collections.deque[_Place] = collections.deque()  # from the first undone
        self._ready: collections.deque[_Place] = collections.deque()
        self._done: queue.SimpleQueue[_Place] = queue.SimpleQueue()
        self._in_flight: dict[_Place, Sequence[Ticket]] = {}
        self._program = (0, 0)

    def completed(self, messages: Iterable[pb.GenerateRequest | Failure],
                  ) -> Iterator[tuple[int, Answer | Failure]]:
        upcoming, more = iter(messages), True
        while more or self._in_order:
            if more and not self._ready and len(self._in_order) < _HELD * self._window:
                more = self._read(upcoming)
            self._submit()
            if not self._in_order:
                continue
            place = self._done.get()
            self._in_flight.pop(place, None)  # what was refused at the door never was
            self._submit()
            assert place.result is not None
            if isinstance(place.result, Failure) and (closed := self._loop.closed):
                raise closed  # of the engine, not of this request
            yield place.number, place.result
            place.given = True
            while self._in_order and self._in_order[0].given:
                self._in_order.popleft()

    def cancel(self) -> None:
        """Frees the slots; what still comes is dropped with this object."""
        for tickets in self._in_flight.values():
            self._loop.cancel(tickets)

    def _read(self, upcoming: Iterator[pb.GenerateRequest | Failure]) -> bool:
        """Takes in one window; False at the end."""
        places = [self._place(message) for message in itertools.islice(upcoming, self._window)]
        self._in_order += places
        # Up, then down: a window begins with the lengths that the last one ended with.
        self._ready += sorted((place for place in places if place.request is not None),
                              key=_Place.order, reverse=self._windows % 2 == 1)
        self._windows += 1
        return len(places) == self._window

    def _place(self, message: pb.GenerateRequest | Failure) -> _Place:
        place = _Place(self._count, self._done)
        self._count += 1
        if isinstance(message, Failure):
            place.end(message)
            return place
        try:
            request = place.request = self._door.check(message)
        except ValueError as error:
            place.end(Failure(ErrorCode.INVALID_ARGUMENT.name, str(error)))
        else:
            place.program = (self._config.rung(request.draft_length or 0),
                             self._config.source_bucket(len(request.source)))
        return place

    def _submit(self) -> None:
        """Fills the engine's queue with requests of the program that runs."""
        while self._ready:
            place = self._ready[0]
            if self._in_flight and place.program != self._program:
                return  # when those of the other program have ended
            assert place.request is not None
            samples = place.request.n + sum(map(len, self._in_flight.values()))
            if samples > (_QUEUED + 1) * self._config.slots:
                return
            self._ready.popleft()
            self._program = place.program
            self._in_flight[place] = self._loop.submit(place.request, place)
