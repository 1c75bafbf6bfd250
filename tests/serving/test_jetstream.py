"""JetStream's dialect: its wire byte by byte, and what its clients rely on."""

import asyncio

import grpc
import pytest
from fake_engine import FakeEngine
from harness import health, on_server, running

from tpuspec.protos import generation_pb2 as pb
from tpuspec.protos import jetstream_pb2 as jet
from tpuspec.protos import jetstream_pb2_grpc
from tpuspec.serving import named_options
from tpuspec.serving.client import error_details

DECODE = "/jetstream_proto.Orchestrator/Decode"


async def decode(it, metadata=(), **fields) -> list[jet.DecodeResponse.StreamContent.Sample]:
    """The one sample of every message, by a channel of its own as JetStream's benchmark does."""
    if "text" in fields:
        fields["text_content"] = jet.DecodeRequest.TextContent(text=fields.pop("text"))
    if "ids" in fields:
        fields["token_content"] = jet.DecodeRequest.TokenContent(token_ids=fields.pop("ids"))
    async with grpc.aio.insecure_channel(
            it.address, options=[("grpc.keepalive_timeout_ms", 10_000)]) as channel:
        call = jetstream_pb2_grpc.OrchestratorStub(channel).Decode(
            jet.DecodeRequest(metadata=jet.DecodeRequest.Metadata(start_time=1.5), **fields),
            metadata=metadata, timeout=20)
        samples = []
        async for response in call:
            sample, = response.stream_content.samples  # always one, and never InitialContent
            assert len(sample.token_ids) >= 1
            samples.append(sample)
        return samples


def ids(samples) -> list[int]:
    return [i for sample in samples for i in sample.token_ids]


async def refusal(it, metadata=(), **fields) -> tuple[str, str]:
    """Field and description of the violation."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await decode(it, metadata, **fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    violation, = error_details(caught.value).violations
    assert violation.description == caught.value.details()
    return violation.field, violation.description


def test_the_wire_is_jetstreams_byte_by_byte():
    # max_tokens = 4, text_content = 5 {text = 1}, metadata = 7 {start_time = 1}, num_samples = 8
    request = bytes([0x20, 3, 0x2a, 6, 0x0a, 4, *b"zero", 0x3a, 5, 0x0d, 0, 0, 0xc0, 0x3f, 0x40, 1])
    # stream_content = 3 {samples = 1 {text = 1, token_ids = 2 packed}}
    sample = bytes([0x0a, 13, *b"one two three", 0x12, 3, 31, 32, 33])
    content = bytes([0x0a, len(sample)]) + sample
    # token_content = 6 {token_ids = 1 packed}, has_bos = 10
    with_ids = bytes([0x20, 2, 0x32, 5, 0x0a, 3, 99, 10, 5, 0x50, 1])

    async def body(it):
        async with grpc.aio.insecure_channel(it.address) as channel:
            call = channel.unary_stream(DECODE)
            assert [m async for m in call(request)] == [bytes([0x1a, len(content)]) + content]
            assert [m async for m in call(with_ids)] == [
                bytes([0x1a, 6, 0x0a, 4, 0x12, 2, 11, 12])]
            health_check = channel.unary_unary("/jetstream_proto.Orchestrator/HealthCheck")
            assert await health_check(b"") == bytes([0x08, 1])

    on_server(body)


def test_text_gives_text_and_ids_and_ids_give_ids_alone():
    async def body(it):
        samples = await decode(it, text="zero", max_tokens=6)
        assert ids(samples) == [31, 32, 33, 34, 35, 36]
        assert [len(sample.token_ids) for sample in samples] == [4, 2]  # as they were verified
        assert "".join(s.text for s in samples) == "one two three four five six"
        samples = await decode(it, ids=[10, 9])
        assert ids(samples) == [*range(11, 20), 1]  # the end id is among the ids
        assert all(sample.text == "" for sample in samples)
        assert ids(await decode(it, ids=[10, 9, 1], num_samples=1)) == [*range(11, 20), 1]

    on_server(body)


def test_every_stream_has_a_message_and_exactly_the_tokens_asked_for():
    async def body(it):
        assert ids(await decode(it, ids=[10, 0])) == [1]  # nothing but the end
        for most in (1, 3, 4, 5, 100):
            assert ids(await decode(it, ids=[10], max_tokens=most)) == [
                *range(11, 11 + most)]
        assert len(ids(await decode(it, ids=[10], max_tokens=0))) == 100  # the server's limit
        assert ids(await decode(it, text="")) == [*range(2, 102)]

    on_server(body)


def test_samples_have_their_places_in_every_message():
    async def body(it):
        own = await it.answer([10], n=2, temperature=0.5, seed=7, max_new_tokens=6)
        expected = [[token.id for r in own.responses if r.index == index for token in r.tokens]
                    for index in range(2)]
        metadata = (("x-tpuspec-temperature", "0.5"), ("x-tpuspec-seed", "7"))
        content = jet.DecodeRequest.TokenContent(token_ids=[10])
        async with grpc.aio.insecure_channel(it.address) as channel:
            call = jetstream_pb2_grpc.OrchestratorStub(channel).Decode(jet.DecodeRequest(
                token_content=content, max_tokens=6, num_samples=2), metadata=metadata)
            outputs: list[list[int]] = [[], []]
            async for response in call:  # as JetStream's requester reads them
                samples = response.stream_content.samples
                assert len(samples) == 2 and sum(bool(s.token_ids) for s in samples) == 1
                for index, sample in enumerate(samples):
                    outputs[index] += sample.token_ids
        assert outputs == expected and expected[0] != expected[1]

    on_server(body)


def test_what_this_server_does_not_have_is_refused_by_name():
    async def body(it):
        for fields, expected in (
                (dict(num_samples=3), ("num_samples", "must be in [1, 2], got 3")),
                (dict(num_samples=-1), ("num_samples", "must be in [1, 2], got -1")),
                (dict(lora_adapter_id="a"), ("lora_adapter_id", "must be empty: this server")),
                (dict(max_tokens=-1), ("max_tokens", r"must be in [1, 100], got -1")),
                (dict(max_tokens=101), ("max_tokens", r"must be in [1, 100], got 101")),
                (dict(ids=[]), ("token_content.token_ids", "must have at least 1 id, got 0")),
                (dict(ids=[7], has_bos=True), ("token_content.token_ids", "must have at least 1")),
                (dict(ids=[5, 2000]), ("token_content.token_ids[1]", "must be in [0, 1999]")),
                (dict(ids=[5] * 64), ("token_content.token_ids", "must have at most 64 tokens")),
                (dict(text="a", has_bos=True), ("has_bos", "must be false with text_content"))):
            fields = {"ids": [10, 3]} | fields if "text" not in fields else fields
            field, description = await refusal(it, **fields)
            assert field == expected[0] and description.startswith(" ".join(expected)), description
        assert (await refusal(it))[0] == "content"
        async with grpc.aio.insecure_channel(it.address) as channel:
            for old in ([0x0a, 1, 65], [0x58, 1]):  # fields 1 and 11
                call = channel.unary_stream(DECODE)(bytes([0x2a, 3, 0x0a, 1, 65, *old]))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await anext(aiter(call))
                number = str(old[0] >> 3)
                assert error_details(caught.value).violations[0].field == number

    on_server(body)


def test_options_come_as_metadata():
    async def body(it):
        own = await it.answer([10], temperature=0.5, seed=7, max_new_tokens=12)
        samples = await decode(it, (("x-tpuspec-temperature", "0.5"), ("x-tpuspec-seed", "7"),
                                    ("x-other", "a")), ids=[10], max_tokens=12)
        assert ids(samples) == own.ids != [*range(11, 23)]
        stopped = await decode(it, (("x-tpuspec-stop", '["nine", "three"]'),
                                    ("x-tpuspec-draft_length", "0")), text="zero")
        assert "".join(s.text for s in stopped) == "one two "
        assert len(stopped) == 3
        for key, value, message in (
                ("top_p", "1.5", "must be in (0, 1], got 1.5"),
                ("temperature", "warm", "must be a number, got 'warm'"),
                ("ignore_eos", "1", "must be true or false, got '1'"),
                ("seed", "-1", "must be an integer of its size, got '-1'"),
                ("colour", "red", "is not an option of this server"),
                ("text", "red", "is not an option of this server"),
                ("eos_ids", "[2000]", "must be in [0, 1999], got 2000"),
                ("lenience", "0.5", "is not an option: these replies cannot say that they are "
                 "not exact"),
                ("max_new_tokens", "5", "is not an option: max_tokens is")):
            field, description = await refusal(it, ((f"x-tpuspec-{key}", value),), ids=[10, 3])
            assert field.partition("[")[0] == f"x-tpuspec-{key}"
            assert description == f"{field} {message}"
        field, _ = await refusal(it, (("x-tpuspec-" + "a" * 4000, "1"),), ids=[10, 3])
        assert field == "metadata"

    on_server(body)


def test_what_is_too_long_can_be_cut_for_the_benchmark():
    async def body(it):
        many = [10, 5, *[7] * 100]
        expected = [*range(11, 16), 1]
        assert ids(await decode(it, ids=many, max_tokens=1000)) == expected
        assert ids(await decode(it, ids=[10, 5, *[7] * 61, 1])) == expected  # 64: as it is
        assert ids(await decode(it, ids=[99, *many], has_bos=True)) == expected
        assert (await refusal(it, text="one " * 64))[0] == "text_content.text"

    on_server(body, jetstream_truncate=True)


def test_an_engine_sees_the_cut_source_with_its_end():
    seen = []

    class Watched(FakeEngine):
        def insert(self, slot, source, **options):
            seen.append(tuple(source))
            super().insert(slot, source, **options)

    async def body(it):
        for count in (62, 63, 64, 65):
            await decode(it, ids=[10, 2, *[7] * (count - 2)])
        await decode(it, ids=[10, 2, *[7] * 61, 1])
        assert seen == [(10, 2, *[7] * 60, 1), *[(10, 2, *[7] * 61, 1)] * 4]

    on_server(body, Watched(), jetstream_truncate=True)


def test_cancelled_stream_frees_its_slot_and_drain_flips_health():
    async def main():
        async with running(FakeEngine(step_seconds=0.02)) as it, \
                grpc.aio.insecure_channel(it.address) as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            content = jet.DecodeRequest.TokenContent(token_ids=[10])
            calls = [stub.Decode(jet.DecodeRequest(token_content=content)) for _ in range(2)]
            streams = [aiter(call) for call in calls]
            for stream in streams:
                await anext(stream)
            calls[0].cancel()
            assert ids(await decode(it, ids=[50, 0])) == [1]
            assert (await health(it, "jetstream_proto.Orchestrator")) == "SERVING"
            drain = asyncio.ensure_future(it.server.drain(5.0))
            await asyncio.sleep(0.05)
            assert not (await stub.HealthCheck(jet.HealthCheckRequest())).is_live
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await decode(it, ids=[10])
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            rest = [i async for response in streams[1]
                    for i in response.stream_content.samples[0].token_ids]
            assert rest[-1] == 110 and await drain

    asyncio.run(main())


def test_options_by_name_are_of_their_fields_kind():
    request = pb.GenerateRequest()
    for name, value in (("temperature", 1), ("top_k", 5), ("logit_bias", '{"5": 1.5}'),
                        ("banned_ids", "[1, 2]"), ("stop", "a"), ("label", "5")):
        named_options.set_option(request, name, value)
    assert request == pb.GenerateRequest(stop=["a"], label="5", sampling=pb.Sampling(
        temperature=1.0, top_k=5, logit_bias={5: 1.5}, banned_ids=[1, 2]))
    for name, value in (("top_k", True), ("temperature", False), ("top_k", 1.5), ("stop", "[a"),
                        ("top_k", 2**31), ("label", 5), ("logit_bias", "[1]"),
                        ("banned_ids", "5"), ("sampling", "{}"), ("request_id", "a")):
        with pytest.raises(ValueError, match=f"^{name} (must be|is not an option)"):
            named_options.set_option(request, name, value)
