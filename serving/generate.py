"""``tpuspec generate``: texts or a JSONL file to texts or JSONL, in process or with a server."""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving.client import OPTIONS, Client, make_request
from tpuspec.serving.records import Failure, Row, by_sample, read_rows, record
from tpuspec.serving.security import ClientSecurity, read_token

_MOST_TRIES = 100  # when the server is busy

Responses = Callable[[pb.GenerateRequest], AsyncIterator[pb.GenerateResponse]]


def run(args: argparse.Namespace) -> int:
    rows = list(_rows(args))
    if args.server is not None:
        return asyncio.run(_with_server(args, rows))
    return asyncio.run(_in_process(args, rows))


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    """Raises ValueError if the sources come from more than one place, or from none."""
    if args.logprobs is not None and not args.json:
        raise ValueError("logprobs must be asked for with --json: they are not text")
    defaults: Mapping[str, Any] = {
        name: getattr(args, name) for name in (
            *OPTIONS, "seed", "max_new_tokens", "draft_length", "priority", "label")}
    if args.input is not None:
        if args.text:
            raise ValueError("text must be empty with --input")
        with open(args.input, "rb") as lines:
            yield from read_rows(lines, defaults)
        return
    if not args.text and sys.stdin.isatty():
        raise ValueError("text must be given: as arguments, lines of standard input or --input")
    texts = args.text or (line.rstrip("\r\n") for line in sys.stdin)
    for number, text in enumerate(texts):
        yield Row(str(number), make_request(text, **defaults))


async def _with_server(args: argparse.Namespace, rows: Sequence[Row]) -> int:
    async with Client(args.server, client_security(args)) as client:
        try:
            limits = (await client.get_model()).limits
        except grpc.aio.AioRpcError as error:
            hint = "" if args.tls or args.tls_ca else "; --tls or --tls_ca, if the server has TLS"
            raise ValueError(f"no answer from {args.server}: {error.code().name}: "
                             f"{error.details()}{hint}") from None

        def respond(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
            return client.generate(request, timeout=args.timeout)

        return await _generate(rows, respond, places=2 * limits.slots, as_json=args.json)


def client_security(args: argparse.Namespace) -> ClientSecurity:
    """Of the flags. Raises ValueError on those that do not go together."""
    return ClientSecurity(
        tls=args.tls or args.tls_ca is not None, ca=args.tls_ca, certificate=args.tls_certificate,
        key=args.tls_key, token=None if args.token_file is None else read_token(args.token_file))


async def _in_process(args: argparse.Namespace, rows: Sequence[Row]) -> int:
    from tpuspec.serving import local  # with JAX, which a client does without

    requests = [row.request for row in rows if isinstance(row.request, pb.GenerateRequest)]
    with local.session(args, requests) as service:

        def respond(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
            return service.generate(request, timeout=args.timeout)

        return await _generate(rows, respond, places=2 * local.SLOTS, as_json=args.json)


async def _generate(rows: Sequence[Row], respond: Responses, *, places: int,
                    as_json: bool) -> int:
    """Answers in the order of the rows; the exit code is 1 if one failed.

    Args:
      places: samples asked for at once, beside those of one row.
    """
    largest = max((_samples(row) for row in rows), default=1)
    if len(rows) == largest == 1 and not as_json:
        return await _stream(rows[0], respond)
    concurrency = asyncio.Semaphore(max(1, places // largest))

    async def answer(row: Row) -> list[pb.GenerateResponse] | Failure:
        async with concurrency:
            return await _answer(row, respond)

    tasks = [asyncio.ensure_future(answer(row)) for row in rows]
    failed = False
    try:
        for row, task in zip(rows, tasks, strict=True):
            result = await task
            failed |= isinstance(result, Failure)
            _print(row, result, as_json=as_json)
    finally:
        for task in tasks:
            task.cancel()
    return int(failed)


async def _stream(row: Row, respond: Responses) -> int:
    """One source for a person: the text appears as it comes."""
    result = await _answer(row, respond, lambda response: print(response.text, end="", flush=True))
    if isinstance(result, Failure):
        _print(row, result, as_json=False)
        return 1
    print()
    return 0


async def _answer(row: Row, respond: Responses,
                  show: Callable[[pb.GenerateResponse], object] = lambda response: None,
                  ) -> list[pb.GenerateResponse] | Failure:
    """Every response, or why there is none; waits where the server is busy."""
    if isinstance(row.request, Failure):
        return row.request
    tries = 0
    while True:
        responses = []
        try:
            async for response in respond(row.request):
                responses.append(response)
                show(response)
            return responses
        except Failure.CAUSES as error:
            tries += 1
            failure = Failure.of(error)
            if failure.retry_after is None or tries == _MOST_TRIES:
                return failure
            await asyncio.sleep(failure.retry_after)


def _print(row: Row, result: list[pb.GenerateResponse] | Failure, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(record(row.id, result), ensure_ascii=False), flush=True)
    elif isinstance(result, Failure):
        print(f"source {row.id}: {result.code}: {result.message}", file=sys.stderr)
        for _ in range(_samples(row)):
            print(flush=True)  # an empty line, so that line n still answers source n
    else:
        for sample in by_sample(result):
            print("".join(response.text for response in sample), flush=True)


def _samples(row: Row) -> int:
    """Outputs asked for; what is out of bounds is left to the door."""
    return 1 if isinstance(row.request, Failure) else max(1, row.request.n)
