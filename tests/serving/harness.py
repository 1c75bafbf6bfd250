"""A real gRPC server on localhost around a fake engine, and clients for it."""

import asyncio
import contextlib
import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
from fake_engine import FakeEngine, FakeVocabulary
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving.client import BlockingClient, Client, make_request
from tpuspec.serving.server import Server
from tpuspec.serving.service import ModelInfo


@dataclasses.dataclass
class Running:
    """A server, a client of it and the engine inside."""

    server: Server
    client: Client
    engine: FakeEngine
    address: str

    async def answer(self, source, *, timeout=20.0, **parameters) -> "Answer":
        request = make_request(source, **parameters)
        return Answer([r async for r in self.client.generate(request, timeout=timeout)])

    async def until_idle(self, seconds: float = 2.0) -> pb.Load:
        """Waits until no slot is taken and nothing is queued."""
        async with asyncio.timeout(seconds):
            while True:
                load = (await self.client.get_model()).load
                if not load.active_slots and not load.queued and not self.engine.rows:
                    return load
                await asyncio.sleep(0.01)


class Answer:
    """The responses of one request."""

    def __init__(self, responses: list[pb.GenerateResponse]):
        self.responses = responses
        self.finals = [r.finish for r in responses if r.HasField("finish")]

    @property
    def ids(self) -> list[int]:
        return [token.id for r in self.responses for token in r.tokens]

    @property
    def origins(self) -> str:
        """One letter a token: plain, accepted, correction, bonus."""
        return "".join("?pacb"[token.origin] for r in self.responses for token in r.tokens)

    @property
    def text(self) -> str:
        return "".join(r.text for r in self.responses)

    @property
    def finish(self) -> pb.Finish:
        assert len(self.finals) == 1 and self.responses[-1].HasField("finish")
        return self.finals[0]

    @property
    def reason(self) -> str:
        return pb.FinishReason.Name(self.finish.reason).removeprefix("FINISH_REASON_").lower()


@contextlib.asynccontextmanager
async def running(engine: FakeEngine | None = None, *, grace: float = 5.0, port: int = 0,
                  **options) -> AsyncIterator[Running]:
    engine = engine if engine is not None else FakeEngine()
    server = Server(engine, FakeVocabulary(), ModelInfo(name="count"), **options)
    port = await server.start(f"localhost:{port}")
    address = f"localhost:{port}"
    try:
        async with Client(address) as client:
            yield Running(server, client, engine, address)
    finally:
        assert await server.drain(grace)


def on_server(body: Callable[[Running], Awaitable[None]], engine: FakeEngine | None = None,
              **options) -> None:
    """Runs a test's body against a fresh server."""
    async def main() -> None:
        async with running(engine, **options) as it:
            await body(it)

    asyncio.run(main())


async def health(it: Running, service: str = "tpuspec.v1.Generation"):
    """What the standard health service says."""
    async with grpc.aio.insecure_channel(it.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def status_of(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    """The status that a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def resident() -> int:
    """Kilobytes of this process, in which both ends are; 0 where that is not told."""
    try:
        status = pathlib.Path("/proc/self/status").read_text()
    except FileNotFoundError:
        return 0
    return int(next(line.split()[1] for line in status.splitlines() if "VmRSS" in line))


def field_of(path: str, message=pb.GenerateRequest.DESCRIPTOR):
    """The field that a path of a violation names; LookupError if there is none."""
    name, _, rest = path.partition(".")
    name = name.partition("[")[0]
    if name == "source" and not rest:
        return message.oneofs_by_name[name]
    field = message.fields_by_name[name]
    return field_of(rest, field.message_type) if rest else field


def try_client(address: str, results) -> None:
    """Puts the text of one request, or why the client refused."""
    try:
        with BlockingClient(address) as client:
            results.put("".join(r.text for r in client.generate("zero", max_new_tokens=2)))
    except RuntimeError as error:
        results.put(str(error))


def serve_until_signal(address, fail_at_step: int | None) -> None:
    """The life of a server process; puts the port into ``address`` when it serves."""
    async def main() -> int:
        engine = FakeEngine(step_seconds=0.05, fail_at_step=fail_at_step)
        server = Server(engine, FakeVocabulary(), ModelInfo(name="count"))
        return await server.run("localhost:0", 20.0, address.put)

    raise SystemExit(asyncio.run(main()))


def run_cli(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The console script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from tpuspec.serving.cli import main; main()", *args],
        input=stdin, capture_output=True, text=True, timeout=120)
