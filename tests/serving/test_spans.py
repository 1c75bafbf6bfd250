"""OpenTelemetry: one span a request, in the caller's trace, without any of its text."""

import asyncio
import concurrent.futures
import contextlib
import pathlib
import subprocess
import sys

import grpc
import pytest
from fake_engine import FakeEngine
from harness import on_server, run_cli, status_of
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from tpuspec.protos import (
    generation_pb2_grpc,
    jetstream_pb2_grpc,
    open_inference_pb2_grpc,
)
from tpuspec.protos import jetstream_pb2 as jet
from tpuspec.protos import open_inference_pb2 as oip
from tpuspec.serving import spans
from tpuspec.serving.client import make_request

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = ("traceparent", f"00-{TRACE}-{PARENT}-01")


class Seen:
    """Spans of a server, and what that server is to be told."""

    def __init__(self):
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.options = {"spans": spans.Spans(provider)}

    def since(self):
        found = self._exporter.get_finished_spans()
        self._exporter.clear()
        return found

    async def one(self):
        async with asyncio.timeout(5):  # a client may know the end before the server's task ends
            while not (found := self.since()):
                await asyncio.sleep(0.01)
        span, = found
        return span


def test_a_span_has_times_and_counts_and_no_text():
    seen = Seen()

    async def body(it):
        await it.answer("zero one two", max_new_tokens=10, request_id="r1", label="translate",
                        stop=["twenty"], decoder_prompt="seven")
        span = await seen.one()
        assert (span.name, span.kind, span.parent) == ("tpuspec.generate", SpanKind.SERVER, None)
        assert span.status.is_unset
        counts = {name: value for name, value in span.attributes.items() if "seconds" not in name}
        assert counts == {
            "rpc.system": "grpc", "tpuspec.request_id": "r1", "tpuspec.code": "OK",
            "tpuspec.label": "translate", "tpuspec.finish": "LENGTH", "tpuspec.source_tokens": 4,
            "tpuspec.new_tokens": 10, "tpuspec.target_runs": 3, "tpuspec.drafted": 8,
            "tpuspec.accepted": 8}
        queue, first, end = span.events
        assert [event.name for event in span.events] == ["queue", "first_token", "end"]
        assert span.start_time <= queue.timestamp <= first.timestamp <= end.timestamp
        assert end.timestamp <= span.end_time
        assert end.attributes["tpuspec.new_tokens"] == 10
        said = span.to_json()
        assert not [word for word in ("zero", "twenty", "seven") if word in said]

    on_server(body, FakeEngine(step_seconds=0.01), **seen.options)


def test_a_span_belongs_to_the_callers_trace_in_every_dialect():
    seen = Seen()

    async def body(it):
        async with grpc.aio.insecure_channel(it.address) as channel:
            ours = generation_pb2_grpc.GenerationStub(channel).Generate
            jetstream = jetstream_pb2_grpc.OrchestratorStub(channel).Decode
            asked = jet.DecodeRequest(
                token_content=jet.DecodeRequest.TokenContent(token_ids=[10, 3]))
            triton = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer
            tensor = oip.ModelInferRequest.InferInputTensor(
                name="input_ids", datatype="INT32", shape=[2],
                contents=oip.InferTensorContents(int_contents=[10, 3]))
            inferred = [oip.ModelInferRequest(model_name="count", inputs=[tensor])]
            for call, request in ((ours, make_request([10, 3])), (jetstream, asked),
                                  (triton, inferred)):
                for metadata, parent in (
                        ([TRACEPARENT], PARENT), ([("traceparent", "nonsense")], None),
                        ([("traceparent-bin", b"\xff")], None)):
                    sent = iter(request) if isinstance(request, list) else request
                    [_ async for _ in call(sent, metadata=metadata)]
                    span = await seen.one()
                    if parent is None:
                        assert span.parent is None
                    else:
                        assert f"{span.context.trace_id:032x}" == TRACE
                        assert f"{span.parent.span_id:016x}" == parent

    on_server(body, **seen.options)


def test_every_end_makes_one_span():
    seen = Seen()

    async def body(it):
        await status_of(it.answer([10], top_k=-1))
        span = await seen.one()
        assert span.attributes["tpuspec.code"] == "INVALID_ARGUMENT" and span.status.is_unset
        assert span.attributes["tpuspec.field"] == "sampling.top_k"
        assert [event.name for event in span.events] == ["end"]

        await status_of(it.answer([13, 9]))  # non-finite logits
        span = await seen.one()
        assert (span.attributes["tpuspec.code"], span.status.description) == (
            "INTERNAL", "INTERNAL") and not span.status.is_ok

        stream = it.client.generate(make_request([10]))
        await anext(stream)
        await stream.aclose()
        span = await seen.one()
        assert span.attributes["tpuspec.code"] == "CANCELLED" and span.status.is_unset
        assert [event.name for event in span.events] == ["first_token", "end"]

        await it.answer([10, 9], n=2)
        assert (await seen.one()).attributes["tpuspec.new_tokens"] == 20

    on_server(body, FakeEngine(step_seconds=0.05), **seen.options)


# ---- the environment -------------------------------------------------------------


@contextlib.contextmanager
def collector():
    """A collector of the OTLP protocol: its address, and what came."""
    came = []

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):
            came.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
        port = server.add_insecure_port("localhost:0")
        server.start()
        yield f"http://localhost:{port}", came
        server.stop(None).wait()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
                 "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
                 "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("given, name", [(None, "tpuspec"), ("translator", "translator")])
def test_the_standard_environment_turns_spans_on(monkeypatch, given, name):
    with collector() as (endpoint, came):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        if given is not None:
            monkeypatch.setenv("OTEL_SERVICE_NAME", given)
        found = spans.from_environment()

        async def body(it):
            await it.answer([10, 3])

        on_server(body, spans=found)
        found.close()
        request, = came
    resource, = request.resource_spans
    service, = (pair.value.string_value for pair in resource.resource.attributes
                if pair.key == "service.name")
    assert service == name
    assert [span.name for span in resource.scope_spans[0].spans] == ["tpuspec.generate"]


@pytest.mark.parametrize("environment", [
    {}, {"OTEL_SERVICE_NAME": "x"}, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317", "OTEL_SDK_DISABLED": "true"},
    {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317", "OTEL_TRACES_EXPORTER": "none"}])
def test_spans_are_off_unless_they_are_asked_for(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert spans.from_environment() is None


def test_what_cannot_be_had_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://localhost:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(ValueError, match="PROTOCOL must be grpc, got http/protobuf"):
        spans.from_environment()
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    with pytest.raises(ValueError, match="OTEL_TRACES_EXPORTER must be otlp or none, got console"):
        spans.from_environment()
    monkeypatch.delenv("OTEL_TRACES_EXPORTER")
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(ValueError, match=r"TRACES_ENDPOINT is set, but .*tpuspec\[otel\]"):
        spans.from_environment()
    result = run_cli("serve", "--target", "nothing_here", "--port", "0")
    assert result.returncode == 1 and "nothing_here" in result.stderr  # spans did not stop it


def test_a_server_does_without_the_package():
    names = [path for path in pathlib.Path(spans.__file__).parent.glob("*.py")
             if "import opentelemetry" in (text := path.read_text())
             or "from opentelemetry" in text]
    assert [path.name for path in names] == ["spans.py"]
    code = ("import sys; sys.modules['opentelemetry'] = None\n"
            "import tpuspec.serving.server, tpuspec.serving.spans as spans\n"
            "assert spans.from_environment() is None")
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)
