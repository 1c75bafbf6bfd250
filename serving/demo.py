"""``tpuspec demo``: the whole path on one machine, and what speculation gains there.

A server in this process, a client that streams from it, and a measurement that
takes plain and speculative decoding of the same sources in turns, so that a
machine that slows down for a while slows both.
"""

import argparse
import asyncio
import json
import os
import sys
import time

from tpuspec.config import EngineConfig
from tpuspec.protos import generation_pb2 as pb
from tpuspec.sampling import SamplingParams
from tpuspec.serving import models
from tpuspec.serving.client import Client, make_request
from tpuspec.serving.demo_report import Report, Run, print_table
from tpuspec.serving.server import Server

TRANSLATE, RESTORE = "translate English to German: ", "restore: "
SOURCES = (
    TRANSLATE + "Where is the nearest train station?",
    TRANSLATE + "I would like to learn German because my friend speaks it.",
    TRANSLATE + "She has been waiting for you for more than two hours.",
    TRANSLATE + "He asked me if I could help him.",
    TRANSLATE + "Can you tell me why you did not come to school yesterday?",
    RESTORE + "tom said that he would be back before monday",
    RESTORE + "do you know when mary is going to arrive in boston",
    RESTORE + "i don't think that we have enough time to do all that",
)
_MOST_NEW_TOKENS = 64
_MEASURE_SECONDS = 12.0
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 20
_COLOURS = {pb.ORIGIN_ACCEPTED_DRAFT: "32", pb.ORIGIN_CORRECTION: "31", pb.ORIGIN_BONUS: "36"}
_LEGEND = {pb.ORIGIN_ACCEPTED_DRAFT: "accepted draft", pb.ORIGIN_CORRECTION: "correction",
           pb.ORIGIN_BONUS: "bonus"}


def run(args: argparse.Namespace) -> int:
    SamplingParams(temperature=args.temperature)  # refused before anything is loaded
    with models.pair(args.target, args.draft) as pair:
        if pair.draft is None:
            raise ValueError("demo needs a draft beside the target")
        config = EngineConfig(
            slots=1, source_buckets=(models.source_bucket(pair, SOURCES),),
            max_target_length=_MOST_NEW_TOKENS, draft_lengths=(0, args.draft_length),
            draft_length=args.draft_length)
        if not args.json:
            print(f"Loading and compiling {pair.target.name} and {pair.draft.name} "
                  "for this machine (some seconds) ...", flush=True)
        served = models.load(pair, config, dtype=args.dtype, mesh_shape=args.mesh)
    models.warm_up(served.engine)
    report = asyncio.run(_demo(served, args))
    if args.json:
        print(json.dumps(report.to_json(), ensure_ascii=False, indent=1))
    else:
        print_table(report)
    return 0


async def _demo(served: models.Served, args: argparse.Namespace) -> Report:
    server = Server(served.engine, served.vocabulary, served.info)
    address = f"localhost:{await server.start('localhost:0')}"
    if not args.json:
        print(f"Serving on {address}.")
    try:
        async with Client(address) as client:
            return await measure(client, SOURCES, draft_length=args.draft_length,
                                 temperature=args.temperature, show=not args.json,
                                 seconds=_MEASURE_SECONDS)
    finally:
        await server.drain(grace=1.0)


async def measure(client: Client, sources: tuple[str, ...], *, draft_length: int,
                  temperature: float, show: bool, seconds: float) -> Report:
    """Streams every source once, then times plain and speculative runs in turns."""
    def request(source: str, length: int) -> pb.GenerateRequest:
        return make_request(source, draft_length=length, temperature=temperature, seed=0)

    if show:
        _print_legend()
    shown = [await _run(client, request(source, draft_length), source if show else None)
             for source in sources]
    if show:
        print("\nMeasuring plain and speculative decoding in turns ...", flush=True)
    plain: list[Run] = []
    speculative: list[Run] = []
    began = time.monotonic()
    for rounds in range(_MOST_ROUNDS):
        if rounds >= _LEAST_ROUNDS and time.monotonic() - began > seconds:
            break
        for source in sources:
            plain.append(await _run(client, request(source, 0)))
            speculative.append(await _run(client, request(source, draft_length)))
    cost = (await client.get_model()).cost
    return Report(sources=sources, shown=shown, plain=plain, speculative=speculative, cost=cost,
                  draft_length=draft_length, temperature=temperature)


async def _run(client: Client, request: pb.GenerateRequest, title: str | None = None) -> Run:
    """One request from the client's side; shown as it streams if it has a title."""
    if title is not None:
        print(f"\n{title}\n  ", end="", flush=True)
    began = time.monotonic()
    responses = []
    async for response in client.generate(request):
        responses.append(response)
        if title is not None:
            print("".join(_coloured(token) for token in response.tokens), end="", flush=True)
    if title is not None:
        print()
    return Run(responses=responses, seconds=time.monotonic() - began)


def _use_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _coloured(token: pb.Token) -> str:
    colour = _COLOURS.get(token.origin)
    if colour is None or not token.text or not _use_colour():
        return token.text
    return f"\x1b[{colour}m{token.text}\x1b[0m"


def _print_legend() -> None:
    if _use_colour():
        print("Colours:", ", ".join(_coloured(pb.Token(origin=origin, text=name))
                                    for origin, name in _LEGEND.items()))
