"""What the servicers of all dialects stand on: one way in, one way to end a call."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Iterator
from typing import NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message

from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving import request_log, unknown_fields
from tpuspec.serving.error_details import trailers
from tpuspec.serving.errors import ErrorCode, RequestError
from tpuspec.serving.service import GenerationService
from tpuspec.serving.spans import Spans

SHUTTING_DOWN = "the server is shutting down"


class Front:
    """Turns errors into statuses, deadlines into timeouts, and a gone client into a cancel.

    Attributes:
      service: of models and requests.
      active: calls and requests that are being answered.
      drains: set when no new request is taken any more.
    """

    def __init__(self, service: GenerationService, spans: Spans | None = None):
        self.service = service
        self._spans = spans
        self.active = 0
        self.drains = asyncio.Event()

    def refuse_new(self) -> None:
        """From now on every new request ends with UNAVAILABLE."""
        self.drains.set()

    @property
    def draining(self) -> bool:
        return self.drains.is_set()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """A drain waits for what runs inside."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    async def responses(self, request: pb.GenerateRequest, timeout: float | None,
                        context: grpc.aio.ServicerContext,
                        ) -> AsyncGenerator[pb.GenerateResponse]:
        """As ``GenerationService.generate``, refused while draining; its end is logged, and a
        span of it belongs to the trace that the call is part of."""
        if self.draining:
            raise RequestError(ErrorCode.UNAVAILABLE, SHUTTING_DOWN)
        unknown_fields.refuse(request)
        ended = None if self._spans is None else functools.partial(
            self._spans.record, tuple(context.invocation_metadata() or ()))
        with request_log.of(request, ended) as log:
            async with contextlib.aclosing(self.service.generate(request, timeout)) as responses:
                async for response in responses:
                    log.saw(response)
                    yield response

    async def write(self, messages: AsyncGenerator[Message],
                    context: grpc.aio.ServicerContext) -> None:
        """Sends the messages and closes the call, with a status if they end in an error.

        Written out, not yielded to gRPC: when the client goes away, the task is cancelled
        inside this coroutine, so the request is always taken off the engine.
        """
        with self.counted():
            try:
                async with contextlib.aclosing(messages):
                    async for message in messages:
                        await context.write(message)
            except RequestError as error:
                await abort(error, context)


async def abort(error: RequestError, context: grpc.aio.ServicerContext) -> NoReturn:
    """Ends a call with the error's status and details."""
    await context.abort(grpc.StatusCode[error.code.name], str(error), trailers(error))
    raise AssertionError  # abort raises
