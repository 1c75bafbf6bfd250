"""The Open Inference Protocol with Triton's stream: see protos/open_inference.proto."""

import asyncio
import contextlib
import importlib.metadata
from collections.abc import AsyncGenerator, Awaitable, Callable

import grpc.aio

from tpuspec.protos import generation_pb2 as pb
from tpuspec.protos import open_inference_pb2 as oip
from tpuspec.protos import open_inference_pb2_grpc
from tpuspec.serving import inference_messages as messages
from tpuspec.serving import inference_model, malformed, unknown_fields
from tpuspec.serving.errors import ErrorCode, RequestError
from tpuspec.serving.front import SHUTTING_DOWN, Front, abort
from tpuspec.serving.inference_messages import Asked
from tpuspec.serving.inference_model import PLATFORM, VERSION
from tpuspec.serving.malformed import Malformed
from tpuspec.serving.validation import MAX_REQUEST_ID

type _Send = Callable[[oip.ModelStreamInferResponse], Awaitable[None]]


class InferenceServicer(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """One model, under its name and version "1".

    Args:
      front: what answers.
    """

    def __init__(self, front: Front):
        self._front = front
        model = front.service.model()
        self._name = model.name
        # More cannot be accepted: reading on would only fill memory with refusals.
        self._most_at_once = model.limits.slots + model.limits.queue + 1

    async def ServerLive(self, request: oip.ServerLiveRequest,
                         context: grpc.aio.ServicerContext) -> oip.ServerLiveResponse:
        return oip.ServerLiveResponse(live=True)

    async def ServerReady(self, request: oip.ServerReadyRequest,
                          context: grpc.aio.ServicerContext) -> oip.ServerReadyResponse:
        return oip.ServerReadyResponse(ready=not self._front.draining)

    async def ModelReady(self, request: oip.ModelReadyRequest,
                         context: grpc.aio.ServicerContext) -> oip.ModelReadyResponse:
        known = request.name == self._name and request.version in ("", VERSION)
        return oip.ModelReadyResponse(ready=known and not self._front.draining)

    async def ServerMetadata(self, request: oip.ServerMetadataRequest,
                             context: grpc.aio.ServicerContext) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(
            name=PLATFORM, version=importlib.metadata.version("tpuspec"),
            extensions=["model_configuration", "statistics"])

    async def ModelMetadata(self, request: oip.ModelMetadataRequest,
                            context: grpc.aio.ServicerContext) -> oip.ModelMetadataResponse:
        await self._find(request.name, request.version, context)
        return inference_model.metadata(self._name)

    async def ModelConfig(self, request: oip.ModelConfigRequest,
                          context: grpc.aio.ServicerContext) -> oip.ModelConfigResponse:
        await self._find(request.name, request.version, context)
        return oip.ModelConfigResponse(config=inference_model.config(self._name))

    async def ModelStatistics(self, request: oip.ModelStatisticsRequest,
                              context: grpc.aio.ServicerContext) -> oip.ModelStatisticsResponse:
        await self._find(request.name or self._name, request.version, context)
        service = self._front.service
        return oip.ModelStatisticsResponse(model_stats=[inference_model.statistics(
            self._name, service.model().load, service.totals)])

    async def ModelInfer(self, request: oip.ModelInferRequest,
                         context: grpc.aio.ServicerContext) -> oip.ModelInferResponse:
        with self._front.counted():
            try:
                asked = self._asked(request)
                async with contextlib.aclosing(self._responses(asked, context)) as responses:
                    whole = [response async for response in responses]
            except RequestError as error:
                await abort(error, context)
        return messages.answer(request, self._name, VERSION, whole, asked.outputs, final=True)

    async def ModelStreamInfer(self, requests: object, context: grpc.aio.ServicerContext) -> None:
        places = asyncio.Semaphore(self._most_at_once)
        turn = asyncio.Lock()

        async def send(message: oip.ModelStreamInferResponse) -> None:
            async with turn:
                await context.write(message)

        metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
        with_status = metadata.get("triton_grpc_error") == "true"
        ended: RequestError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    async with contextlib.aclosing(self._incoming(context)) as incoming:
                        async for request in incoming:
                            await places.acquire()
                            task = tasks.create_task(
                                self._answer(request, context, send, with_status=with_status))
                            task.add_done_callback(lambda _: places.release())
                except RequestError as error:
                    ended = error  # but what runs goes on
        except* RequestError as errors:
            first = errors.exceptions[0]
            assert isinstance(first, RequestError)
            ended = first
        if ended is not None:
            await abort(ended, context)

    async def _incoming(self, context: grpc.aio.ServicerContext,
                        ) -> AsyncGenerator[oip.ModelInferRequest | Malformed]:
        """Raises RequestError once the server drains: a stream has no end of its own."""
        draining = asyncio.ensure_future(self._front.drains.wait())
        try:
            while True:
                reading = asyncio.ensure_future(context.read())
                try:
                    await asyncio.wait((reading, draining), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not reading.done():
                        reading.cancel()
                if not reading.done():
                    raise RequestError(ErrorCode.UNAVAILABLE, SHUTTING_DOWN)
                request = reading.result()
                if request is grpc.aio.EOF:
                    return
                yield request
        finally:
            draining.cancel()

    async def _answer(self, came: oip.ModelInferRequest | Malformed,
                      context: grpc.aio.ServicerContext, send: _Send, *,
                      with_status: bool) -> None:
        """Sends the responses of one request of a stream, or its error.

        Raises:
          RequestError: instead, if asked to.
        """
        request = oip.ModelInferRequest() if isinstance(came, Malformed) else came
        with self._front.counted():
            try:
                if isinstance(came, Malformed):
                    raise malformed.refusal()
                asked = self._asked(request)
                async with contextlib.aclosing(self._responses(asked, context)) as responses:
                    async for response in responses:
                        final = response.HasField("finish") and not asked.empty_final
                        await send(oip.ModelStreamInferResponse(infer_response=messages.answer(
                            request, self._name, VERSION, [response], asked.outputs,
                            final=final)))
                if asked.empty_final:
                    await send(oip.ModelStreamInferResponse(infer_response=messages.empty(
                        request, self._name, VERSION, final=True)))
            except RequestError as error:
                if with_status:
                    raise
                # Triton's client drops everything but the text, so that it has the id, too;
                # one that is too long must not make a message that is.
                request.id = request.id[:MAX_REQUEST_ID]
                await send(oip.ModelStreamInferResponse(
                    error_message=f"[request id: {request.id}] {error.code.name}: {error}",
                    infer_response=messages.empty(request, self._name, VERSION, final=True)))

    def _asked(self, request: oip.ModelInferRequest) -> Asked:
        unknown_fields.refuse(request)
        self._check_model(request.model_name, request.model_version)
        try:
            return messages.asked(request)
        except ValueError as error:
            raise RequestError.of_field(error) from None

    async def _responses(self, asked: Asked, context: grpc.aio.ServicerContext,
                         ) -> AsyncGenerator[pb.GenerateResponse]:
        timeouts = [t for t in (context.time_remaining(), asked.timeout) if t is not None]
        responses = self._front.responses(asked.message, min(timeouts, default=None), context)
        try:
            async with contextlib.aclosing(responses):
                async for response in responses:
                    yield response
        except RequestError as error:
            raise error.renamed(messages.NAMES) from None

    async def _find(self, name: str, version: str, context: grpc.aio.ServicerContext) -> None:
        try:
            self._check_model(name, version)
        except RequestError as error:
            await abort(error, context)

    def _check_model(self, name: str, version: str) -> None:
        if name != self._name or version not in ("", VERSION):
            raise RequestError(ErrorCode.NOT_FOUND, f"the model here is {self._name!r}, version "
                               f"{VERSION!r}; another was asked for")
