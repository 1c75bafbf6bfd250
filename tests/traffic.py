"""Random traffic over an engine loop: requests of all kinds come, leave and expire at random
steps. The clock counts steps, so that deadlines pass at known ones.
"""

import collections
import dataclasses
import random
import threading
import time
import weakref
from collections.abc import Sequence

from engines import Job, solo
from fake_engine import FakeVocabulary

from tpuspec.decode_state import FinishReason
from tpuspec.engine import Engine, StepHandle
from tpuspec.sampling import SamplingParams
from tpuspec.serving.engine_loop import EngineLoop, Load
from tpuspec.serving.errors import RequestError
from tpuspec.serving.request import Ending, Request, TokenChunk

VOCABULARY = FakeVocabulary()
_PATIENCE = 300.0  # seconds for all of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visit:
    """A request and how long it stays.

    Attributes:
      arrives: step before which it is submitted.
      cancelled_after, expires_after: steps from then; None is never.
    """

    request: Request
    arrives: int
    cancelled_after: int | None = None
    expires_after: int | None = None


def random_visits(rng: random.Random, count: int, *, every: float, longest_source: int,
                  draft_lengths: int, samples: int, ids: int = 48) -> list[Visit]:
    """Visits in the order of their arrival.

    Args:
      every: steps between arrivals, on average; they come in bursts.
      longest_source: tokens.
      draft_lengths: the largest.
      samples: the most that one request asks for.
      ids: in the vocabulary.
    """
    visits, now = [], 0
    for number in range(count):
        if rng.random() < 0.3:
            now += rng.randrange(round(2 * every / 0.3) + 1)
        visits.append(Visit(
            request=_random_request(rng, number, longest_source, draft_lengths, samples, ids),
            arrives=now,
            cancelled_after=rng.randrange(25) if rng.random() < 0.2 else None,
            expires_after=rng.randrange(1, 40) if rng.random() < 0.2 else None))
    return visits


def _random_request(rng: random.Random, number: int, longest_source: int, draft_lengths: int,
                    samples: int, ids: int) -> Request:
    def some(chance: float, value: object, otherwise: object) -> object:
        return value if rng.random() < chance else otherwise

    def pick(count: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(3, ids), count))

    sampling = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0]), top_k=some(0.2, rng.randrange(1, 12), 0),
        top_p=some(0.2, 0.9, 1.0), min_p=some(0.1, 0.1, 0.0),
        repetition_penalty=some(0.15, 1.4, 1.0), presence_penalty=some(0.15, 0.7, 0.0),
        frequency_penalty=some(0.15, 0.4, 0.0),
        logit_bias=some(0.1, {rng.randrange(3, ids): 3.0}, {}),
        banned_ids=some(0.1, pick(5), ()), allowed_ids=some(0.1, pick(20), ()),
        lenience=some(0.1, 0.5, 1.0))
    prompt = pick(rng.randrange(1, 8)) if rng.random() < 0.2 else ()
    stops = [str(rng.randrange(10)), "w3", f"w{rng.randrange(ids)} w", "4 w1", "w20"]
    most = rng.randrange(1, 25)
    return Request(
        request_id=str(number), source=(*pick(rng.randrange(longest_source)), 1),
        sampling=sampling, seed=rng.getrandbits(64), max_new_tokens=most,
        min_new_tokens=some(0.2, rng.randrange(most + 1), 0),
        eos_ids=rng.choice([(), (1,), (1, 7), (5, 11)]),
        stop=tuple(rng.sample(stops, 2)) if rng.random() < 0.3 else (),
        draft_length=rng.randrange(draft_lengths + 1), label=rng.choice(["", "a"]),
        decoder_prompt=prompt, logprobs=some(0.2, 3, None), priority=rng.randrange(-2, 3),
        n=some(0.15, rng.randrange(1, samples + 1), 1))


class Answer:
    """What came of a visit; one list of chunks for each sample."""

    def __init__(self, samples: int) -> None:
        self.samples = [Sample() for _ in range(samples)]
        self.error: RequestError | None = None

    def put(self, chunk: TokenChunk) -> None:
        sample = self.samples[chunk.index]
        assert self.error is None and not sample.finish
        sample.chunks.append(chunk)

    def fail(self, error: RequestError) -> None:
        assert self.error is None and not all(sample.finish for sample in self.samples)
        self.error = error


class Sample:
    """What came of one."""

    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []

    @property
    def finish(self):
        return self.chunks[-1].finish if self.chunks else None

    @property
    def tokens(self):
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


class _Clock:
    """An engine whose steps are the time; visitors come and go before each."""

    def __init__(self, engine: Engine, visits: Sequence[Visit]):
        self.engine = engine
        self.steps = 0
        self.loop: EngineLoop | None = None
        self.answers = {id(visit): Answer(visit.request.n) for visit in visits}
        self.tickets: weakref.WeakSet = weakref.WeakSet()
        self._coming = collections.deque(visits)
        self._leaving: dict[int, list] = collections.defaultdict(list)
        self._lock = threading.Lock()  # of what follows steps: two threads let visitors in

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    def step(self) -> StepHandle:
        self.steps += 1
        self.let_in()
        return self.engine.step()

    def let_in(self) -> None:
        with self._lock:
            while self._coming and self._coming[0].arrives <= self.steps:
                self._submit(self._coming.popleft())
            for step in [step for step in self._leaving if step <= self.steps]:
                for tickets in self._leaving.pop(step):
                    self.loop.cancel(tickets)

    def skip(self) -> bool:
        """To the next arrival, where nobody runs; False if none is to come."""
        with self._lock:
            if not self._coming:
                return False
            self.steps = max(self.steps, self._coming[0].arrives)
        self.let_in()
        return True

    def _submit(self, visit: Visit) -> None:
        request = visit.request
        if visit.expires_after is not None:
            request = dataclasses.replace(request, deadline=self.steps + visit.expires_after)
        tickets = self.loop.submit(request, self.answers[id(visit)])
        self.tickets.update(tickets)
        if visit.cancelled_after is not None:
            self._leaving[self.steps + visit.cancelled_after].append(tickets)


def visit_all(engine: Engine, visits: Sequence[Visit], *, overlap: bool,
              ) -> tuple[list[Answer], Load, weakref.WeakSet]:
    """Runs all visits; returns their answers, the load afterwards, and the tickets alive."""
    clock = _Clock(engine, visits)
    samples = sum(visit.request.n for visit in visits)
    loop = clock.loop = EngineLoop(clock, VOCABULARY, queue_limit=samples, overlap=overlap,
                                   clock=lambda: float(clock.steps))
    loop.start()
    give_up = time.monotonic() + _PATIENCE
    while True:
        load = loop.load
        if not load.active_slots and not load.queued and not clock.skip():
            break
        assert time.monotonic() < give_up, load
        time.sleep(0.002)
    assert loop.stop(10.0)
    assert loop.closed is None or "shutting down" in str(loop.closed)
    return [clock.answers[id(visit)] for visit in visits], loop.load, clock.tickets


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a request gives alone."""

    ids: list[int]
    text: str
    ending: Ending
    stop: str
    logprobs: list[float]


def expected(engine: Engine, request: Request, slot: int) -> Expected:
    """One sample on the engine itself, without loop and neighbours; stops are cut in the whole
    text."""
    found = solo(engine, Job(
        source=request.source, sampling=request.sampling, seed=request.seed,
        max_new_tokens=request.max_new_tokens, eos_ids=request.eos_ids,
        draft_length=request.draft_length, min_new_tokens=request.min_new_tokens,
        decoder_prompt=request.decoder_prompt, logprobs=request.logprobs is not None), slot)
    is_end = found.finish is FinishReason.EOS
    began, shown, searched = bool(VOCABULARY.decode(request.decoder_prompt)), "", ""
    for place, token_id in enumerate(found.ids):
        word = "" if is_end and place == len(found.ids) - 1 else VOCABULARY.decode([token_id])
        piece = (" " if began and word else "") + word
        began = began or bool(word)
        if place < request.min_new_tokens:
            shown += piece
            continue
        searched += piece
        ends = [(searched.index(stop) + len(stop), -len(stop), stop) for stop in request.stop
                if stop in searched]
        if ends:
            end, _, stop = min(ends)
            return Expected(found.ids[:place + 1], shown + searched[:end - len(stop)], Ending.STOP,
                            stop, found.logprobs[:place + 1])
    ending = Ending.EOS if is_end else Ending.LENGTH
    return Expected(found.ids, shown + searched, ending, "", found.logprobs)
