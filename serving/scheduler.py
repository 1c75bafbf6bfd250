"""Which requests run: a bounded queue in front of a fixed number of slots.

Pure bookkeeping: no clock (``now`` is an argument), no threads, no arrays.
"""

import bisect
import dataclasses
from typing import Protocol


class Waiting(Protocol):
    """What the order and the bounds of the queue go by.

    Attributes:
      deadline: when it has to end; None is never.
      rank: the lowest leaves the queue first, of equal ones the first that came.
      tokens: that it may take.
    """

    @property
    def deadline(self) -> float | None: ...

    @property
    def rank(self) -> float: ...

    @property
    def tokens(self) -> int: ...


class QueueFull(Exception):
    """The queue holds as many requests, or tokens, as it may."""


@dataclasses.dataclass(frozen=True)
class Plan[T]:
    """What to do before the next step, in this order.

    Attributes:
      expired: waiting requests whose deadline passed.
      released: (slot, request) taken out of the running batch: cancelled or expired.
      admitted: (slot, request) that enters the running batch.
    """

    expired: tuple[T, ...]
    released: tuple[tuple[int, T], ...]
    admitted: tuple[tuple[int, T], ...]


class Scheduler[T: Waiting]:
    """Every request is waiting, running or gone; every slot is free or has one request.

    Args:
      slots: requests that run at once.
      queue_limit: requests that may wait beside them.
      queue_tokens: tokens that those may take; None is any number.
    """

    def __init__(self, *, slots: int, queue_limit: int, queue_tokens: int | None = None):
        self._queue_limit = queue_limit
        self._queue_tokens = queue_tokens
        self._waiting: list[T] = []  # in the order in which they leave
        self._running: dict[int, T] = {}
        self._free = list(range(slots))
        self._cancelled: set[int] = set()  # slots whose request is no longer wanted

    @property
    def running(self) -> dict[int, T]:
        """Requests by slot; a copy."""
        return dict(self._running)

    @property
    def waiting(self) -> tuple[T, ...]:
        return tuple(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, *requests: T) -> None:
        """Puts all of them into the queue, or none.

        Requests that the free slots will take with the next plan do not count.

        Raises:
          QueueFull: the queue is at one of its limits.
        """
        if len(self._waiting) + len(requests) > self._queue_limit + len(self._free):
            more = f", {len(requests)} more came" if len(requests) > 1 else ""
            raise QueueFull(f"{len(self._waiting)} requests wait{more}, "
                            f"the limit is {self._queue_limit}")
        waiting = list(self._waiting)
        for request in requests:
            bisect.insort(waiting, request, key=lambda one: one.rank)
        tokens = sum(request.tokens for request in waiting[len(self._free):])
        if self._queue_tokens is not None and tokens > self._queue_tokens:
            raise QueueFull(f"{tokens} tokens would wait, the limit is {self._queue_tokens}")
        self._waiting = waiting

    def cancel(self, request: T) -> bool:
        """A waiting request is gone at once, a running one with the next plan.

        Returns False if the request is gone already.
        """
        for place, waiting in enumerate(self._waiting):
            if waiting is request:
                del self._waiting[place]
                return True
        for slot, running in self._running.items():
            if running is request:
                self._cancelled.add(slot)
                return True
        return False

    def finish(self, slot: int, request: T) -> None:
        """Frees the slot if the request still has it."""
        if self._running.get(slot) is request:
            self._take_out(slot)

    def plan(self, now: float) -> Plan[T]:
        """Ends what is cancelled or expired, then fills the free slots in order of rank."""
        def late(request: T) -> bool:
            return request.deadline is not None and request.deadline <= now

        expired = tuple(request for request in self._waiting if late(request))
        if expired:
            self._waiting = [r for r in self._waiting if not late(r)]
        released = tuple((slot, request) for slot, request in sorted(self._running.items())
                         if slot in self._cancelled or late(request))
        for slot, _ in released:
            self._take_out(slot)
        admitted = []
        while self._waiting and self._free:
            slot = self._free.pop(0)
            self._running[slot] = self._waiting.pop(0)
            admitted.append((slot, self._running[slot]))
        return Plan(expired, released, tuple(admitted))

    def clear(self) -> tuple[T, ...]:
        """Takes everything out: running requests by slot, then waiting ones."""
        gone = (*(self._running[slot] for slot in sorted(self._running)), *self._waiting)
        self._waiting.clear()
        for slot in list(self._running):
            self._take_out(slot)
        return gone

    def _take_out(self, slot: int) -> None:
        del self._running[slot]
        self._cancelled.discard(slot)
        self._free = sorted([*self._free, slot])
