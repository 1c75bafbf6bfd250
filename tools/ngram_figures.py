"""What drafts that are looked up bring, on the bundled pair, at temperature 0.

    tools/ngram_figures.py [--requests 40] [--rounds 3] [--slots 1] [--json]

For translations and `restore` (sources of tests/data/demo_prompts.txt): how often a look-up finds
anything, α of what it finds by place in the block, and tokens for each target run with all drafts
looked up. Then tokens a second, as ratios to plain decoding just before in the same engine: with
drafts of the draft model, looked-up ones without a draft model, and both, each with draft lengths
chosen before every step. Ratios are medians over the rounds, of which the first, in which choices
learn, does not count. A machine that does other things meanwhile shows in them.
"""

import argparse
import collections
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from throughput import sources

from tpuspec.config import EngineConfig
from tpuspec.engine import Engine
from tpuspec.sampling import SamplingParams
from tpuspec.serving import models

LADDER, PLAIN, CHOSEN = (0, 1, 2, 3, 5), 0, None
_NEW_TOKENS, _SOURCE = 48, 64


@dataclasses.dataclass
class Counts:
    """Of steps of requests that run.

    Attributes:
      found, right, judged: steps in which a look-up found drafts, and by place how many of
        these were right and how many were compared with a new token.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    found: int = 0
    right: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    judged: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def add(self, output: Any, slot: int) -> None:
        new, found, agreed = (int(x[slot]) for x in (
            output.num_tokens, output.found, output.agreed))
        self.steps += 1
        self.tokens += new
        self.found += found > 0
        for place in range(min(found, new, agreed + 1)):
            self.judged[place] += 1
            self.right[place] += place < agreed


def decode(engine: Engine, rows: Sequence[tuple[int, ...]], draft_length: int | None,
           label: str) -> Counts:
    """All sources, as many at once as there are slots; inserts count, too."""
    counts, waiting = Counts(), list(rows)
    began = time.perf_counter()
    while waiting or engine.active_slots:
        for slot in sorted(set(range(engine.config.slots)) - set(engine.active_slots)):
            if waiting:
                engine.insert(slot, waiting.pop(0), sampling=SamplingParams(), seed=0,
                              max_new_tokens=_NEW_TOKENS, eos_ids=(1,), label=label,
                              draft_length=draft_length)
        running = engine.active_slots
        output = engine.step().read()
        for slot in running:
            counts.add(output, slot)
    counts.seconds = time.perf_counter() - began
    return counts


def start(slots: int, *, draft: bool, ngram_drafts: bool) -> tuple[Engine, Any]:
    with models.pair(None, None) as pair:
        served = models.load(
            pair if draft else dataclasses.replace(pair, draft=None), EngineConfig(
                slots=slots, source_buckets=(_SOURCE,), max_target_length=_NEW_TOKENS,
                draft_lengths=LADDER, draft_length=CHOSEN, ngram_drafts=ngram_drafts))
    models.warm_up(served.engine)
    return served.engine, served.vocabulary


def measure(count: int, rounds: int, slots: int) -> dict[str, Any]:
    """The document that ``--json`` prints."""
    engines = {}
    for name, draft, ngram_drafts in (("draft model", True, False), ("looked up", False, True),
                                      ("both", True, True)):
        engines[name], vocabulary = start(slots, draft=draft, ngram_drafts=ngram_drafts)
    document: dict[str, Any] = {"requests": count, "rounds": rounds, "slots": slots}
    for kind, rows in sources(vocabulary, count).items():
        if kind == "random":
            continue
        seen = decode(engines["looked up"], rows, LADDER[-1], "")
        rates: dict[str, list[float]] = {}
        for _ in range(1 + rounds):
            for name, engine in engines.items():
                plain = decode(engine, rows, PLAIN, kind)
                chosen = decode(engine, rows, CHOSEN, kind)
                rates.setdefault(name, []).append(
                    chosen.tokens / chosen.seconds / (plain.tokens / plain.seconds))
        document[kind] = {
            "found": seen.found / seen.steps,
            "alpha_by_place": [seen.right[k] / seen.judged[k] for k in sorted(seen.judged)],
            "judged_by_place": [seen.judged[k] for k in sorted(seen.judged)],
            "tokens_per_target_run": seen.tokens / seen.steps,
            "speed_over_plain": {name: statistics.median(found[1:])
                                 for name, found in rates.items()}}
    return document


def _table(document: dict[str, Any]) -> str:
    lines = [f"{document['requests']} sources of each kind, {document['slots']} slots, median of "
             f"{document['rounds']} rounds"]
    for kind in ("translate", "restore"):
        row = document[kind]
        places = "  ".join(f"{alpha:.2f} ({number})" for alpha, number in zip(
            row["alpha_by_place"], row["judged_by_place"], strict=True))
        speed = "  ".join(f"{name}: {ratio:.2f}" for name, ratio in row["speed_over_plain"].items())
        lines += [f"{kind:<10} found in {row['found']:.2f} of the steps, alpha by place {places}, "
                  f"{row['tokens_per_target_run']:.2f} tokens per target run",
                  f"{'':<10} speed over plain  {speed}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40, help="of each kind")
    parser.add_argument("--rounds", type=int, default=3, help="that count")
    parser.add_argument("--slots", type=int, default=1, help="requests that run at once")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()
    document = measure(args.requests, args.rounds, args.slots)
    print(json.dumps(document, indent=1) if args.json else _table(document))


if __name__ == "__main__":
    main()
