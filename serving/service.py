"""Generation without a transport: what the gRPC servicer and the in-process command share."""

import asyncio
import dataclasses
import importlib.metadata
from collections.abc import AsyncGenerator

from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving import messages
from tpuspec.serving.channel import MAX_MESSAGE_BYTES
from tpuspec.serving.engine_loop import EngineLoop, Totals
from tpuspec.serving.errors import RequestError
from tpuspec.serving.interfaces import Vocabulary
from tpuspec.serving.request import Request
from tpuspec.serving.token_stream import TokenStream
from tpuspec.serving.validation import Door

_LONG = 4096  # bytes; longer messages are checked and tokenized off the event loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What ``GetModel`` says of a model beside its numbers."""

    name: str
    platform: str = ""
    devices: tuple[str, ...] = ()
    target_config_json: str = ""
    draft_config_json: str = ""
    eos_id: int = 1


class GenerationService:
    """Requests in, responses out."""

    def __init__(self, loop: EngineLoop, vocabulary: Vocabulary | None, info: ModelInfo):
        self._loop = loop
        self._info = info
        self._door = Door(loop.engine.config, vocabulary_size=loop.engine.vocabulary_size,
                          eos_id=info.eos_id, vocabulary=vocabulary)

    async def generate(self, message: pb.GenerateRequest, timeout: float | None = None,
                       ) -> AsyncGenerator[pb.GenerateResponse]:
        """Streams the responses of one request; closing the generator cancels it.

        Args:
          message: as it came.
          timeout: seconds until the request's deadline; None is never.

        Raises:
          RequestError: as the proto lists.
        """
        deadline = None if timeout is None else self._loop.clock() + timeout
        request = await self._check(message, deadline)
        engine = self._loop.engine
        stream = TokenStream(request.n)
        tickets = self._loop.submit(request, stream)
        try:
            async for chunk in stream:
                yield messages.response(request, chunk, engine.cost, engine.config)
        finally:
            self._loop.cancel(tickets)

    async def _check(self, message: pb.GenerateRequest, deadline: float | None) -> Request:
        try:
            if message.ByteSize() > _LONG:
                return await asyncio.to_thread(self._door.check, message, deadline)
            return self._door.check(message, deadline)
        except ValueError as error:
            raise RequestError.of_field(error) from None

    @property
    def totals(self) -> Totals:
        return self._loop.totals

    def model(self) -> pb.GetModelResponse:
        engine, load, info = self._loop.engine, self._loop.load, self._info
        config = engine.config
        return pb.GetModelResponse(
            name=info.name, version=importlib.metadata.version("tpuspec"),
            platform=info.platform, devices=info.devices,
            target_config_json=info.target_config_json,
            draft_config_json=info.draft_config_json, eos_id=info.eos_id,
            limits=pb.Limits(
                slots=config.slots, queue=self._loop.queue_limit,
                source_buckets=config.source_buckets, max_new_tokens=config.max_target_length,
                draft_lengths=config.draft_lengths, default_draft_length=config.draft_length,
                vocabulary_size=engine.vocabulary_size, message_bytes=MAX_MESSAGE_BYTES,
                queue_tokens=self._loop.queue_tokens),
            cost=None if engine.cost is None else messages.cost(engine.cost),
            speculation=messages.speculation(self._loop.stats, engine.cost),
            load=pb.Load(**dataclasses.asdict(load), compilations=engine.compilations),
            sampler=config.sampler)
