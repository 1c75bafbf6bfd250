"""Our own dialect, ``tpuspec.v1.Generation``: the messages are the requests themselves."""

import grpc.aio

from tpuspec.protos import generation_pb2 as pb
from tpuspec.protos import generation_pb2_grpc
from tpuspec.serving.front import Front
from tpuspec.serving.traces import Traces


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """See protos/generation.proto."""

    def __init__(self, front: Front, traces: Traces):
        self._front = front
        self._traces = traces

    async def Generate(self, request: pb.GenerateRequest,
                       context: grpc.aio.ServicerContext) -> None:
        await self._front.write(
            self._front.responses(request, context.time_remaining(), context), context)

    async def GetModel(self, request: pb.GetModelRequest,
                       context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        return self._front.service.model()

    async def Profile(self, request: pb.ProfileRequest,
                      context: grpc.aio.ServicerContext) -> None:
        await self._front.write(self._traces.responses(request), context)
