"""Thousands of bad requests in all dialects: a clear status each, and nobody else disturbed."""

import asyncio
import collections
import dataclasses
import random
import sys
import time

import grpc
import pytest
from fake_engine import CONFIG, FakeEngine
from harness import field_of, on_server, resident
from request_fuzz import METHODS, Fuzzed, fuzzed

from tpuspec.protos import open_inference_pb2 as oip
from tpuspec.serving.client import error_details

CLEAR = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND,
         grpc.StatusCode.DEADLINE_EXCEEDED,
         grpc.StatusCode.FAILED_PRECONDITION}  # a trace of a server that takes none
AT_ONCE = 8
GROWTH = 1.03


async def send(channel: grpc.aio.Channel, request: Fuzzed) -> tuple[grpc.StatusCode, bytes]:
    """The status of the call, and the last message."""
    method = request.method
    path = f"/{method.containing_service.full_name}/{method.name}"
    last = b""
    try:
        if method.client_streaming:
            call = channel.stream_stream(path)(
                iter([request.data]), metadata=request.metadata, timeout=20)
        elif method.server_streaming:
            call = channel.unary_stream(path)(
                request.data, metadata=request.metadata, timeout=20)
        else:
            return grpc.StatusCode.OK, await channel.unary_unary(path)(
                request.data, metadata=request.metadata, timeout=20)
        async for message in call:
            last = message
    except grpc.aio.AioRpcError as error:
        check_refusal(request, error)
        return error.code(), last
    return grpc.StatusCode.OK, last


def check_refusal(request: Fuzzed, error: grpc.aio.AioRpcError) -> None:
    assert error.code() in CLEAR and error.details(), (request, error)
    if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
        return
    for violation in error_details(error).violations:
        assert error.details() == violation.description, (request, error)
        assert violation.description.startswith(violation.field), (request, error)
        if request.method.input_type.name == "GenerateRequest" and not (
                violation.field.rpartition(".")[2].isdigit()):
            assert field_of(violation.field)
    assert request.malformed or error_details(error).violations, (request, error)


def flood(count: int, seed: int) -> tuple[collections.Counter, list[int]]:
    """Sends so many; statuses, and the memory after each tenth of them."""
    rng = random.Random(seed)
    statuses: collections.Counter = collections.Counter()
    memory: list[int] = []

    async def body(it):
        done = asyncio.Event()
        before = len(asyncio.all_tasks())

        async def healthy() -> int:
            answers = 0
            while not done.is_set():
                assert (await it.answer([10, 60])).ids == [*range(11, 71), 1]
                answers += 1
            return answers

        async def sender(share: int) -> None:
            async with grpc.aio.insecure_channel(it.address) as channel:
                for _ in range(share):
                    request = fuzzed(rng)
                    status, last = await send(channel, request)
                    name = status.name
                    if request.method.client_streaming and last:
                        message = oip.ModelStreamInferResponse.FromString(last)
                        name += " with an error" if message.error_message else ""
                    statuses[request.method.name, name] += 1

        beside = asyncio.ensure_future(healthy())
        for _ in range(10):
            await asyncio.gather(*(sender(count // 10 // AT_ONCE) for _ in range(AT_ONCE)))
            memory.append(resident())
        done.set()
        assert await beside > 0
        load = await it.until_idle(20)
        assert load.accepted == load.finished + load.cancelled and load.failed == 0
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > before:
                await asyncio.sleep(0.05)

    on_server(body, FakeEngine(step_seconds=0.0005))
    return statuses, memory


def test_bad_requests_get_a_clear_status_each_and_disturb_nobody():
    statuses, _ = flood(480, seed=1)
    for method in ("Generate", "Decode", "ModelInfer"):
        assert statuses[method, "OK"] and statuses[method, "INVALID_ARGUMENT"]
    assert statuses["ModelStreamInfer", "OK with an error"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_ten_thousand_bad_requests_leave_memory_as_it_was():
    statuses, memory = flood(10_000, seed=2)
    print(statuses, memory)
    assert {method for method, _ in statuses} == {method.name for method in METHODS}
    assert memory[-1] < GROWTH * memory[1], memory


def sixty_four_streams(seconds: float, step_seconds: float) -> list[int]:
    """64 clients that ask again as soon as they are answered; memory at 20 times."""
    memory: list[int] = []

    async def body(it):
        before = len(asyncio.all_tasks())
        end = time.monotonic() + seconds

        async def streams(number: int) -> None:
            while time.monotonic() < end:
                answer = await it.answer([10 * number], timeout=60, draft_length=number % 4)
                assert answer.ids == [*range(10 * number + 1, 10 * number + 101)]

        async def watch() -> None:
            while time.monotonic() < end:
                await asyncio.sleep(seconds / 20)
                memory.append(resident())

        await asyncio.gather(watch(), *(streams(number) for number in range(1, 65)))
        load = await it.until_idle()
        assert load.accepted == load.finished >= 64
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > before:
                await asyncio.sleep(0.05)

    on_server(body, FakeEngine(dataclasses.replace(CONFIG, slots=64), step_seconds=step_seconds))
    return memory


def test_sixty_four_streams_at_once_leave_no_task():
    sixty_four_streams(2.0, 0.001)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_sixty_four_streams_for_ten_minutes_leave_memory_and_tasks_as_they_were():
    memory = sixty_four_streams(600.0, 0.2)
    print(memory)
    assert memory[-1] < GROWTH * memory[1], memory
