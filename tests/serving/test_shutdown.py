"""Draining and failing over real gRPC."""

import asyncio
import time

import grpc
from fake_engine import NON_FINITE_START, FakeEngine
from harness import health, on_server, running, status_of

ENDLESS = dict(source=[10], max_new_tokens=100, draft_length=0)


def test_idle_server_drains_at_once():
    async def main():
        async with running() as it:
            began = time.monotonic()
            assert await it.server.drain(30.0)
            assert time.monotonic() - began < 1.5

    asyncio.run(main())


def test_drain_finishes_what_was_accepted_and_refuses_the_rest():
    async def main():
        async with running(FakeEngine(step_seconds=0.05)) as it:
            accepted = [asyncio.ensure_future(it.answer([10, 20])) for _ in range(5)]
            while (await it.client.get_model()).load.accepted < 5:
                await asyncio.sleep(0.01)
            drain = asyncio.ensure_future(it.server.drain(20.0))
            await asyncio.sleep(0.05)
            code, message = await status_of(it.answer([10, 3]))
            assert (code, message) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
            assert await health(it) == "NOT_SERVING"
            for answer in await asyncio.gather(*accepted):
                assert answer.ids == [*range(11, 31), 1]
            assert await drain

    asyncio.run(main())


def test_drain_ends_streams_with_a_status_when_the_grace_is_over():
    async def main():
        async with running(FakeEngine(step_seconds=0.1)) as it:
            calls = [asyncio.ensure_future(status_of(it.answer(**ENDLESS))) for _ in range(4)]
            while (await it.client.get_model()).load.accepted < 4:
                await asyncio.sleep(0.01)
            began = time.monotonic()
            assert await it.server.drain(0.5)
            assert time.monotonic() - began < 3
            for code, message in await asyncio.gather(*calls):
                assert (code, message) == (grpc.StatusCode.UNAVAILABLE,
                                           "the server is shutting down")

    asyncio.run(main())


def test_second_signal_cuts_the_grace_short():
    async def main():
        async with running(FakeEngine(step_seconds=0.1)) as it:
            call = asyncio.ensure_future(status_of(it.answer(**ENDLESS)))
            await asyncio.sleep(0.3)
            force = asyncio.Event()
            drain = asyncio.ensure_future(it.server.drain(60.0, force))
            await asyncio.sleep(0.1)
            force.set()
            assert await asyncio.wait_for(drain, 5)
            assert (await call)[0] is grpc.StatusCode.UNAVAILABLE

    asyncio.run(main())




def test_engine_failure_ends_all_streams_and_flips_health():
    async def main():
        async with running(FakeEngine(fail_at_step=6, step_seconds=0.02)) as it:
            calls = [asyncio.ensure_future(status_of(it.answer(**ENDLESS))) for _ in range(5)]
            for code, message in await asyncio.gather(*calls):
                assert code is grpc.StatusCode.INTERNAL
                assert "the fake device is gone" in message
            await asyncio.wait_for(it.server.failed.wait(), 2)
            for service in ("tpuspec.v1.Generation", "jetstream_proto.Orchestrator",
                            "inference.GRPCInferenceService", ""):
                assert await health(it, service) == "NOT_SERVING"
            code, _ = await status_of(it.answer([10, 3]))
            assert code is grpc.StatusCode.UNAVAILABLE

    asyncio.run(main())


def test_non_finite_logits_fail_one_request_and_no_neighbour():
    async def body(it):
        neighbour = asyncio.ensure_future(it.answer([10, 30]))
        code, message = await status_of(it.answer([NON_FINITE_START, 9], draft_length=0))
        assert code is grpc.StatusCode.INTERNAL and "non-finite logits" in message
        assert (await neighbour).ids == [*range(11, 41), 1]
        assert (await it.until_idle()).failed == 1
        assert (await it.answer([10, 3])).ids == [11, 12, 13, 1]

    on_server(body)


def test_request_that_only_the_engine_refuses_fails_alone():
    async def body(it):
        code, message = await status_of(it.answer([17, 3]))
        assert code is grpc.StatusCode.INTERNAL and "does not like 17" in message
        assert (await it.answer([10, 3])).ids == [11, 12, 13, 1]

    on_server(body)
