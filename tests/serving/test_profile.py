"""Traces of a running server on request: who gets one, when it ends, and where its files go."""

import asyncio
import contextlib
import json
import pathlib
import time

import grpc
import pytest
from harness import on_server, run_cli, running, status_of

from tpuspec.profiling import Profiler
from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving.client import error_details, make_request
from tpuspec.serving.profile import save

LARGE = bytes(range(256)) * (5 << 11)  # 2.5 MiB, more than one message takes


class FakeTracer:
    """Writes two files when a trace ends; asserts that there is one at a time.

    Args:
      fails: ends of traces that raise OSError.
    """

    def __init__(self, root: pathlib.Path, *, fails: int = 0):
        self.root, self.fails = root, fails
        self.started = self.ended = 0

    def start(self) -> pathlib.Path:
        assert self.started == self.ended
        self.started += 1
        return self.root / str(self.started)

    def stop(self) -> None:
        time.sleep(0.1)
        self.ended += 1
        assert self.started == self.ended
        if self.ended <= self.fails:
            raise OSError("no space left on device")
        directory = self.root / str(self.ended) / "plugins"
        directory.mkdir(parents=True)
        (directory / "host.xplane.pb").write_bytes(LARGE)
        (directory / "trace.json.gz").write_bytes(b"small")


async def trace(it, seconds: float) -> list[pb.ProfileResponse]:
    return [response async for response in it.client.profile(seconds)]


async def until(condition, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def test_command_brings_the_files_while_streams_go_on(tmp_path):
    tracer, here = FakeTracer(tmp_path / "server"), tmp_path / "here"

    async def body(it):
        def command(*flags: str):
            return asyncio.to_thread(run_cli, "profile", "--server", it.address, "--seconds",
                                     "0.5", "--output", str(here), *flags)

        profiling = asyncio.ensure_future(command("--json"))
        answers = 0
        while not profiling.done():
            assert (await it.answer([10, 20])).ids == [*range(11, 31), 1]
            answers += tracer.started > tracer.ended
        result = await profiling
        assert result.returncode == 0 and result.stderr == "", result.stderr
        assert answers  # while it traced
        found = json.loads(result.stdout)
        assert found["server_directory"] == str(tmp_path / "server" / "1")
        assert 0.5 <= found["seconds"] < 5
        files = [here / "plugins" / name for name in ("host.xplane.pb", "trace.json.gz")]
        assert found["files"] == [str(file) for file in files]
        assert [file.read_bytes() for file in files] == [LARGE, b"small"]

        again = await command()
        assert again.returncode == 1 and again.stdout == ""
        assert again.stderr == f"tpuspec profile: {files[0]} exists already\n"
        assert sorted(here.iterdir()) == [here / "plugins"]

    on_server(body, tracer=tracer)


def test_who_gets_no_trace_is_told_why(tmp_path):
    tracer = FakeTracer(tmp_path)

    async def off(it):
        code, message = await status_of(trace(it, 1.0))
        assert code is grpc.StatusCode.FAILED_PRECONDITION and "--profile_dir" in message
        result = await asyncio.to_thread(run_cli, "profile", "--server", it.address,
                                         "--output", str(tmp_path / "out"))
        assert result.returncode == 1
        assert result.stderr.startswith(
            f"tpuspec profile: no trace of {it.address}: FAILED_PRECONDITION: ")

    async def on(it):
        for seconds in (0.0, 0.05, 60.5, -1.0, float("nan"), float("inf")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await trace(it, seconds)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            violation, = error_details(refused.value).violations
            assert violation.field == "seconds" and "[0.1, 60.0]" in violation.description
        first = asyncio.ensure_future(trace(it, 1.0))
        await until(lambda: tracer.started == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await trace(it, 1.0)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 0 < error_details(refused.value).retry_after <= 2
        assert (await first)[0].seconds >= 1 and tracer.ended == 1

    on_server(off)
    on_server(on, tracer=tracer)


def test_a_client_that_goes_away_ends_its_trace(tmp_path):
    tracer = FakeTracer(tmp_path)

    async def body(it):
        call = asyncio.ensure_future(trace(it, 60.0))
        await until(lambda: tracer.started == 1)
        call.cancel()
        await until(lambda: tracer.ended == 1)
        await asyncio.sleep(0.1)
        assert (await trace(it, 0.1))[0].directory == str(tmp_path / "2")

    on_server(body, tracer=tracer)


def test_shutdown_ends_the_trace_that_runs(tmp_path):
    tracer = FakeTracer(tmp_path)

    async def main():
        async with running(tracer=tracer) as it:
            call = asyncio.ensure_future(trace(it, 60.0))
            await until(lambda: tracer.started == 1)
            drain = asyncio.ensure_future(it.server.drain(20.0))
            await asyncio.sleep(0.01)
            assert (await status_of(trace(it, 1.0)))[0] is grpc.StatusCode.UNAVAILABLE
            first, *files = await call  # what there was of it
            assert first.seconds < 20 and files and tracer.ended == 1
            assert await drain

    asyncio.run(main())


def test_shutdown_without_grace_leaves_no_trace_running(tmp_path):
    tracer = FakeTracer(tmp_path)

    async def main():
        async with running(tracer=tracer, grace=0.0) as it:
            asyncio.ensure_future(status_of(trace(it, 60.0)))
            await until(lambda: tracer.started == 1)
        assert tracer.ended == 1

    asyncio.run(main())


def test_a_trace_that_fails_costs_nobody_else_anything(tmp_path):
    tracer = FakeTracer(tmp_path, fails=1)

    async def body(it):
        stream = it.client.generate(make_request([10]))
        await anext(stream)
        code, message = await status_of(trace(it, 0.1))
        assert (code, message) == (grpc.StatusCode.INTERNAL,
                                   "the trace failed: OSError: no space left on device")
        rest = [token.id async for response in stream for token in response.tokens]
        assert rest[-1] == 110
        assert len(await trace(it, 0.1)) == 5

    on_server(body, tracer=tracer)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/tmp/x"])
def test_files_that_would_lie_elsewhere_are_not_taken(tmp_path, name):
    async def sent():
        yield pb.ProfileResponse(directory="/there", seconds=1)
        yield pb.ProfileResponse(file=name, data=b"x")

    with pytest.raises(ValueError, match="not of a trace"):
        asyncio.run(save(sent(), tmp_path / "out"))
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_a_stream_that_breaks_off_leaves_nothing(tmp_path):
    async def sent():
        yield pb.ProfileResponse(directory="/there", seconds=1)
        yield pb.ProfileResponse(file="a/b", data=b"x")
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError), contextlib.chdir(tmp_path):
        asyncio.run(save(sent(), pathlib.Path("out")))
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_a_directory_that_cannot_be_written_to_is_known_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        Profiler(tmp_path / "file" / "traces")
    assert Profiler(tmp_path / "new" / "traces") and (tmp_path / "new" / "traces").is_dir()
