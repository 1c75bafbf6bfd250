"""OpenTelemetry spans, one for each request, for whoever installs and asks for them.

On where the package is installed (``pip install '.[otel]'``) and OpenTelemetry's own
environment names a collector; its other variables (headers, certificates, sampler, service
name) hold as they do everywhere.
"""

import os
from collections.abc import Iterable
from typing import Any

from absl import logging

from tpuspec.serving.request_log import RequestLog

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# Statuses that are a fault of the server's side, by OpenTelemetry's conventions for gRPC.
_FAULTS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE"}


class Spans:
    """Makes spans of what the log has of requests: ids, counts and times, none of their text.

    Args:
      provider: an ``opentelemetry.sdk.trace.TracerProvider``.
    """

    def __init__(self, provider: Any):
        from opentelemetry.trace.propagation import tracecontext

        self._provider = provider
        self._tracer = provider.get_tracer("tpuspec")
        self._propagator = tracecontext.TraceContextTextMapPropagator()

    def record(self, metadata: Iterable[tuple[str, str | bytes]], log: RequestLog,
               fields: dict[str, Any]) -> None:
        """A request that has ended.

        Args:
          metadata: of the call; ``traceparent`` says whose child the span is.
          log: of the request.
          fields: of the log's line.
        """
        from opentelemetry import trace

        context = self._propagator.extract(
            {str(key): value for key, value in metadata if isinstance(value, str)})
        counts = {f"tpuspec.{name}": value for name, value in fields.items()}
        span = self._tracer.start_span(
            "tpuspec.generate", context, kind=trace.SpanKind.SERVER, start_time=log.began,
            attributes=counts | {"rpc.system": "grpc"})
        if "queue_seconds" in fields:
            span.add_event("queue", timestamp=log.began + round(1e9 * fields["queue_seconds"]))
        if log.first is not None:
            span.add_event("first_token", timestamp=log.first)
        span.add_event("end", {name: value for name, value in counts.items() if isinstance(
            value, int)})
        if fields["code"] in _FAULTS:
            span.set_status(trace.Status(trace.StatusCode.ERROR, fields["code"]))
        span.end()

    def close(self) -> None:
        """Sends what is left; takes about 10 s where the collector does not answer."""
        self._provider.shutdown()


def from_environment() -> Spans | None:
    """None where no collector is named, or spans are turned off.

    Raises:
      ValueError: the environment asks for spans that cannot be had.
    """
    environment = os.environ
    endpoint = next((name for name in _ENDPOINTS if environment.get(name)), None)
    exporter = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    if (endpoint is None or exporter == "none"
            or environment.get("OTEL_SDK_DISABLED", "").lower() == "true"):
        return None
    if exporter != "otlp":
        raise ValueError(f"OTEL_TRACES_EXPORTER must be otlp or none, got {exporter}")
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "grpc")
    if protocol != "grpc":
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL must be grpc, got {protocol}")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ValueError(f"{endpoint} is set, but OpenTelemetry is not installed: "
                         "pip install 'tpuspec[otel]', or unset it") from None
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "tpuspec"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    logging.info("a span of every request goes to %s", environment[endpoint])
    return Spans(provider)
