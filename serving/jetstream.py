"""JetStream's ``Orchestrator``: see protos/jetstream.proto for what it leaves out."""

import contextlib
from collections.abc import AsyncGenerator

import grpc.aio

from tpuspec.protos import generation_pb2 as pb
from tpuspec.protos import jetstream_pb2 as jet
from tpuspec.protos import jetstream_pb2_grpc
from tpuspec.serving import named_options, unknown_fields
from tpuspec.serving.errors import RequestError
from tpuspec.serving.front import Front

_PREFIX = "x-tpuspec-"  # of metadata that name options
_NAMES = {
    **named_options.names(_PREFIX), "source": "content", "text": "text_content.text",
    "token_ids": "token_content.token_ids", "max_new_tokens": "max_tokens", "n": "num_samples"}


class OrchestratorServicer(jetstream_pb2_grpc.OrchestratorServicer):
    """Requests in, responses out, by way of our own messages.

    Args:
      front: what answers.
      truncate: cut token ids and ``max_tokens`` that are beyond the limits, instead of
        refusing: JetStream's benchmark repeats a refused request for ever.
    """

    def __init__(self, front: Front, *, truncate: bool = False):
        self._front = front
        self._truncate = truncate

    async def Decode(self, request: jet.DecodeRequest,
                     context: grpc.aio.ServicerContext) -> None:
        await self._front.write(self._decode(request, context), context)

    async def HealthCheck(self, request: jet.HealthCheckRequest,
                          context: grpc.aio.ServicerContext) -> jet.HealthCheckResponse:
        return jet.HealthCheckResponse(is_live=not self._front.draining)

    async def _decode(self, request: jet.DecodeRequest, context: grpc.aio.ServicerContext,
                      ) -> AsyncGenerator[jet.DecodeResponse]:
        has_text = request.HasField("text_content")
        message = self._request(request, context)
        try:
            responses = self._front.responses(message, context.time_remaining(), context)
            async with contextlib.aclosing(responses):
                async for response in responses:
                    yield to_response(response, samples=request.num_samples or 1,
                                      has_text=has_text)
        except RequestError as error:
            raise error.renamed(_NAMES) from None

    def _request(self, request: jet.DecodeRequest, context: grpc.aio.ServicerContext,
                 ) -> pb.GenerateRequest:
        unknown_fields.refuse(request)
        metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
        try:
            message = to_request(request, metadata)
        except ValueError as error:
            raise RequestError.of_field(error) from None
        if self._truncate:
            _cut(message, self._front.service.model())
        return message


def to_request(request: jet.DecodeRequest, metadata: dict[str, str | bytes]) -> pb.GenerateRequest:
    """Raises ValueError on what this server does not have."""
    if request.lora_adapter_id:
        raise ValueError("lora_adapter_id must be empty: this server has no adapters")
    message = pb.GenerateRequest()
    match request.WhichOneof("content"):
        case "text_content":
            if request.has_bos:
                raise ValueError("has_bos must be false with text_content: a text has no ids")
            message.text = request.text_content.text
        case "token_content":
            message.token_ids.ids.extend(request.token_content.token_ids[request.has_bos:])
            message.token_ids.SetInParent()
        case _:
            pass  # the door says what is missing
    if request.max_tokens != 0:
        message.max_new_tokens = request.max_tokens
    if request.num_samples != 0:
        message.n = request.num_samples
    for key, value in metadata.items():
        if key.startswith(_PREFIX):
            name = key.removeprefix(_PREFIX)
            named_options.check_name("metadata", name)
            if name == "max_new_tokens":
                raise ValueError(f"{key} is not an option: max_tokens is")
            if name == "lenience":
                raise ValueError(f"{key} is not an option: these replies cannot say that they are "
                                 "not exact")
            try:
                named_options.set_option(message, name, value if isinstance(value, str) else "")
            except ValueError as error:
                raise ValueError(_PREFIX + str(error)) from None
    return message


def to_response(response: pb.GenerateResponse, *, samples: int, has_text: bool,
                ) -> jet.DecodeResponse:
    """A place for each sample, as clients find them by it; of these one is not empty, that of the
    response, with its ids, and its text for those who sent text."""
    content = jet.DecodeResponse.StreamContent(
        samples=[jet.DecodeResponse.StreamContent.Sample() for _ in range(samples)])
    sample = content.samples[response.index]
    sample.token_ids.extend(token.id for token in response.tokens)
    if has_text:
        sample.text = response.text
    return jet.DecodeResponse(stream_content=content)


def _cut(message: pb.GenerateRequest, model: pb.GetModelResponse) -> None:
    """To the limits, with room for the end-of-sequence id."""
    limits = model.limits
    ids = message.token_ids.ids
    longest = limits.source_buckets[-1]
    if len(ids) > longest or len(ids) == longest and ids[-1] != model.eos_id:
        del ids[longest - 1:]
    if message.max_new_tokens > limits.max_new_tokens:
        message.max_new_tokens = limits.max_new_tokens
