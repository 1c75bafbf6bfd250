"""Requests that are none: bytes that are no message of the method, and those that do not come."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from tpuspec.serving.errors import ErrorCode, RequestError
from tpuspec.serving.front import abort

ARRIVAL_SECONDS = 30.0  # that a message may take after its call began


class Malformed:
    """Stands for a request that could not be read; streams of requests may contain it."""


def refusal() -> RequestError:
    return RequestError(ErrorCode.INVALID_ARGUMENT, "the request is not a message of this method: "
                        "its bytes cannot be parsed")


class MalformedCheck(grpc.aio.ServerInterceptor):
    """Refuses malformed requests of the services named, and gives streams of requests
    ``Malformed`` in their place. gRPC itself would answer UNKNOWN and log a fault.

    It also refuses calls whose one request does not arrive, for which gRPC would wait for ever.
    To gRPC all of them are streams of requests, of which one is read, so that the time can be
    taken: the wire is the same.

    Args:
      services: whose methods with one request are coroutines.
    """

    def __init__(self, services: tuple[str, ...]):
        self._services = services

    async def intercept_service(
            self, continuation: Callable[[grpc.HandlerCallDetails],
                                         Awaitable[grpc.RpcMethodHandler]],
            handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        service = str(handler_call_details.method).rpartition("/")[0].removeprefix("/")
        if handler is None or service not in self._services or (
                handler.request_deserializer is None):
            return handler
        deserialize = handler.request_deserializer

        def read(data: bytes) -> Any:
            try:
                return deserialize(data)
            except DecodeError:
                return Malformed()

        def checked(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            async def call(_: Any, context: grpc.aio.ServicerContext) -> Any:
                return await method(await _one(context), context)

            return call

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                handler.stream_stream, read, handler.response_serializer)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                checked(handler.unary_stream), read, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(
            checked(handler.unary_unary), read, handler.response_serializer)


async def _one(context: grpc.aio.ServicerContext) -> Any:
    """The call's request; ends the call if there is none."""
    try:
        request = await asyncio.wait_for(context.read(), ARRIVAL_SECONDS)
    except TimeoutError:
        await abort(RequestError(ErrorCode.DEADLINE_EXCEEDED, "the request did not arrive within "
                                 f"{ARRIVAL_SECONDS:g} s"), context)
    if request is grpc.aio.EOF:
        await abort(RequestError(ErrorCode.INVALID_ARGUMENT,
                                 "the call ended without a request"), context)
    if isinstance(request, Malformed):
        await abort(refusal(), context)
    return request
