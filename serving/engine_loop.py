"""The one thread that drives the engine.

A turn: plan, release, insert, launch a step, then read the step before it. So one
step is always in flight while the host works on the previous one's results, and
every step carries the requests it was launched with: results go to requests,
never to whoever holds the slot by then.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from absl import logging

from tpuspec.measurement import SpeculationStats
from tpuspec.serving.errors import ErrorCode, RequestError
from tpuspec.serving.interfaces import SlotEngine, StepHandle, Vocabulary
from tpuspec.serving.output_text import OutputText
from tpuspec.serving.request import Request, TokenChunk
from tpuspec.serving.scheduler import QueueFull, Scheduler
from tpuspec.serving.ticket import Ticket
from tpuspec.serving.token_stream import ChunkSink


@dataclasses.dataclass(frozen=True)
class Load:
    """Gauges and counters since the start; each accepted request ends in one of the last three.
    Each sample counts as a request."""

    active_slots: int = 0
    queued: int = 0
    queued_tokens: int = 0
    accepted: int = 0
    refused: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums since the start; seconds count from acceptance.

    Attributes:
      steps: launched.
      queue: seconds in the queue, of requests that finished.
      finished: seconds to the end, of the same.
      lost: the same of requests that were cancelled or failed.
      last: when the last one finished, in seconds since 1970; 0 is never.
    """

    steps: int = 0
    queue: float = 0.0
    finished: float = 0.0
    lost: float = 0.0
    last: float = 0.0


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A launched step and whom it was launched for."""

    handle: StepHandle
    tickets: Mapping[int, Ticket]


class EngineLoop:
    """Runs requests on an engine; ``submit`` and ``cancel`` may be called by any thread.

    Args:
      engine: warmed up; used by this loop's thread only.
      vocabulary: for the text of outputs; None leaves texts empty.
      queue_limit: requests that may wait beside the running ones.
      queue_tokens: tokens that those may take; None is any number.
      overlap: keep one step in flight; False reads every step before the next.
      on_failure: called in the loop's thread when the engine fails.
      on_step: called there with a request and what a step did for it.
      clock: seconds, monotonic; deadlines of requests are in its time.
    """

    def __init__(self, engine: SlotEngine, vocabulary: Vocabulary | None, *, queue_limit: int,
                 queue_tokens: int | None = None, overlap: bool = True,
                 on_failure: Callable[[Exception], None] | None = None,
                 on_step: Callable[[Request, TokenChunk], None] | None = None,
                 clock: Callable[[], float] = time.monotonic):
        self.engine = engine
        self.queue_limit = queue_limit
        self.queue_tokens = queue_tokens
        self.clock = clock
        self.stats = SpeculationStats()
        self._vocabulary = vocabulary
        self._overlap = overlap
        self._on_failure = on_failure
        self._on_step = on_step
        self._changed = threading.Condition()  # guards the scheduler and all below
        self._scheduler: Scheduler[Ticket] = Scheduler(
            slots=engine.config.slots, queue_limit=queue_limit, queue_tokens=queue_tokens)
        self._load = Load()
        self._totals = Totals()
        self._slot_seconds = 1.0  # of recent requests, on average
        self._stopping = False
        self._closed: RequestError | None = None  # what new requests are refused with
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    # ---- any thread ----------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Fails what is left with UNAVAILABLE; True if the thread ended in time."""
        with self._changed:
            self._stopping = True
            self._closed = self._closed or RequestError(
                ErrorCode.UNAVAILABLE, "the server is shutting down")
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, request: Request, stream: ChunkSink) -> Sequence[Ticket]:
        """Queues a request; returns a ticket for each of its samples, for ``cancel``.

        Raises:
          RequestError: RESOURCE_EXHAUSTED if the queue is full, UNAVAILABLE at the end.
        """
        now = self.clock()
        tickets = [Ticket(request.sample(index), index, stream, self._output_text(request), now)
                   for index in range(request.n)]
        for ticket in tickets:
            ticket.siblings = [other for other in tickets if other is not ticket]
        with self._changed:
            if self._closed is not None:
                raise RequestError(self._closed.code, str(self._closed))
            try:
                self._scheduler.submit(*tickets)
            except QueueFull as full:
                self._count(refused=len(tickets))
                raise RequestError(
                    ErrorCode.RESOURCE_EXHAUSTED,
                    f"the queue is full: {full}",
                    retry_after=self._slot_seconds / self.engine.config.slots) from None
            self._count(accepted=len(tickets))
            self._changed.notify()
        return tickets

    def _output_text(self, request: Request) -> OutputText:
        detokenizer = None if self._vocabulary is None else self._vocabulary.detokenizer()
        return OutputText(detokenizer, request.stop, prompt=request.decoder_prompt,
                          unsearched=request.min_new_tokens)

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Frees places in the queue at once, slots before the next step. Idempotent."""
        with self._changed:
            for ticket in tickets:
                waiting = ticket in self._scheduler.waiting
                if self._scheduler.cancel(ticket) and waiting:
                    ticket.done = True
                    self._count(cancelled=1)
                    self._add(lost=ticket.age(self.clock()))
            self._changed.notify()

    @property
    def closed(self) -> RequestError | None:
        """Why no request is taken any more; set before those at hand fail with it."""
        with self._changed:
            return self._closed

    @property
    def load(self) -> Load:
        with self._changed:
            return dataclasses.replace(
                self._load, active_slots=len(self._scheduler.running),
                queued=len(self._scheduler.waiting),
                queued_tokens=sum(ticket.tokens for ticket in self._scheduler.waiting))

    @property
    def totals(self) -> Totals:
        with self._changed:
            return self._totals

    # ---- the loop's thread ---------------------------------------------------

    def _run(self) -> None:
        in_flight: _InFlight | None = None
        try:
            while self._wait_for_work(in_flight):
                launched = self._launch()
                if not self._overlap:
                    in_flight, launched = launched, None
                if in_flight is not None:
                    self._commit(in_flight)
                in_flight = launched
        except Exception as error:
            logging.exception("engine failed")
            self._close(RequestError(ErrorCode.INTERNAL,
                                     f"the engine failed: {type(error).__name__}: {error}"))
            if self._on_failure is not None:
                self._on_failure(error)
        else:
            self._close(RequestError(ErrorCode.UNAVAILABLE, "the server is shutting down"))

    def _wait_for_work(self, in_flight: _InFlight | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or in_flight is not None
                                   or self._scheduler.has_work)
            return not self._stopping

    def _launch(self) -> _InFlight | None:
        now = self.clock()
        with self._changed:
            plan = self._scheduler.plan(now)
        for ticket in plan.expired:
            self._fail(ticket, RequestError(ErrorCode.DEADLINE_EXCEEDED,
                                            "the deadline passed in the queue"))
        for _, ticket in plan.released:
            late = ticket.deadline is not None and ticket.deadline <= now
            self._fail(ticket, RequestError(ErrorCode.DEADLINE_EXCEEDED, "the deadline passed")
                       if late else RequestError(ErrorCode.CANCELLED, "cancelled"))
        for slot, _ in plan.released:  # after: no stream is left open if the engine fails
            self.engine.release(slot)
        for slot, ticket in plan.admitted:
            if ticket.done:  # a sibling could not be inserted
                self._leave(slot, ticket)
            else:
                self._insert(slot, ticket)
        with self._changed:
            running = self._scheduler.running
            self._add(steps=int(bool(running)))
        if not running:
            return None
        return _InFlight(self.engine.step(), running)

    def _insert(self, slot: int, ticket: Ticket) -> None:
        request = ticket.request
        ticket.admitted(self.clock())
        try:
            self.engine.insert(
                slot, request.source, sampling=request.sampling, seed=request.seed,
                max_new_tokens=request.max_new_tokens, eos_ids=request.eos_ids,
                draft_length=request.draft_length, label=request.label,
                min_new_tokens=request.min_new_tokens, decoder_prompt=request.decoder_prompt,
                logprobs=request.logprobs is not None)
        except ValueError as error:
            # The engine refuses before it touches anything: only this request is lost.
            self._leave(slot, ticket)
            self._fail(ticket, RequestError(ErrorCode.INTERNAL, str(error)))

    def _commit(self, step: _InFlight) -> None:
        output = step.handle.read()
        now = self.clock()
        for slot, ticket in step.tickets.items():
            if ticket.done:
                continue
            try:
                chunk = ticket.advance(output, slot, now)
            except RequestError as error:
                self._leave(slot, ticket)
                self._fail(ticket, error)
                continue
            self.stats += chunk.steps
            if self._on_step is not None:
                self._on_step(ticket.request, chunk)
            if chunk.tokens or chunk.finish is not None:  # else within the decoder prompt
                self._deliver(slot, ticket, chunk)

    def _deliver(self, slot: int, ticket: Ticket, chunk: TokenChunk) -> None:
        if chunk.finish is not None:
            self._leave(slot, ticket)  # if the engine fails here, the request has not ended yet
            ticket.done = True
            timings = chunk.finish.timings
            with self._changed:
                self._count(finished=1)
                self._add(queue=timings.queue, finished=timings.total)
                self._totals = dataclasses.replace(self._totals, last=time.time())
                self._slot_seconds += 0.1 * (timings.total - timings.queue - self._slot_seconds)
        ticket.stream.put(chunk)

    def _leave(self, slot: int, ticket: Ticket) -> None:
        self.engine.release(slot)
        with self._changed:
            self._scheduler.finish(slot, ticket)

    def _fail(self, ticket: Ticket, error: RequestError) -> None:
        """Ends what is left of a request: one stream can end once."""
        if ticket.done:  # with a sample that failed before
            return
        gone = error.code in (ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED)
        with self._changed:
            for one in (ticket, *ticket.siblings):
                if not one.done:
                    one.done = True
                    self._scheduler.cancel(one)
                    self._count(**{"cancelled" if gone else "failed": 1})
                    self._add(lost=one.age(self.clock()))
        ticket.stream.fail(error)

    def _close(self, error: RequestError) -> None:
        with self._changed:
            self._closed = RequestError(ErrorCode.UNAVAILABLE, str(error))
            gone = self._scheduler.clear()
        for ticket in gone:
            self._fail(ticket, error)

    def _count(self, **more: int) -> None:
        self._load = dataclasses.replace(self._load, **{
            name: getattr(self._load, name) + count for name, count in more.items()})

    def _add(self, **more: float) -> None:
        self._totals = dataclasses.replace(self._totals, **{
            name: getattr(self._totals, name) + value for name, value in more.items()})
