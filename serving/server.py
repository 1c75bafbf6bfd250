"""A gRPC server around an engine: start, health, drain."""

import asyncio
import signal
from collections.abc import Callable

import grpc
import grpc.aio
from absl import logging
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from tpuspec.protos import (
    generation_pb2,
    generation_pb2_grpc,
    jetstream_pb2,
    jetstream_pb2_grpc,
    open_inference_pb2,
    open_inference_pb2_grpc,
)
from tpuspec.serving.channel import OPTIONS
from tpuspec.serving.engine_loop import EngineLoop
from tpuspec.serving.front import Front
from tpuspec.serving.interfaces import SlotEngine, Tracer, Vocabulary
from tpuspec.serving.jetstream import OrchestratorServicer
from tpuspec.serving.malformed import MalformedCheck
from tpuspec.serving.metrics import Metrics
from tpuspec.serving.open_inference import InferenceServicer
from tpuspec.serving.security import PLAIN_SERVER, ServerSecurity
from tpuspec.serving.service import GenerationService, ModelInfo
from tpuspec.serving.servicer import GenerationServicer
from tpuspec.serving.spans import Spans
from tpuspec.serving.traces import Traces

_NAMES = tuple(service.full_name for protos in (generation_pb2, jetstream_pb2, open_inference_pb2)
               for service in protos.DESCRIPTOR.services_by_name.values())
_JOIN_SECONDS = 10.0  # for the step in flight at the end
_OPTIONS = (
    *OPTIONS,
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail, not share it
    # Clients' own pings are welcome, also from idle ones: by default the third in five minutes
    # would cost them the connection.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    # Whoever connects and then says nothing is shown out.
    ("grpc.server_handshake_timeout_ms", 10_000),
)


class Server:
    """Serves one engine on one address, in three dialects.

    Made, started and drained in one event loop. ``engine`` must be warmed up: the
    port opens at once. ``metrics`` are there to be served. ``tracer`` takes profiler traces
    for those who ask; None refuses them. ``spans`` is told of every request that ended.
    """

    def __init__(self, engine: SlotEngine, vocabulary: Vocabulary | None, info: ModelInfo, *,
                 queue_limit: int = 64, queue_tokens: int | None = None, overlap: bool = True,
                 security: ServerSecurity = PLAIN_SERVER, reflect: bool = True,
                 jetstream_truncate: bool = False, tracer: Tracer | None = None,
                 spans: Spans | None = None):
        """Raises ValueError on files of ``security`` that cannot be used."""
        self._event_loop = asyncio.get_running_loop()
        self._loop = EngineLoop(engine, vocabulary, queue_limit=queue_limit,
                                queue_tokens=queue_tokens, overlap=overlap,
                                on_failure=self._engine_failed,
                                on_step=lambda request, chunk: self.metrics.observe(request, chunk))
        self.metrics = Metrics(self._loop, info.name)
        self._front = Front(GenerationService(self._loop, vocabulary, info), spans)
        self._traces = Traces(tracer, self._front.drains)
        self._health = health_aio.HealthServicer()
        self._credentials = security.credentials()
        self._server = grpc.aio.server(
            options=_OPTIONS, interceptors=(MalformedCheck(_NAMES), *security.interceptors()))
        self._reflect = reflect
        self._jetstream_truncate = jetstream_truncate
        self.failed = asyncio.Event()

    async def start(self, address: str) -> int:
        """Opens the port and returns its number; port 0 takes a free one.

        Raises:
          OSError: the address cannot be bound.
        """
        generation_pb2_grpc.add_GenerationServicer_to_server(
            GenerationServicer(self._front, self._traces), self._server)
        jetstream_pb2_grpc.add_OrchestratorServicer_to_server(
            OrchestratorServicer(self._front, truncate=self._jetstream_truncate), self._server)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
            InferenceServicer(self._front), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._reflect:
            reflection.enable_server_reflection(
                (*_NAMES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                 reflection.SERVICE_NAME), self._server)
        try:
            port = (self._server.add_insecure_port(address) if self._credentials is None
                    else self._server.add_secure_port(address, self._credentials))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from None
        for name in _NAMES:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._loop.start()
        await self._server.start()
        return port

    async def drain(self, grace: float, force: asyncio.Event | None = None) -> bool:
        """Refuses new requests, lets the accepted ones end, then closes the port.

        Requests that are not done after ``grace`` seconds, or when ``force`` is set,
        end with UNAVAILABLE. Returns False if the engine's thread did not end.
        """
        self._front.refuse_new()
        await self._health.enter_graceful_shutdown()
        deadline = self._event_loop.time() + grace
        while (self._front.active and self._event_loop.time() < deadline
               and not (force is not None and force.is_set())):
            await asyncio.sleep(0.02)
        ended = await asyncio.to_thread(self._loop.stop, _JOIN_SECONDS)
        await self._traces.close()
        # A moment for the last statuses to leave; nobody waits when all streams are done.
        await self._server.stop(1.0 if self._front.active else 0.05)
        return ended

    async def run(self, address: str, grace: float, on_ready: Callable[[int], None]) -> int:
        """Serves until SIGTERM or SIGINT, drains, and returns the exit code.

        A second signal forces the end. A failed engine ends the server with code 1.

        Args:
          address: as for ``start``.
          grace: as for ``drain``.
          on_ready: called with the port when it is open.
        """
        stop, force = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (force if stop.is_set() else stop).set()

        # Before the port opens: whoever sees it may send a signal.
        for number in (signal.SIGTERM, signal.SIGINT):
            self._event_loop.add_signal_handler(number, on_signal)
        try:
            on_ready(await self.start(address))
            await _first(stop, self.failed)
            if self.failed.is_set():
                logging.error("stopping: the engine failed")
            else:
                logging.info("draining for up to %g s; a second signal forces the end", grace)
            stop.set()
            ended = await self.drain(grace, force)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._event_loop.remove_signal_handler(number)
        return 0 if ended and not self.failed.is_set() and not force.is_set() else 1

    def _engine_failed(self, error: Exception) -> None:
        report = self._report_failure()
        try:
            asyncio.run_coroutine_threadsafe(report, self._event_loop)
        except RuntimeError:
            report.close()  # the event loop is closed: the server is gone

    async def _report_failure(self) -> None:
        self._front.refuse_new()
        await self._health.enter_graceful_shutdown()
        self.failed.set()


async def _first(*events: asyncio.Event) -> None:
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
