"""google.rpc details of refusals, read off the wire and through the shipped clients."""

import asyncio
import re

import grpc
import pytest
from fake_engine import FakeEngine
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from harness import field_of, on_server

from tpuspec.serving.client import BlockingClient, ErrorDetails, error_details, make_request
from tpuspec.serving.errors import ErrorCode, RequestError


async def error_of(it, **fields) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await it.answer(**{"source": [10, 3], **fields})
    return caught.value


def test_refused_field_travels_as_a_violation_of_bad_request():
    async def body(it):
        for fields, name in ((dict(temperature=-1), "sampling.temperature"),
                             (dict(source=[5, 9, 2000]), "token_ids[2]"),
                             (dict(source=[5] * 64), "token_ids"),
                             (dict(logit_bias={2000: 1}), "sampling.logit_bias"),
                             (dict(stop=["a", ""]), "stop[1]"),
                             (dict(max_new_tokens=101), "max_new_tokens")):
            error = await error_of(it, **fields)
            wire = dict(tuple(error.trailing_metadata()))["grpc-status-details-bin"]
            status = status_pb2.Status.FromString(wire)
            assert (status.code, status.message) == (3, error.details())
            detail, = status.details
            violations = error_details_pb2.BadRequest.FromString(detail.value).field_violations
            assert detail.type_url == "type.googleapis.com/google.rpc.BadRequest"
            assert [(v.field, v.description) for v in violations] == [(name, error.details())]
            violation, = error_details(error).violations
            assert violation.field == name and error_details(error).retry_after is None
        error = await error_of(it, source=[17, 3])  # refused by the engine: nobody's field
        assert error.code() is grpc.StatusCode.INTERNAL
        assert error_details(error) == ErrorDetails()

    on_server(body)


def test_full_queue_says_when_a_place_should_be_free():
    async def body(it):
        running = [it.client.generate(make_request([10])) for _ in range(2)]
        for stream in running:
            await anext(stream)
        error = await error_of(it)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        wire = dict(tuple(error.trailing_metadata()))["grpc-status-details-bin"]
        detail, = status_pb2.Status.FromString(wire).details
        retry = error_details_pb2.RetryInfo.FromString(detail.value)
        # Before any request has ended: a second for each, over two slots.
        assert retry.retry_delay == duration_pb2.Duration(nanos=500_000_000)
        assert error_details(error) == ErrorDetails(retry_after=0.5)
        for stream in running:
            await stream.aclose()
        await it.until_idle()
        for _ in range(20):  # requests of about 0.1 s
            await it.answer([10], max_new_tokens=5, draft_length=0)
        streams = [it.client.generate(make_request([10])) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        assert 0.03 < error_details(await error_of(it)).retry_after < 0.4
        for stream in streams:
            await stream.aclose()

    on_server(body, FakeEngine(step_seconds=0.02), queue_limit=0)


def test_blocking_client_has_the_same_details():
    async def body(it):
        def ask() -> ErrorDetails:
            with BlockingClient(it.address) as client, pytest.raises(grpc.RpcError) as caught:
                list(client.generate([10], top_k=-1))
            return error_details(caught.value)

        violation, = (await asyncio.to_thread(ask)).violations
        assert violation.field == "sampling.top_k"
        assert re.fullmatch(r"sampling\.top_k must be in .*, got -1", violation.description)

    on_server(body)


def test_errors_under_other_names():
    error = RequestError(ErrorCode.INVALID_ARGUMENT, "token_ids[3] must be 4, got token_ids",
                         field="token_ids[3]")
    renamed = error.renamed({"token_ids": "content.ids"})
    assert (renamed.field, str(renamed)) == (
        "content.ids[3]", "content.ids[3] must be 4, got token_ids")
    assert error.renamed({}).field == "token_ids[3]"
    assert str(RequestError(ErrorCode.INTERNAL, "text").renamed({"text": "a"})) == "text"


def test_paths_are_checked_against_the_proto():
    assert field_of("sampling.logit_bias[3]").name == "logit_bias"
    for path in ("sampling.top", "text.a", "Stop"):
        with pytest.raises((LookupError, AttributeError)):
            field_of(path)


def test_fields_that_the_server_does_not_have_are_refused_by_number():
    # GenerateRequest.text = 2 "a", then field 99, or Sampling = 4 with field 50
    text, unknown = bytes([0x12, 1, 97]), bytes([0x98, 0x06, 1])
    in_sampling = bytes([0x22, 3, 0x90, 0x03, 1])

    async def body(it):
        async with grpc.aio.insecure_channel(it.address) as channel:
            generate = channel.unary_stream("/tpuspec.v1.Generation/Generate")
            for more, field in ((unknown, "99"), (in_sampling, "sampling.50")):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await anext(aiter(generate(text + more)))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert error_details(caught.value).violations[0].field == field
            assert await anext(aiter(generate(text)))

    on_server(body)
