"""``tpuspec serve``: flags to configuration to engine to server."""

import argparse
import asyncio
import errno
import socket

from absl import logging

from tpuspec.config import EngineConfig
from tpuspec.profiling import Profiler
from tpuspec.serving import models, request_log, spans
from tpuspec.serving.security import ServerSecurity
from tpuspec.serving.server import Server


def run(args: argparse.Namespace) -> int:
    security = ServerSecurity(
        certificate=args.tls_certificate, key=args.tls_key, client_ca=args.tls_client_ca,
        tokens=args.token_file)
    # Before anything is loaded and compiled, which takes minutes:
    security.check()
    tracer = None if args.profile_dir is None else Profiler(args.profile_dir)
    request_spans = spans.from_environment()
    for port in (args.port, args.metrics_port):
        if port:
            _check_free(args.host, port)
    with models.pair(args.target, args.draft) as pair:
        plain = pair.draft is None and not args.ngram_drafts
        if args.ngram_drafts and pair.draft is not None and args.draft_length is not None:
            raise ValueError("draft_length must be auto for ngram_drafts beside a draft model, "
                             f"got {args.draft_length}")
        config = EngineConfig(
            slots=args.slots, source_buckets=args.source_buckets,
            max_target_length=args.max_target_length,
            draft_lengths=(0,) if plain else args.draft_lengths or _ladder(args.draft_length),
            draft_length=0 if plain else args.draft_length, sampler=args.sampler,
            ngram_drafts=args.ngram_drafts)
        served = models.load(pair, config, dtype=args.dtype, mesh_shape=args.mesh)
    if args.log_json:
        request_log.use_json()
    logging.set_verbosity(logging.INFO)
    logging.info("platform %s, devices: %s", served.info.platform, ", ".join(served.info.devices))
    logging.info("compiling; the port opens when this is done")
    models.warm_up(served.engine)
    return asyncio.run(_serve(served, args, security, tracer, request_spans))


def _ladder(draft_length: int | None) -> tuple[int, ...]:
    """To compile, where none is named: a request that takes fewer drafts runs in the program of
    the next longer length. Only where lengths are chosen, or none is given, are several needed."""
    return (0, draft_length) if draft_length else EngineConfig().draft_lengths


def _check_free(host: str, port: int) -> None:
    """Raises OSError if any of the host's addresses is taken: gRPC would be content with the
    others, and who connects to the taken one would reach another program."""
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                socket.create_server(address[:2], family=family).close()
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    raise
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from None


async def _serve(served: models.Served, args: argparse.Namespace,
                 security: ServerSecurity, tracer: Profiler | None,
                 request_spans: spans.Spans | None) -> int:
    server = Server(served.engine, served.vocabulary, served.info, queue_limit=args.queue_limit,
                    queue_tokens=args.queue_tokens, security=security,
                    reflect=not args.no_reflection,
                    jetstream_truncate=args.jetstream_truncate, tracer=tracer,
                    spans=request_spans)
    if args.metrics_port is not None:
        port = server.metrics.serve(args.host, args.metrics_port)
        logging.info("metrics on http://%s:%d/metrics", args.host, port)
    try:
        return await server.run(
            f"{args.host}:{args.port}", args.grace_seconds,
            lambda port: logging.info("serving on %s:%d", args.host, port))
    finally:
        if request_spans is not None:
            await asyncio.to_thread(request_spans.close)
