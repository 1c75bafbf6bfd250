"""Clients of a tpuspec server: ``Client`` for asyncio, ``BlockingClient`` for plain code.

    with BlockingClient("localhost:8500") as client:
        for response in client.generate("translate English to German: Good morning."):
            print(response.text, end="", flush=True)
        print(response.finish)

What is raised is gRPC's error; ``error_details(error)`` tells which field was refused, or
when to try again.
"""

import os
import types
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Self

import grpc
import grpc.aio

from tpuspec.protos import generation_pb2 as pb
from tpuspec.protos import generation_pb2_grpc
from tpuspec.serving.channel import client_options
from tpuspec.serving.error_details import ErrorDetails, Violation, error_details
from tpuspec.serving.security import PLAIN_CLIENT, ClientSecurity

__all__ = ["BlockingClient", "Client", "ErrorDetails", "Violation", "error_details",
           "make_request"]

# Parameters of ``make_request`` that are the same for many sources.
OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
           "frequency_penalty", "logit_bias", "banned_ids", "allowed_ids", "min_new_tokens",
           "stop", "eos_ids", "ignore_eos", "decoder_prompt", "logprobs", "n", "lenience")


def make_request(
        source: str | Sequence[int], *, temperature: float = 0.0, top_k: int = 0,
        top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0, frequency_penalty: float = 0.0,
        logit_bias: Mapping[int | str, float] = types.MappingProxyType({}),
        banned_ids: Sequence[int] = (), allowed_ids: Sequence[int] = (),
        seed: int | None = None, max_new_tokens: int | None = None, min_new_tokens: int = 0,
        eos_ids: Sequence[int] = (), ignore_eos: bool = False, stop: Sequence[str] = (),
        decoder_prompt: str | Sequence[int] = "", draft_length: int | None = None,
        label: str = "", logprobs: int | None = None, n: int = 1, priority: int = 0,
        lenience: float = 1.0, request_id: str = "") -> pb.GenerateRequest:
    """Builds a request from a text or from encoder ids; None leaves the choice to the server.

    The ids of ``logit_bias`` may be strings, as in JSON.

    Raises:
      ValueError: a value does not fit its field; the server checks all bounds.
    """
    if not isinstance(stop, Sequence) or isinstance(stop, str):  # a text is a list of its letters
        raise ValueError(f"stop must be a list of texts, got {stop!r}")
    try:
        request = pb.GenerateRequest(
            request_id=request_id, eos_ids=eos_ids, ignore_eos=ignore_eos, stop=stop, seed=seed,
            max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens,
            draft_length=draft_length, label=label, logprobs=logprobs, n=n, priority=priority,
            sampling=pb.Sampling(
                temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                logit_bias={int(token): value for token, value in dict(logit_bias).items()},
                banned_ids=banned_ids, allowed_ids=allowed_ids, lenience=lenience))
        if isinstance(source, str):
            request.text = source
        else:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(source)
        if not isinstance(decoder_prompt, str):
            request.decoder_token_ids.ids.extend(decoder_prompt)
        elif decoder_prompt:
            request.decoder_text = decoder_prompt
    except TypeError as error:
        raise ValueError(str(error)) from None
    return request


class _Process:
    """The process in which gRPC was first used: its threads do not survive a fork."""

    first: int | None = None

    @classmethod
    def check(cls) -> None:
        """Raises RuntimeError in a forked child of a process that has used a client."""
        if cls.first is None:
            cls.first = os.getpid()
        elif cls.first != os.getpid():
            raise RuntimeError(
                "a gRPC client was used before this process was forked, and would hang: use the "
                "multiprocessing start method 'spawn', or make the first client in the children")


class Client:
    """Asynchronous client; use it as ``async with Client(address) as client``."""

    def __init__(self, address: str, security: ClientSecurity = PLAIN_CLIENT):
        """Raises ValueError on files of ``security`` that cannot be read."""
        _Process.check()
        options, credentials = client_options(address), security.credentials()
        self._channel = (
            grpc.aio.insecure_channel(address, options=options) if credentials is None
            else grpc.aio.secure_channel(address, credentials, options=options))
        self._metadata = security.metadata
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        traceback: types.TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def generate(self, request: pb.GenerateRequest, *, timeout: float | None = None,
                       ) -> AsyncGenerator[pb.GenerateResponse]:
        """Streams the responses; leaving the loop early cancels the request.

        Raises:
          grpc.aio.AioRpcError: the server's status.
        """
        _Process.check()
        call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    async def profile(self, seconds: float) -> AsyncGenerator[pb.ProfileResponse]:
        """Has the server traced and streams the trace; leaving early ends it.

        Raises:
          grpc.aio.AioRpcError: the server's status.
        """
        _Process.check()
        call = self._stub.Profile(pb.ProfileRequest(seconds=seconds), metadata=self._metadata)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    async def get_model(self, *, timeout: float | None = 10.0) -> pb.GetModelResponse:
        _Process.check()
        return await self._stub.GetModel(pb.GetModelRequest(), timeout=timeout,
                                         metadata=self._metadata)


class BlockingClient:
    """The same for code without an event loop."""

    def __init__(self, address: str, security: ClientSecurity = PLAIN_CLIENT):
        """Raises ValueError on files of ``security`` that cannot be read."""
        _Process.check()
        options, credentials = client_options(address), security.credentials()
        self._channel = (
            grpc.insecure_channel(address, options=options) if credentials is None
            else grpc.secure_channel(address, credentials, options=options))
        self._metadata = security.metadata
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: types.TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(self, source: str | Sequence[int], *, timeout: float | None = None,
                 **parameters: Any) -> Iterator[pb.GenerateResponse]:
        """Streams the responses; ``parameters`` are those of ``make_request``.

        Raises:
          grpc.RpcError: the server's status.
        """
        _Process.check()
        call = self._stub.Generate(make_request(source, **parameters), timeout=timeout,
                                   metadata=self._metadata)
        try:
            yield from call
        finally:
            call.cancel()

    def get_model(self, *, timeout: float | None = 10.0) -> pb.GetModelResponse:
        _Process.check()
        return self._stub.GetModel(pb.GetModelRequest(), timeout=timeout,
                                         metadata=self._metadata)
