"""Which requests run: a bounded first-in-first-out queue in front of a fixed number of slots.

Pure bookkeeping: no clock (``now`` is an argument), no threads, no arrays.
"""

import collections
import dataclasses
from typing import Protocol


class Expiring(Protocol):
    """Something that may have to end at a given time."""

    @property
    def deadline(self) -> float | None: ...


class QueueFull(Exception):
    """The queue holds as many requests as it may."""


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


class Scheduler[T: Expiring]:
    """Every request is waiting, running or gone; every slot is free or has one request."""

    def __init__(self, *, slots: int, queue_limit: int):
        self._queue_limit = queue_limit
        self._waiting: collections.deque[T] = collections.deque()
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

    def submit(self, request: T) -> None:
        """Appends to the queue.

        Requests that the free slots will take with the next plan do not count.

        Raises:
          QueueFull: the queue is at its limit.
        """
        if len(self._waiting) >= self._queue_limit + len(self._free):
            raise QueueFull(f"{len(self._waiting)} requests wait, the limit is {self._queue_limit}")
        self._waiting.append(request)

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
        """Ends what is cancelled or expired, then fills the free slots in order of arrival."""
        def late(request: T) -> bool:
            return request.deadline is not None and request.deadline <= now

        expired = tuple(request for request in self._waiting if late(request))
        if expired:
            self._waiting = collections.deque(r for r in self._waiting if not late(r))
        released = tuple((slot, request) for slot, request in sorted(self._running.items())
                         if slot in self._cancelled or late(request))
        for slot, _ in released:
            self._take_out(slot)
        admitted = []
        while self._waiting and self._free:
            slot = self._free.pop(0)
            self._running[slot] = self._waiting.popleft()
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
