"""Bytes that are no message of the method: refused as such, not as a fault of the server."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from tpuspec.serving.errors import ErrorCode, RequestError
from tpuspec.serving.front import abort


class Malformed:
    """Stands for a request that could not be read; streams of requests may contain it."""


def refusal() -> RequestError:
    return RequestError(ErrorCode.INVALID_ARGUMENT, "the request is not a message of this method: "
                        "its bytes cannot be parsed")


class MalformedCheck(grpc.aio.ServerInterceptor):
    """Refuses malformed requests of the services named, and gives streams of requests
    ``Malformed`` in their place. gRPC itself would answer UNKNOWN and log a fault.

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
            async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
                if isinstance(request, Malformed):
                    await abort(refusal(), context)
                return await method(request, context)

            return call

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                handler.stream_stream, read, handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                checked(handler.unary_stream), read, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(
            checked(handler.unary_unary), read, handler.response_serializer)
