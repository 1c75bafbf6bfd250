"""What the bundled pair does with many requests at once, and how well draft lengths are chosen.

    tools/throughput.py [--requests 24] [--rounds 2] [--slots 8] [--json]

Two comparisons on this machine, in tokens a second, after everything is compiled:

* requests that run at once in one engine against one at a time in an engine of one slot, both
  with the server's default draft length;
* for translations, `restore` and random letters: draft lengths chosen before every step against
  each fixed one, in the same engine. What is compared runs in turns, so that a machine that slows
  down for a while slows all; each figure is the median of the rounds. The first round, in which
  the choice learns, does not count.

Sources are those of tests/data/demo_prompts.txt, all different; outputs are sampled at
temperature 0. A machine that does other things meanwhile shows in the figures.
"""

import argparse
import json
import pathlib
import random
import statistics
import string
import threading
import time
from collections.abc import Sequence
from typing import Any

from tpuspec.config import EngineConfig
from tpuspec.sampling import SamplingParams
from tpuspec.serving import models
from tpuspec.serving.engine_loop import EngineLoop
from tpuspec.serving.errors import RequestError
from tpuspec.serving.request import Request, TokenChunk

PROMPTS = pathlib.Path(__file__).parent.parent / "tests" / "data" / "demo_prompts.txt"
LADDER, DEFAULT = (0, 1, 2, 3, 5), 3
AUTO = None
_NEW_TOKENS = 48
_SOURCE = 64  # tokens at the most


class _Tokens:
    """Counts what comes, and says when all requests have ended."""

    def __init__(self, requests: int):
        self.count = 0
        self.ended = threading.Event()
        self._running = requests

    def put(self, chunk: TokenChunk) -> None:
        self.count += len(chunk.tokens)
        if chunk.finish is not None:
            self._end()

    def fail(self, error: RequestError) -> None:
        raise SystemExit(f"a request failed: {error}")

    def _end(self) -> None:
        self._running -= 1
        if not self._running:
            self.ended.set()


def sources(vocabulary: Any, count: int) -> dict[str, list[tuple[int, ...]]]:
    """Ids of so many different sources of each kind."""
    lines = PROMPTS.read_text().splitlines()
    rng = random.Random(0)
    texts = {kind: [line for line in lines if line.startswith(kind)]
             for kind in ("translate", "restore")}
    texts["random"] = ["".join(rng.choices(string.ascii_letters + " ", k=24)) for _ in range(count)]
    found = {}
    for kind, some in texts.items():
        ids = [tuple(vocabulary.encode(text)) for text in some]
        found[kind] = [one for one in ids if len(one) <= _SOURCE][:count]
        if len(found[kind]) < count:
            raise SystemExit(f"--requests must be at most {len(found[kind])} ({kind}), got {count}")
    return found


def rate(loop: EngineLoop, rows: Sequence[tuple[int, ...]], draft_length: int | None,
         label: str) -> float:
    """Tokens a second of these sources, all submitted at once."""
    tokens = _Tokens(len(rows))
    began = time.monotonic()
    for number, ids in enumerate(rows):
        loop.submit(Request(
            request_id=str(number), source=ids, sampling=SamplingParams(), seed=number,
            max_new_tokens=_NEW_TOKENS, eos_ids=(1,), draft_length=draft_length, label=label),
            tokens)
    while not tokens.ended.wait(1.0):
        if loop.closed is not None:
            raise loop.closed
    return tokens.count / (time.monotonic() - began)


def start(slots: int, draft_lengths: tuple[int, ...], draft_length: int | None,
          ) -> tuple[EngineLoop, Any]:
    """A warm engine of the bundled pair."""
    with models.pair(None, None) as pair:
        served = models.load(pair, EngineConfig(
            slots=slots, source_buckets=(_SOURCE,), max_target_length=_NEW_TOKENS,
            draft_lengths=draft_lengths, draft_length=draft_length))
    models.warm_up(served.engine)
    loop = EngineLoop(served.engine, None, queue_limit=1000)
    loop.start()
    return loop, served.vocabulary


def measure(count: int, rounds: int, slots: int) -> dict[str, Any]:
    """The document that ``--json`` prints."""
    many, vocabulary = start(slots, LADDER, AUTO)
    single, _ = start(1, (0, DEFAULT), DEFAULT)
    rows = sources(vocabulary, count)
    try:
        at_once: dict[str, dict[str, float]] = {}
        choices: dict[str, dict[str, Any]] = {}
        for kind, some in rows.items():
            rates: dict[str, list[float]] = {}
            for _ in range(1 + rounds):
                for name, loop, length in (
                        ("one at a time", single, DEFAULT),
                        *((str(length), many, length) for length in LADDER), ("auto", many, AUTO)):
                    rates.setdefault(name, []).append(rate(loop, some, length, kind))
            median = {name: statistics.median(found[1:]) for name, found in rates.items()}
            alone = median.pop("one at a time")
            best = max((name for name in median if name != "auto"), key=lambda name: median[name])
            at_once[kind] = {"one_at_a_time": alone, "at_once": median[str(DEFAULT)],
                             "ratio": median[str(DEFAULT)] / alone}
            choices[kind] = {"tokens_per_s": median, "best_fixed": int(best),
                             "auto_over_best": median["auto"] / median[best]}
        return {"slots": slots, "requests": count, "rounds": rounds, "concurrency": at_once,
                "draft_lengths": choices}
    finally:
        many.stop()
        single.stop()


def _table(document: dict[str, Any]) -> str:
    lines = [f"{document['slots']} slots, {document['requests']} requests of each kind, median of "
             f"{document['rounds']} rounds; tokens/s"]
    for kind, row in document["concurrency"].items():
        lines.append(f"{kind:<10} one at a time {row['one_at_a_time']:8.1f}   at once "
                     f"{row['at_once']:8.1f}   {row['ratio']:.2f}x")
    for kind, row in document["draft_lengths"].items():
        rates = "  ".join(f"{name}: {value:.1f}" for name, value in row["tokens_per_s"].items())
        lines.append(f"{kind:<10} by draft length {rates}   auto / best fixed "
                     f"({row['best_fixed']}): {row['auto_over_best']:.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24, help="of each kind")
    parser.add_argument("--rounds", type=int, default=2, help="that count")
    parser.add_argument("--slots", type=int, default=8, help="requests that run at once")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()
    document = measure(args.requests, args.rounds, args.slots)
    print(json.dumps(document, indent=1) if args.json else _table(document))


if __name__ == "__main__":
    main()
