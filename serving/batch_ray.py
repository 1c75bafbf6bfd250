"""``tpuspec batch --ray``: the engines of a cluster's workers, as one.

The job stays what it is on one host: this process reads the input, gives each line its
seed and keeps the records. Blocks of lines go to the workers; a worker that is lost is
replaced, and its blocks go to others. So order, resuming, errors and ids that come twice
are the job's own, and the output does not depend on the workers.

Why actors of Ray and not Ray Data: a dataset's checkpoint (``CheckpointConfig``) wants a
column of unique ids, a source that every worker can read and a sink that the workers
write; it knows neither order nor bad lines, reads all input again and holds the ids of
all that is done in memory. Here the journal has all that already.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving.batch_engine import Answer
from tpuspec.serving.batch_worker import Place, Setup, Worker
from tpuspec.serving.errors import ErrorCode, RequestError
from tpuspec.serving.records import Failure

_BLOCK = 16  # requests of a block, for each slot
_QUEUED = 2  # blocks that a worker has: the one that it answers, and the next
_HELD = 4  # blocks, for each worker, that may wait for an answer to the first
_TRIES = 3  # workers that one block may lose, and starts that may fail one after the other
_LOCAL_STORE = 100 << 20  # bytes for objects in a cluster of our own; blocks are small


@dataclasses.dataclass(frozen=True)
class Chips:
    """What one engine takes of its host, by Ray's name for it."""

    kind: str
    count: int

    @classmethod
    def of(cls, ray: Any, mesh: tuple[int, int]) -> "Chips":
        """Those that the cluster has; CPUs where it has no accelerator."""
        resources = ray.cluster_resources()
        kind = next((kind for kind in ("TPU", "GPU") if resources.get(kind)), "CPU")
        return cls(kind, 1 if kind == "CPU" else mesh[0] * mesh[1])

    @property
    def dtype(self) -> str:
        """As ``models.default_dtype`` on the workers; this process asks no accelerator."""
        return "bfloat16" if self.kind == "TPU" else "float32"

    @property
    def options(self) -> dict[str, Any]:
        """Of the actor; Ray would rather fill one host before it takes another."""
        need: dict[str, Any] = ({"resources": {"TPU": self.count}} if self.kind == "TPU"
                                else {f"num_{self.kind.lower()}s": self.count})
        return need | {"scheduling_strategy": "SPREAD"}

    def workers(self, nodes: Iterable[Mapping[str, Any]]) -> int:
        """For how many engines there is room; a CPU engine takes all cores of a host.

        Raises:
          ValueError: for none.
        """
        places = [int(node["Resources"].get(self.kind, 0)) // self.count
                  for node in nodes if node["Alive"]]
        if not any(places):
            raise ValueError(f"ray must have a node with {self.count} {self.kind} for mesh, got "
                             "none")
        return sum(map(bool, places)) if self.kind == "CPU" else sum(places)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A connected one.

    Attributes:
      ray: the package.
      chips: of each engine.
    """

    ray: Any
    chips: Chips

    @contextlib.contextmanager
    def start(self, setup: Setup, workers: int | None) -> Iterator["RayEngine"]:
        """Engines, as many as there is room for unless ``workers`` says.

        Raises:
          ValueError: see ``Chips.workers`` and ``RayEngine.start``.
        """
        room = self.chips.workers(self.ray.nodes())
        engine = RayEngine(self.ray, setup, self.chips, workers or room)
        try:
            engine.start()
            yield engine
        finally:
            engine.stop()


@contextlib.contextmanager
def connect(address: str, mesh: tuple[int, int]) -> Iterator["Cluster"]:
    """The cluster at an address, for engines of this mesh.

    Args:
      address: as ``ray.init`` takes it: "auto" is the cluster that this machine is in,
        "local" one of this machine alone, for as long as the job runs.

    Raises:
      ValueError: Ray is not installed, or the cluster does not answer.
    """
    # Read by what Ray starts here.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ValueError(f"ray needs a package that is not here: {error} "
                         "(pip install 'tpuspec[ray]')") from None
    own = dict(include_dashboard=False, object_store_memory=_LOCAL_STORE
               ) if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"ray cannot connect to {address}: {error}") from None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Ray prints what it has to say
            yield Cluster(ray, Chips.of(ray, mesh))
    finally:
        ray.shutdown()


class _Block:
    def __init__(self, places: Sequence[int], requests: Sequence[bytes]):
        self.places = places
        self.requests = requests
        self.lost = 0  # workers that were lost while they answered it
        self.done = False


class RayEngine:
    """In the place of a ``BatchEngine``, for a batch job.

    Attributes:
      lost: workers so far that were lost.
    """

    def __init__(self, ray: Any, setup: Setup, chips: Chips, workers: int):
        self.lost = 0
        self._ray = ray
        self._make = lambda: ray.remote(**chips.options)(Worker).remote(setup)
        self._count = workers
        self._block = _BLOCK * setup.options["slots"]
        self._starting: dict[Any, Any] = {}  # the call of start: worker
        self._calls: dict[Any, dict[Any, _Block]] = {}  # by worker, in the order of calls
        self._failed_starts = 0

    def start(self) -> None:
        """Returns when the first worker is ready; others may follow.

        Raises:
          ValueError: a worker cannot make its engine.
          RequestError: workers are lost before they are ready.
        """
        if sys.stderr.isatty():
            print(f"waiting for the first of {self._count} workers ...", file=sys.stderr)
        for _ in range(self._count):
            self._begin()
        while not self._calls:
            self._wait()

    def stop(self) -> None:
        for worker in (*self._starting.values(), *self._calls):
            self._ray.kill(worker)

    def check(self, message: pb.GenerateRequest) -> None:
        """Raises ValueError on the first field that is out of bounds."""
        with self._plain_errors():
            self._ray.get(next(iter(self._calls)).check.remote(message.SerializeToString()))

    def completed(self, messages: Iterable[pb.GenerateRequest | Failure],
                  ) -> Generator[tuple[int, Answer | Failure]]:
        """As of ``BatchEngine``.

        Raises:
          RequestError: workers are lost again and again.
        """
        upcoming, more = enumerate(messages), True
        in_order: collections.deque[_Block] = collections.deque()  # from the first undone
        again: collections.deque[_Block] = collections.deque()
        while more or in_order:
            while (worker := self._free()) is not None:
                if again:
                    self._send(worker, again.popleft())
                elif more and len(in_order) < _HELD * self._count:
                    read = list(itertools.islice(upcoming, self._block))
                    more = len(read) == self._block
                    yield from ((n, one) for n, one in read if isinstance(one, Failure))
                    good = [(n, one.SerializeToString()) for n, one in read
                            if not isinstance(one, Failure)]
                    if good:
                        in_order.append(_Block(*zip(*good, strict=True)))
                        self._send(worker, in_order[-1])
                else:
                    break
            if not in_order:
                continue
            for block, answers in self._wait():
                if answers is None:
                    again.append(block)
                    continue
                block.done = True
                yield from ((block.places[n], answer) for n, answer in answers)
            while in_order and in_order[0].done:
                in_order.popleft()

    def _free(self) -> Any | None:
        """The worker that has least to do, if it may have more."""
        worker = min(self._calls, key=lambda worker: len(self._calls[worker]), default=None)
        return worker if worker is not None and len(self._calls[worker]) < _QUEUED else None

    def _send(self, worker: Any, block: _Block) -> None:
        self._calls[worker][worker.answer.remote(block.requests)] = block

    def _begin(self) -> None:
        worker = self._make()
        self._starting[worker.start.remote()] = worker

    def _wait(self) -> Sequence[tuple[_Block, list[tuple[int, Answer | Failure]] | None]]:
        """Blocks that were answered, or lost with their worker, when there are any."""
        owners = {call: worker for worker, calls in self._calls.items() for call in calls}
        (call,), _ = self._ray.wait([*owners, *self._starting], num_returns=1)
        try:
            with self._plain_errors():
                result = self._ray.get(call)
        except (RequestError, self._ray.exceptions.RayError) as error:
            return self._lose(call, owners.get(call), error)
        if call in self._starting:
            self._started(self._starting.pop(call), result)
            return []
        return [(self._calls[owners[call]].pop(call), result)]

    def _started(self, worker: Any, place: Place) -> None:
        self._calls[worker] = {}
        self._failed_starts = 0
        if sys.stderr.isatty():
            print(f"worker on {place.host}, process {place.pid}", file=sys.stderr)

    def _lose(self, call: Any, worker: Any | None, error: Exception,
              ) -> Sequence[tuple[_Block, None]]:
        """Begins another worker; returns what the lost one had to do."""
        blocks: list[_Block] = []
        if worker is None:
            worker = self._starting.pop(call)
            self._failed_starts += 1
            tries = self._failed_starts
        else:
            # Calls of a worker are answered one by one: it was lost with the first.
            blocks = list(self._calls.pop(worker).values())
            blocks[0].lost += 1
            tries = blocks[0].lost
        self.lost += 1
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(worker)  # if only its engine failed
        if tries == _TRIES:
            raise RequestError(ErrorCode.UNAVAILABLE, f"lost {_TRIES} workers at the same work; "
                               f"the last one: {' '.join(str(error).split())}")
        self._begin()
        return [(block, None) for block in blocks]

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        """What a worker raised, as it raised it."""
        try:
            yield
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
