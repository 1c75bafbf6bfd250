"""Clients that go away, deadlines, floods and large messages, over real gRPC."""

import asyncio
import contextlib
import random
import subprocess
import sys
import time

import grpc
import pytest
from fake_engine import FakeEngine, FakeVocabulary
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from harness import Answer, health, on_server, resident, status_of

from tpuspec.serving import malformed, server
from tpuspec.serving.channel import MAX_MESSAGE_BYTES
from tpuspec.serving.client import BlockingClient, Client, error_details, make_request
from tpuspec.serving.engine_loop import EngineLoop
from tpuspec.serving.errors import RequestError
from tpuspec.serving.server import Server
from tpuspec.serving.service import ModelInfo
from tpuspec.serving.token_stream import TokenStream
from tpuspec.serving.validation import Door

SERVICE = "tpuspec.v1.Generation"
MANY_STREAMS = """
import asyncio, sys
from tpuspec.serving.client import Client, make_request

async def stream(client):
    async for _ in client.generate(make_request([10], draft_length=0)):
        print(flush=True)

async def main():
    async with Client(sys.argv[1]) as client:
        await asyncio.gather(*(stream(client) for _ in range(30)))

asyncio.run(main())
"""
ENDLESS = dict(source=[10], max_new_tokens=100, draft_length=0)


# ---- clients that go away ------------------------------------------------------


def test_client_that_goes_away_frees_its_slot_and_disturbs_nobody():
    rng = random.Random(0)

    async def body(it):
        before = await it.answer([10, 30])
        for _ in range(75):  # 300 streams
            streams = [it.client.generate(make_request(**ENDLESS)) for _ in range(4)]
            for stream in streams[:2]:
                await anext(stream)
            if rng.random() < 0.5:  # another one is waiting for a slot meanwhile
                waiting = asyncio.ensure_future(anext(streams[2]))
                await asyncio.sleep(0.002)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            for stream in streams:
                await stream.aclose()
        load = await it.until_idle()
        assert load.accepted == load.finished + load.cancelled
        assert (await it.answer([10, 30])).ids == before.ids

    on_server(body, FakeEngine(step_seconds=0.002))


class CancelledInside(FakeEngine):
    """Has its first request cancelled at the worst moments, and notes who is in which step."""

    def __init__(self, when: str):
        super().__init__()
        self.when, self.cancel = when, lambda: None
        self.sources: list[set[tuple[int, ...]]] = []
        self.mark: int | None = None  # steps that were launched when it was cancelled

    def insert(self, slot, source, **options):
        super().insert(slot, source, **options)
        self._now("insert")

    def step(self):
        if len(self.sources) == 3:
            self._now("launch")
        self.sources.append({row.source for row in self.rows.values()})
        handle = super().step()
        if len(self.sources) == 4:
            read, handle.read = handle.read, lambda: (self._now("read"), read())[1]
        return handle

    def _now(self, when):
        if when == self.when and self.mark is None:
            self.mark = len(self.sources)
            self.cancel()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("when", ["insert", "launch", "read"])
def test_cancelled_request_is_in_one_more_step_at_the_most(when, overlap):
    async def main():
        engine = CancelledInside(when)
        loop = EngineLoop(engine, None, queue_limit=2, overlap=overlap)
        door = Door(engine.config, vocabulary_size=engine.vocabulary_size, eos_id=1,
                    vocabulary=None)
        streams = [TokenStream() for _ in range(3)]
        tickets = [loop.submit(door.check(make_request([10 * n], draft_length=0)), stream)
                   for n, stream in enumerate(streams, 1)]
        engine.cancel = lambda: loop.cancel(tickets[0])
        loop.start()
        with pytest.raises(RequestError, match="cancelled"):
            async for _ in streams[0]:
                pass
        for n, stream in enumerate(streams[1:], 2):  # the third took its place
            ids = [token.id async for chunk in stream for token in chunk.tokens]
            assert ids == [*range(10 * n + 1, 10 * n + 101)]
        assert await asyncio.to_thread(loop.stop, 5.0)
        assert any((10, 1) in sources for sources in engine.sources)
        later = engine.sources[engine.mark:]
        assert sum((10, 1) in sources for sources in later) <= 1
        # With the step in flight these are two; the next one has the slot's next tenant.
        assert all((30, 1) in sources for sources in later[1:90])

    asyncio.run(main())


def test_slot_of_a_client_that_cancels_is_free_within_two_steps():
    async def body(it):
        streams = [it.client.generate(make_request(**ENDLESS)) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        await streams[0].aclose()
        began = it.engine.steps
        while len(it.engine.rows) == 2:
            await asyncio.sleep(0.005)
        assert it.engine.steps - began <= 2
        assert (await it.answer([50, 0])).ids == [1]
        await streams[1].aclose()

    on_server(body, FakeEngine(step_seconds=0.25))


def kill_clients(rounds: int) -> list[int]:
    """Each time a process with 30 streams, of which two run and the others wait; memory after
    each."""
    memory = []

    async def body(it):
        for number in range(1, rounds + 1):
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", MANY_STREAMS, it.address, stdout=subprocess.PIPE)
            await asyncio.wait_for(child.stdout.readline(), 30)  # a first message
            while (await it.client.get_model()).load.accepted < 30 * number:
                await asyncio.sleep(0.01)
            began = it.engine.steps
            child.kill()
            load = await it.until_idle()
            # Long ones: what a busy machine takes until it knows of it must be less than one.
            assert it.engine.steps - began <= 2
            assert load.cancelled == 30 * number and load.finished == 0
            await child.wait()
            memory.append(resident())
        assert (await it.answer([10, 3])).ids == [11, 12, 13, 1]

    on_server(body, FakeEngine(step_seconds=0.4))
    return memory


def test_killed_client_process_frees_its_slots_and_places():
    kill_clients(2)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_three_hundred_killed_streams():
    memory = kill_clients(10)
    print(memory)
    assert memory[-1] < 1.05 * memory[1], memory


def test_reader_that_never_reads_holds_no_slot():
    async def body(it):
        stuck = it.client.generate(make_request([10]))
        await anext(stuck)
        answers = await asyncio.gather(*(it.answer([10, 20]) for _ in range(6)))
        assert all(answer.ids == [*range(11, 31), 1] for answer in answers)
        load = await it.until_idle()
        assert load.finished == 7
        rest = [response async for response in stuck]
        assert Answer(rest).reason == "length"

    on_server(body)


# ---- deadlines and floods --------------------------------------------------------


def test_deadline_ends_running_and_waiting_requests():
    async def body(it):
        calls = [it.answer(**ENDLESS, timeout=0.3) for _ in range(4)]
        began = time.monotonic()
        for code, _ in await asyncio.gather(*map(status_of, calls)):
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - began < 2
        load = await it.until_idle()
        assert (load.finished, load.cancelled) == (0, 4)

    on_server(body, FakeEngine(step_seconds=0.05))


def test_queue_has_an_end_and_says_when_to_come_back():
    async def body(it):
        async def one(number):
            began = time.monotonic()
            try:
                return await it.answer([9 * number, 5]), 0.0
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "the limit is 10" in error.details()
                assert error_details(error).retry_after > 0
                return None, time.monotonic() - began

        results = await asyncio.gather(*(one(n) for n in range(1, 201)))
        answers = {n: answer for n, (answer, _) in enumerate(results, 1) if answer is not None}
        # Two run, ten wait; a few more may enter while the flood is still arriving.
        assert 12 <= len(answers) <= 20
        assert max(seconds for _, seconds in results) < 10  # at once, on a busy machine too
        for n, answer in answers.items():
            assert answer.ids == [*range(9 * n + 1, 9 * n + 6), 1]
        load = await it.until_idle()
        assert load.refused == 200 - len(answers)
        assert (await it.answer([10, 1, 1])).ids == [11, 1]

    on_server(body, FakeEngine(step_seconds=0.25), queue_limit=10)


# ---- messages --------------------------------------------------------------------


def test_large_messages_work_with_the_shipped_client_or_fail_with_the_limit():
    async def body(it):
        code, message = await status_of(it.answer("one " * (5 << 18)))  # 5 MiB
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "1048576" in message
        code, message = await status_of(it.answer("o" * (MAX_MESSAGE_BYTES + 1)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and str(MAX_MESSAGE_BYTES) in message
        assert (await it.answer([10, 3])).reason == "eos"

    on_server(body)


def test_messages_of_clients_without_a_limit_are_refused_by_the_server():
    async def body(it):
        data = b"x" * (MAX_MESSAGE_BYTES + 1)
        async with grpc.aio.insecure_channel(
                it.address, options=[("grpc.max_send_message_length", -1)]) as channel:
            stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
            await stream.write(data)
            for call in (channel.unary_stream(f"/{SERVICE}/Generate")(data),
                         channel.unary_unary(f"/{SERVICE}/GetModel")(data), stream):
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert str(MAX_MESSAGE_BYTES) in await call.details()
        assert (await it.answer([10, 3])).reason == "eos"

    on_server(body)


def test_shipped_clients_take_more_than_grpcs_usual_four_megabytes():
    async def main():
        large = Server(FakeEngine(), FakeVocabulary(), ModelInfo(
            name="large", target_config_json="x" * (5 << 20)))
        address = f"localhost:{await large.start('localhost:0')}"
        async with Client(address) as client:
            assert len((await client.get_model()).target_config_json) == 5 << 20

        def blocking() -> int:
            with BlockingClient(address) as client:
                return len(client.get_model().target_config_json)

        assert await asyncio.to_thread(blocking) == 5 << 20
        assert await large.drain(1.0)

    asyncio.run(main())


def test_idle_client_may_ping_as_often_as_it_likes():
    async def body(it):
        connectivity = []
        async with grpc.aio.insecure_channel(it.address, options=[
                ("grpc.keepalive_time_ms", 1_100), ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.min_time_between_pings_ms", 1_100)]) as channel:
            await channel.channel_ready()
            waiting = asyncio.ensure_future(
                channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
            _, lost = await asyncio.wait([waiting], timeout=6.0)  # five pings; three were too many
            connectivity.append(channel.get_state())
            waiting.cancel()
        assert lost and connectivity == [grpc.ChannelConnectivity.READY]

    on_server(body)


def test_silent_connection_is_closed_and_disturbs_nobody(monkeypatch):
    name = "grpc.server_handshake_timeout_ms"
    assert dict(server._OPTIONS)[name] == 10_000
    monkeypatch.setattr(server, "_OPTIONS", tuple((dict(server._OPTIONS) | {name: 500}).items()))

    async def body(it):
        silent = [await asyncio.open_connection(*it.address.split(":")) for _ in range(20)]
        silent[0][1].write(b"PRI * HT")  # the beginning of a preface, and no more
        assert (await it.answer([10, 3])).ids == [11, 12, 13, 1]
        async with asyncio.timeout(10):
            for reader, writer in silent:
                await reader.read()  # to its end
                writer.close()
        assert (await it.answer([10, 3])).ids == [11, 12, 13, 1]

    on_server(body)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Of HTTP/2."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def test_requests_that_never_end_hold_no_slot_and_are_refused(monkeypatch):
    """Slow-loris: a call that is begun as it should be, and a message that comes byte by byte."""
    assert malformed.ARRIVAL_SECONDS == 30
    monkeypatch.setattr(malformed, "ARRIVAL_SECONDS", 1.5)
    headers = {":method": "POST", ":scheme": "http", ":authority": "localhost", "te": "trailers",
               "content-type": "application/grpc"}

    async def dribble(address: str, method: str) -> tuple[bytes, float]:
        """What the server said, and after how long."""
        packed = b"".join(bytes([0, len(key), *key.encode(), len(value), *value.encode()])
                          for key, value in (headers | {":path": f"/{SERVICE}/{method}"}).items())
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
                     + frame(1, 4, 1, packed)  # and that 100 bytes will come:
                     + frame(0, 0, 1, b"\0" + (100).to_bytes(4)))
        began, said = time.monotonic(), b""
        while b"did not arrive" not in said:
            writer.write(frame(0, 0, 1, b"\x12"))
            with contextlib.suppress(TimeoutError):
                said += await asyncio.wait_for(reader.read(1 << 16), 0.1)
            assert time.monotonic() - began < 15
        writer.close()
        await writer.wait_closed()
        return said, time.monotonic() - began

    async def body(it):
        slow = [asyncio.ensure_future(dribble(it.address, method))
                for method in ("Generate", "GetModel") for _ in range(10)]
        await asyncio.sleep(0.5)
        load = (await it.client.get_model()).load
        assert load.active_slots == load.accepted == 0
        assert (await it.answer([10, 3])).ids == [11, 12, 13, 1]
        for said, seconds in await asyncio.gather(*slow):
            # The bytes of a name, a length and a value in the trailers.
            assert b"grpc-status\x014" in said and seconds >= 1.5
        assert (await it.answer([10, 3])).ids == [11, 12, 13, 1]
        assert (await it.client.get_model()).load.accepted == 2

    on_server(body)


def test_call_without_a_request_is_refused():
    async def body(it):
        async with grpc.aio.insecure_channel(it.address) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Generate")(iter([]))
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await call.details() == "the call ended without a request"

    on_server(body)


def test_health_and_reflection_answer():
    async def body(it):
        assert await health(it) == await health(it, "") == "SERVING"
        async with grpc.aio.insecure_channel(it.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            async for response in stub.ServerReflectionInfo(iter([request])):
                names = {s.name for s in response.list_services_response.service}
                assert {SERVICE, "grpc.health.v1.Health", "jetstream_proto.Orchestrator",
                        "inference.GRPCInferenceService"} <= names

    on_server(body)


def test_second_server_on_the_same_port_fails():
    async def body(it):
        second = Server(FakeEngine(), FakeVocabulary(), ModelInfo(name="second"))
        with pytest.raises(OSError, match="cannot listen on"):
            await second.start(it.address)

    on_server(body)
