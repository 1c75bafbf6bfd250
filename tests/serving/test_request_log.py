"""One line for each request, however it ends, and no text of users in any."""

import asyncio
import json
import logging
import subprocess
import sys

import grpc
import pytest
from absl import logging as absl_logging
from fake_engine import FakeEngine
from harness import on_server, status_of

from tpuspec.protos import jetstream_pb2 as jet
from tpuspec.protos import jetstream_pb2_grpc
from tpuspec.serving.client import make_request
from tpuspec.serving.request_log import JsonFormatter


@pytest.fixture
def lines(caplog):
    """What was logged of requests since the last call, as JSON."""
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.INFO)

    def since() -> list[dict]:
        found = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
        caplog.clear()
        return [line for line in found if line.get("event") == "request"]

    with caplog.at_level(logging.INFO):
        yield since
    absl_logging.set_verbosity(verbosity)


def test_every_end_is_logged_once_with_the_requests_id(lines):
    async def body(it):
        await it.answer([10, 9], request_id="good", label="translate")
        line, = lines()
        assert {name: value for name, value in line.items() if "time" not in name
                and not name.endswith("seconds")} == {
            "severity": "INFO", "event": "request", "request_id": "good", "code": "OK",
            "label": "translate", "finish": "EOS", "source_tokens": 3, "new_tokens": 10,
            "target_runs": 3, "drafted": 9, "accepted": 8}
        assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"]
        assert line["time"].endswith("Z")

        await it.answer([10, 9], request_id="twice", n=2)
        line, = lines()
        assert (line["request_id"], line["code"], line["finish"], line["new_tokens"],
                line["target_runs"]) == ("twice", "OK", "EOS,EOS", 20, 6)

        await status_of(it.answer([10], request_id="bad", top_k=-1))
        line, = lines()
        assert (line["request_id"], line["code"], line["field"]) == (
            "bad", "INVALID_ARGUMENT", "sampling.top_k")

        streams = [it.client.generate(make_request([10], request_id=f"{n}")) for n in range(2)]
        for stream in streams:
            await anext(stream)
        await status_of(it.answer([10], request_id="late"))
        line, = lines()
        assert (line["request_id"], line["code"]) == ("late", "RESOURCE_EXHAUSTED")
        for stream in streams:
            await stream.aclose()
        await it.until_idle()
        first, second = sorted(lines(), key=lambda line: line["request_id"])
        assert first["code"] == second["code"] == "CANCELLED"
        assert first["new_tokens"] >= 4 and second["request_id"] == "1"

        async with grpc.aio.insecure_channel(it.address) as channel:
            content = jet.DecodeRequest.TokenContent(token_ids=[10, 3])
            assert [r async for r in jetstream_pb2_grpc.OrchestratorStub(channel).Decode(
                jet.DecodeRequest(token_content=content))]
        await asyncio.sleep(0.05)
        line, = lines()
        assert line["code"] == "OK" and len(line["request_id"]) == 32  # the server made one

    on_server(body, FakeEngine(step_seconds=0.01), queue_limit=0)


def test_no_text_of_users_is_logged(lines, caplog):
    async def body(it):
        for fields in (dict(), dict(stop=["secret"]), dict(decoder_prompt="secret w77"),
                       dict(top_p=7), dict(stop=["secret", ""]), dict(source="secret " * 100)):
            await status_of(it.answer(**{"source": "secret w500", **fields}))
        said = "\n".join(record.getMessage() + JsonFormatter().format(record)
                         for record in caplog.records)
        assert said.count('"code": "OK"') == 6  # three, in both forms
        assert "secret" not in said and "w50" not in said and "w77" not in said

    on_server(body)


def test_everything_that_is_logged_can_be_json():
    code = """if True:
        from absl import app, logging
        from tpuspec.serving import request_log

        def main(_):
            request_log.use_json()
            logging.error('it is %d\\n"o clock"', 5)
            try:
                1 / 0
            except ZeroDivisionError:
                logging.exception("failed")

        app.run(main)
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first, second = (json.loads(line) for line in result.stderr.splitlines())
    assert first.pop("time") and first == {"severity": "ERROR", "message": 'it is 5\n"o clock"'}
    assert second["message"] == "failed" and "ZeroDivisionError" in second["exception"]
