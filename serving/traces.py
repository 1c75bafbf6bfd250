"""Profiler traces for clients: one at a time, while everything else goes on."""

import asyncio
import pathlib
import time
from collections.abc import AsyncGenerator, Iterator

from absl import logging

from tpuspec.config import check_range
from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving import unknown_fields
from tpuspec.serving.errors import ErrorCode, RequestError
from tpuspec.serving.interfaces import Tracer

SHORTEST, LONGEST = 0.1, 60.0  # seconds
_PIECE = 1 << 20  # bytes of a file in one message
_CLOSE_SECONDS = 30.0  # to write the last trace


class Traces:
    """Answers ``Profile``. Whatever happens to a call, its trace is ended.

    Args:
      tracer: takes them; None refuses every call.
      drains: no call is taken any more once it is set, and the trace that runs ends.
    """

    def __init__(self, tracer: Tracer | None, drains: asyncio.Event):
        self._tracer = tracer
        self._drains = drains
        self._task: asyncio.Task[pb.ProfileResponse] | None = None
        self._until = 0.0

    async def responses(self, request: pb.ProfileRequest) -> AsyncGenerator[pb.ProfileResponse]:
        """The messages of one call; closing the generator ends the trace.

        Raises:
          RequestError: as the proto lists.
        """
        tracer = self._checked(request)
        enough = asyncio.Event()
        # A task of its own: a call that is cancelled must not leave the process traced.
        task = self._task = asyncio.ensure_future(self._trace(tracer, request.seconds, enough))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            first = await asyncio.shield(task)
        finally:
            enough.set()
        yield first
        pieces = _pieces(pathlib.Path(first.directory))
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    async def close(self) -> None:
        """Waits until the trace that runs is written; ``drains`` must be set."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_CLOSE_SECONDS)

    def _checked(self, request: pb.ProfileRequest) -> Tracer:
        if self._drains.is_set():
            raise RequestError(ErrorCode.UNAVAILABLE, "the server is shutting down")
        unknown_fields.refuse(request)
        if self._tracer is None:
            raise RequestError(ErrorCode.FAILED_PRECONDITION,
                               "this server takes no traces: it was started without --profile_dir")
        try:
            check_range("seconds", request.seconds, SHORTEST, LONGEST)
        except ValueError as error:
            raise RequestError.of_field(error) from None
        if self._task is not None and not self._task.done():
            raise RequestError(ErrorCode.RESOURCE_EXHAUSTED, "another trace is being taken",
                               retry_after=max(0.0, self._until - time.monotonic()) + 1.0)
        return self._tracer

    async def _trace(self, tracer: Tracer, seconds: float,
                     enough: asyncio.Event) -> pb.ProfileResponse:
        self._until = time.monotonic() + seconds
        try:
            directory = await asyncio.to_thread(tracer.start)
            began = time.monotonic()
            ends = [asyncio.ensure_future(event.wait()) for event in (enough, self._drains)]
            try:
                await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
                ended = time.monotonic()
                await asyncio.to_thread(tracer.stop)
        except Exception as error:  # of the profiler, the disk: the server goes on without
            logging.exception("trace failed")
            raise RequestError(ErrorCode.INTERNAL, "the trace failed: "
                               f"{type(error).__name__}: {error}") from None
        logging.info("traced %.1f s into %s", ended - began, directory)
        return pb.ProfileResponse(directory=str(directory), seconds=ended - began)


def _pieces(directory: pathlib.Path) -> Iterator[pb.ProfileResponse]:
    for path in sorted(directory.rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(directory).as_posix()
        with path.open("rb") as file:
            while data := file.read(_PIECE):
                yield pb.ProfileResponse(file=name, data=data)
