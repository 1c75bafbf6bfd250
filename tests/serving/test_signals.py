"""How a serving process ends: drained by a signal, forced, or with a failed engine."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time

import grpc
import pytest
from harness import Answer, running, serve_until_signal

from tpuspec.serving.client import BlockingClient


@contextlib.contextmanager
def server_process(fail_at_step: int | None = None):
    context = multiprocessing.get_context("spawn")
    address = context.Queue()
    process = context.Process(target=serve_until_signal, args=(address, fail_at_step))
    process.start()
    try:
        port = address.get(timeout=30)
        with BlockingClient(f"localhost:{port}") as client:
            client.port = port
            yield process, client
    finally:
        process.kill()
        process.join()
        process.close()


def test_idle_server_exits_at_once_with_0():
    with server_process() as (process, _):
        began = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        process.join(10)
        assert process.exitcode == 0
        assert time.monotonic() - began < 3


def test_running_stream_is_finished_before_the_exit():
    with server_process() as (process, client):
        stream = client.generate([10], max_new_tokens=40)
        first = next(stream)
        os.kill(process.pid, signal.SIGTERM)
        answer = Answer([first, *stream])
        assert answer.ids == list(range(11, 51)) and answer.reason == "length"
        process.join(10)
        assert process.exitcode == 0


def test_second_signal_forces_the_end():
    with server_process() as (process, client):
        stream = client.generate([10], max_new_tokens=100, draft_length=0)
        next(stream)
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as error:
            list(stream)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        process.join(10)
        assert process.exitcode == 1


def test_failed_engine_ends_the_process_with_1():
    with server_process(fail_at_step=3) as (process, client):
        with pytest.raises(grpc.RpcError) as error:
            list(client.generate([10], draft_length=0))
        assert error.value.code() is grpc.StatusCode.INTERNAL
        process.join(10)
        assert process.exitcode == 1


def test_killed_server_is_unavailable_and_another_takes_its_port_at_once():
    with server_process() as (process, client):
        streams = [client.generate([10], draft_length=0) for _ in range(2)]
        for stream in streams:
            next(stream)
        process.kill()
        for stream in streams:
            with pytest.raises(grpc.RpcError) as error:
                list(stream)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        process.join(10)

    async def restarted():
        async with running(port=client.port) as it:
            assert (await it.answer([10, 3])).ids == [11, 12, 13, 1]

    asyncio.run(restarted())
