"""Prometheus metrics of a server: counters of speculation, load and latencies.

The four counters that vLLM exports of speculative decoding have its names and meanings,
so that dashboards and benchmarks made for it read this server; the others are our own.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from tpuspec.measurement import SpeculationStats
from tpuspec.serving import messages
from tpuspec.serving.engine_loop import EngineLoop
from tpuspec.serving.request import Request, TokenChunk

HTTP_SECONDS = 10.0  # that a connection may say nothing
MOST_LABELS = 32  # of requests, that have series of their own; the others are "other"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1)


class Collector(Protocol):
    """What a registry asks when it is scraped."""

    def collect(self) -> Iterator[Metric]: ...


class Metrics:
    """Counts what a loop does; ``observe`` is called by the loop's thread, once a step and
    request, and a scrape reads without holding it up.

    Args:
      loop: whose load and counters are exported.
      name: of the model, label ``model_name`` of the counters named as vLLM's.
    """

    def __init__(self, loop: EngineLoop, name: str):
        self.registry = CollectorRegistry()
        self._loop = loop
        self._name = name
        self._drafts = 0
        self._per_position = [0] * loop.engine.config.max_draft_length
        self._by_label: dict[str, SpeculationStats] = {}
        self._plain_seconds = self._decode_seconds = 0.0

        def histogram(what: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"tpuspec_{what}_seconds", text, ("label",), buckets=buckets,
                             registry=self.registry)

        self._queue = histogram("queue", "From acceptance to a free slot.")
        self._first = histogram("time_to_first_token", "From acceptance to the first token.")
        self._token = histogram("time_per_output_token",
                                "Decoding after the first tokens, for each token of a request.",
                                _TOKEN_SECONDS)
        self._total = histogram("request", "From acceptance to the last token.")
        self.registry.register(self)

    def serve(self, host: str, port: int) -> int:
        """Opens the port, on a thread of its own, and returns its number.

        Raises:
          OSError: the address cannot be bound.
        """
        try:
            server, _ = start_http_server(port, host, self.registry)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port} for metrics: {error}") from None
        app, handler = server.get_app(), server.RequestHandlerClass
        assert app is not None
        server.set_app(_whatever_is_accepted(app))
        server.RequestHandlerClass = _impatient(handler)
        return int(server.server_port)

    def observe(self, request: Request, chunk: TokenChunk) -> None:
        """One step of one request."""
        steps = chunk.steps
        if steps.drafted:
            self._drafts += 1
        for position in range(steps.accepted):
            self._per_position[position] += 1
        label = request.label
        if label not in self._by_label and len(self._by_label) >= MOST_LABELS:
            label = "other"
        self._by_label[label] = self._by_label.get(label, SpeculationStats()) + steps
        if chunk.finish is None:
            return
        timings = chunk.finish.timings
        self._queue.labels(label).observe(timings.queue)
        self._first.labels(label).observe(timings.first_token)
        self._total.labels(label).observe(timings.total)
        if tokens := chunk.finish.decode_tokens:
            self._token.labels(label).observe(timings.decode / tokens)
            cost = self._loop.engine.cost
            if cost is not None and request.draft_length != 0:
                self._plain_seconds += 1e-3 * cost.step_ms[0] * tokens
                self._decode_seconds += timings.decode

    def collect(self) -> Iterator[Metric]:
        yield from self._as_vllm()
        yield from self._speculation()
        yield from self._load()

    def _as_vllm(self) -> Iterator[Metric]:
        stats, labels = self._loop.stats, ("model_name", "engine")
        for what, text, value in (
                ("drafts", "Steps with drafts, counted for each request.", self._drafts),
                ("draft_tokens", "Draft tokens.", stats.drafted),
                ("accepted_tokens", "Accepted draft tokens.", stats.accepted)):
            family = CounterMetricFamily(f"vllm:spec_decode_num_{what}", text, labels=labels)
            family.add_metric((self._name, "0"), value)
            yield family
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in the block.", labels=(*labels, "position"))
        for position, count in enumerate(self._per_position):
            family.add_metric((self._name, "0", str(position)), count)
        yield family

    def _speculation(self) -> Iterator[Metric]:
        stats, cost, config = self._loop.stats, self._loop.engine.cost, self._loop.engine.config
        counters = {"target_runs": "steps", "generated_tokens": "emitted",
                    "examined_draft_tokens": "examined", "accepted_draft_tokens": "accepted"}
        for what, field in counters.items():
            family = CounterMetricFamily(
                f"tpuspec_{what}", f"SpeculationStats.{field}, by the requests' label.",
                labels=("label",))
            for label, by_label in list(self._by_label.items()):
                family.add_metric((label,), getattr(by_label, field))
            yield family
        predicted = messages.predicted_speedup(stats.alpha, config.draft_length, cost, config)
        observed = self._plain_seconds / self._decode_seconds if self._decode_seconds else None
        for what, text, value in (
                ("alpha", "Accepted over examined drafts: the paper's acceptance rate.",
                 stats.alpha),
                ("cost_coefficient", "c: draft pass over target pass, measured at warm-up.",
                 None if cost is None else cost.c),
                ("tokens_per_target_run", "Tokens over target runs.",
                 stats.tokens_per_target_run),
                ("predicted_speedup", "Eq. (5) for the default draft length.", predicted),
                ("observed_speedup", "Time of as many plain steps, by warm-up, over the time "
                 "of decoding, of finished requests with drafts.", observed)):
            if value is not None:
                yield GaugeMetricFamily(f"tpuspec_{what}", text, value=value)

    def _load(self) -> Iterator[Metric]:
        load, engine = self._loop.load, self._loop.engine
        family = CounterMetricFamily("tpuspec_requests", "Requests, by what became of them; "
                                     "accepted ones end in one of the others.",
                                     labels=("outcome",))
        for outcome in ("accepted", "refused", "finished", "cancelled", "failed"):
            family.add_metric((outcome,), getattr(load, outcome))
        yield family
        for what, text, value in (
                ("slots", "Requests that can run at once.", engine.config.slots),
                ("active_slots", "Requests that run.", load.active_slots),
                ("queued_requests", "Requests that wait.", load.queued),
                ("queued_tokens", "Tokens that these may take.", load.queued_tokens),
                ("queue_limit", "Requests that may wait.", self._loop.queue_limit)):
            yield GaugeMetricFamily(f"tpuspec_{what}", text, value=value)
        yield CounterMetricFamily("tpuspec_compilations", "XLA compilations of this process; "
                                  "constant once it serves.", value=engine.compilations)


def _impatient(handler: Any) -> Any:
    """A handler that ends connections which say nothing, each of which holds a thread."""
    class Handler(handler):
        timeout = HTTP_SECONDS

        def handle(self) -> None:
            with contextlib.suppress(TimeoutError, ConnectionError):
                super().handle()

    return Handler


def _whatever_is_accepted(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """An application that answers ``Accept`` headers in which a version is no number, too: in
    the plain format, as where nothing is asked for."""
    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        try:
            choose_encoder(environ.get("HTTP_ACCEPT", ""))
        except (TypeError, ValueError):
            environ = environ | {"HTTP_ACCEPT": ""}
        return app(environ, start_response)

    return answer
