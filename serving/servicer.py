"""The gRPC face of ``GenerationService``."""

import contextlib

import grpc
import grpc.aio

from tpuspec.protos import generation_pb2 as pb
from tpuspec.protos import generation_pb2_grpc
from tpuspec.serving.errors import ErrorCode, RequestError
from tpuspec.serving.service import GenerationService


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """Turns errors into statuses, deadlines into timeouts, and a gone client into a cancel."""

    def __init__(self, service: GenerationService):
        self._service = service
        self._draining = False
        self.active = 0  # streams that are being answered

    def refuse_new(self) -> None:
        """From now on every new request ends with UNAVAILABLE."""
        self._draining = True

    async def Generate(self, request: pb.GenerateRequest,
                       context: grpc.aio.ServicerContext) -> None:
        # Written out, not yielded: when the client goes away, the task is cancelled
        # inside this coroutine, so the request is always taken off the engine.
        self.active += 1
        try:
            if self._draining:
                raise RequestError(ErrorCode.UNAVAILABLE, "the server is shutting down")
            responses = self._service.generate(request, context.time_remaining())
            async with contextlib.aclosing(responses):
                async for response in responses:
                    await context.write(response)
        except RequestError as error:
            trailers: tuple[tuple[str, str], ...] = ()
            if error.retry_after is not None:
                trailers = (("retry-after-ms", str(max(1, round(1e3 * error.retry_after)))),)
            await context.abort(grpc.StatusCode[error.code.name], str(error), trailers)
        finally:
            self.active -= 1

    async def GetModel(self, request: pb.GetModelRequest,
                       context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        return self._service.model()
