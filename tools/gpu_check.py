"""What speculation costs and gains on one large GPU: one run of minutes, without any download.

    pip install --no-deps --no-index --no-build-isolation --editable .   # once; fetches nothing
    python tools/gpu_check.py --json gpu_check.json
    python tools/gpu_check.py --toy                                      # the same, tiny, on a CPU

Models have random weights, made on the device, in bfloat16. The draft is of T5-small's shape
(1.1). Each target, of T5-XXL's and T5-XL's shapes, is a function-preserving expansion of that
draft (see expand_model.py): so that the two agree as far as rounding lets them, while a target
pass moves all bytes of its size. **Acceptance is set, not found**: noise is mixed into a draft's
last map (see controlled_pair.py) until the mean of sum min(p, q) along random tokens is what is
wanted; what the runs then had is measured and stands beside it. "1" is the draft without noise,
and comes out below 1 by what bfloat16 rounds differently in the two models. Tokens are sampled
at temperature 1, one request at a time.

For each target: time of passes of G = 1 to 16 positions, c, and bytes over the bandwidth of a
copy that is timed in turns with them; tokens a second of plain decoding in an engine of its own,
whose passes have 1 position, of plain decoding in the speculative engine, whose passes all have
one width in bfloat16, and of speculative decoding. Wall-clock, medians.

Nothing new begins that would end after ``--budget_s``, taking as long as the longest piece of its
kind so far; what was skipped is listed. The JSON document is written after every piece, so that a
run that is cut off leaves what it had. The exit code is 1 if a piece failed.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import expand_model
import jax
import jax.numpy as jnp
import numpy as np
from controlled_pair import SAMPLING, noisy_drafts, random_draft
from gpu_check_table import table
from timed_pieces import Piece, run_pieces

from tpuspec import cost_sweep, theory
from tpuspec.config import EngineConfig, T5Config
from tpuspec.engine import Engine
from tpuspec.measurement import CostReport, SpeculationStats
from tpuspec.presets import preset
from tpuspec.t5 import T5

DTYPE = jnp.bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is run.

    Attributes:
      targets: by name, what matters most first.
      widths: G that are timed first; ``more_widths`` are what time is left for at the end.
      source, new_tokens: of each request.
      draft_lengths: that speculative decoding is timed with.
      repeats: of each request, with another seed, that count.
    """

    draft: T5Config
    targets: dict[str, T5Config]
    widths: tuple[int, ...]
    more_widths: tuple[int, ...]
    source: int
    new_tokens: int
    draft_lengths: tuple[int, ...]
    repeats: int
    alphas: tuple[float, ...] = (1.0, 0.75, 0.62)


FULL = Sizes(
    draft=preset("t5-v1_1-small"),
    targets={name: preset(name) for name in ("t5-v1_1-xxl", "t5-v1_1-xl")},
    widths=(1, 2, 4, 8, 16), more_widths=(3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15),
    source=64, new_tokens=128, draft_lengths=(3, 5, 7), repeats=5)
_TOY = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_heads=2, num_layers=1,
                num_decoder_layers=1)
TOY = Sizes(
    draft=_TOY, targets={"toy": dataclasses.replace(_TOY, d_model=128, num_heads=4, d_ff=96,
                                                    num_decoder_layers=2)},
    widths=(1, 3), more_widths=(2,), source=8, new_tokens=64, draft_lengths=(2,), repeats=2)


def decode(engine: Engine, source: Sequence[int], *, draft_length: int, tokens: int, seed: int,
           ) -> tuple[float, SpeculationStats]:
    """Tokens a second after those of the first step, and the counters of all steps.

    A step is launched before the one before it is read, as a server does.
    """
    engine.insert(0, source, sampling=SAMPLING, seed=seed, max_new_tokens=tokens, eos_ids=(),
                  draft_length=draft_length)
    stats, following = SpeculationStats(), engine.step()
    first, began = 0, 0.0
    while True:
        running, following = following, engine.step()
        output = running.read()
        stats += SpeculationStats.of_slot(output, 0)
        if not first:
            first, began = stats.emitted, time.perf_counter()
        if output.finish[0]:
            ended = time.perf_counter()
            following.read()  # of an empty slot
            return (stats.emitted - first) / (ended - began), stats


def rates(engine: Engine, source: Sequence[int], sizes: Sizes,
          ) -> dict[int, tuple[float, SpeculationStats]]:
    """By draft length, in turns: the median of tokens a second, and all counters."""
    lengths = engine.config.draft_lengths
    found: dict[int, list[float]] = {length: [] for length in lengths}
    stats = dict.fromkeys(lengths, SpeculationStats())
    for repeat in range(-1, sizes.repeats):  # the first one warms caches
        for length in lengths:
            rate, counters = decode(engine, source, draft_length=length, tokens=sizes.new_tokens,
                                    seed=repeat + 1)
            if repeat >= 0:
                found[length].append(rate)
                stats[length] += counters
    return {length: (statistics.median(found[length]), stats[length]) for length in lengths}


class Check:
    """The pieces, and the document that they fill."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        rng = np.random.default_rng(0)
        self.source = rng.integers(2, sizes.draft.vocab_size, sizes.source).tolist()
        device = jax.devices()[0]
        self.document: dict[str, Any] = {
            "what": "random weights, acceptance set by mixing noise into the draft's logits; "
                    "wall-clock of this machine",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": device.device_kind, "platform": device.platform, "jax": jax.__version__,
            "dtype": jnp.dtype(DTYPE).name, "temperature": SAMPLING.temperature,
            "draft": sizes.draft.to_json(), "source": sizes.source,
            "new_tokens": sizes.new_tokens, "repeats": sizes.repeats,
            "targets": {name: {"config": expand_model.expanded_config(
                sizes.draft, like).to_json(), "sweep": None, "plain_tokens_per_s": None,
                "rows": []} for name, like in sizes.targets.items()}}
        self._targets: dict[str, T5] = {}
        self._costs: dict[str, CostReport] = {}

    def pieces(self) -> list[Piece]:
        found = []
        for name in self.sizes.targets:
            found += [Piece(kind="sweep", what=f"{name}: passes of {self.sizes.widths} positions",
                            work=functools.partial(self._sweep, name, self.sizes.widths)),
                      Piece(kind="plain", what=f"{name}: plain decoding",
                            work=functools.partial(self._plain, name))]
            found += [Piece(kind="pair", what=f"{name}: speculative decoding at alpha {alpha:g}",
                            work=functools.partial(self._pair, name, alpha))
                      for alpha in self.sizes.alphas]
        found += [Piece(kind="more", what=f"{name}: passes of {width} positions",
                        work=functools.partial(self._sweep, name, (width,)))
                  for name in self.sizes.targets for width in self.sizes.more_widths]
        return found

    @functools.cached_property
    def _draft(self) -> T5:
        return random_draft(self.sizes.draft, DTYPE)

    @functools.cached_property
    def _drafts(self) -> dict[float, tuple[float, T5]]:
        return noisy_drafts(self._draft, self.sizes.alphas, self.source, self.sizes.new_tokens)

    def _target(self, name: str) -> T5:
        if name not in self._targets:
            self._targets[name] = expand_model.expand(self._draft, self.sizes.targets[name])
        return self._targets[name]

    def _sweep(self, name: str, widths: Sequence[int]) -> None:
        sweep = cost_sweep.sweep(
            self._target(name), self._draft, slots=1, widths=widths,
            source_positions=self.sizes.source, positions=self.sizes.new_tokens,
            vocabulary_size=self.sizes.draft.vocab_size)
        copy, first = sweep.copy_bytes_per_s, sweep.target[0].ms

        def of(cost: cost_sweep.PassCost) -> dict[str, float]:
            return {"ms": cost.ms, "bytes": cost.moved, "bytes_over_bandwidth_ms":
                    1e3 * cost.moved / copy, "share_of_copy": cost.bytes_per_s / copy}

        assert sweep.draft is not None
        passes = {str(cost.width): of(cost) | {"widening": cost.ms / first}
                  for cost in sweep.target}
        entry = self.document["targets"][name]
        if entry["sweep"] is None:
            entry["sweep"] = {"c": sweep.c, "copy_bytes_per_s": copy,
                              "product_flops_per_s": sweep.product_flops_per_s,
                              "draft": of(sweep.draft), "target": passes}
        else:  # each has its own T(1) and its own copy
            entry["sweep"]["target"] = passes | entry["sweep"]["target"]

    def _plain(self, name: str) -> None:
        engine = Engine(self._target(name), None, self._config((0,)),
                        vocabulary_size=self.sizes.draft.vocab_size)
        engine.compile()
        entry = self.document["targets"][name]
        entry["plain_tokens_per_s"] = rates(engine, self.source, self.sizes)[0][0]

    def _config(self, lengths: tuple[int, ...]) -> EngineConfig:
        return EngineConfig(slots=1, source_buckets=(self.sizes.source,), draft_lengths=lengths,
                            max_target_length=self.sizes.new_tokens, draft_length=lengths[-1])

    def _pair(self, name: str, wanted: float) -> None:
        share, draft = self._drafts[wanted]
        engine = Engine(self._target(name), draft, self._config((0, *self.sizes.draft_lengths)),
                        vocabulary_size=self.sizes.draft.vocab_size)
        engine.compile()
        if name not in self._costs:  # of shapes, not of weights
            self._costs[name] = engine.measure()
        found = rates(engine, self.source, self.sizes)
        stats = sum((of for _, of in found.values()), SpeculationStats())
        self.document["targets"][name]["rows"] += [
            self._row(name, wanted, share, gamma, found, stats)
            for gamma in self.sizes.draft_lengths]

    def _row(self, name: str, wanted: float, share: float, gamma: int,
             found: dict[int, tuple[float, SpeculationStats]], stats: SpeculationStats,
             ) -> dict[str, Any]:
        """α is that of all draft lengths together; "same width" is over plain decoding by
        passes as wide as the verify pass."""
        entry, cost = self.document["targets"][name], self._costs[name]
        speculative, plain = found[gamma][0], entry["plain_tokens_per_s"]
        alpha, interval = stats.alpha, stats.alpha_interval()
        assert alpha is not None and cost.c is not None
        row = {
            "alpha_wanted": wanted, "noise": share, "alpha": alpha, "alpha_interval": interval,
            "alpha_overlap": stats.alpha_overlap, "gamma": gamma,
            "tokens_per_target_run": found[gamma][1].tokens_per_target_run,
            "plain_tokens_per_s": plain, "plain_same_width_tokens_per_s": found[0][0],
            "speculative_tokens_per_s": speculative,
            "observed_speedup": None if plain is None else speculative / plain,
            "predicted_speedup": None,
            "observed_speedup_same_width": speculative / found[0][0],
            "predicted_speedup_same_width": theory.speedup(alpha, gamma, cost.c,
                                                           cost.widening(gamma)),
            "predicted_same_width_by_step_times":
                found[gamma][1].emitted / found[gamma][1].steps
                * cost.step_ms[0] / cost.step_ms[gamma]}
        width = str(max(self.sizes.draft_lengths) + 1)  # of all target passes, in bfloat16
        if entry["sweep"] is not None and width in entry["sweep"]["target"]:
            row["predicted_speedup"] = theory.speedup(
                alpha, gamma, entry["sweep"]["c"], entry["sweep"]["target"][width]["widening"])
        return row


def check(sizes: Sizes, budget_s: float, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The document. ``save`` gets what there is of it after each piece."""
    made = Check(sizes)
    report = run_pieces(made.pieces(), budget_s, lambda: save(made.document))
    return made.document | {"run": {"budget_s": budget_s, **report}}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget_s", type=float, default=420.0, help="seconds")
    parser.add_argument("--toy", action="store_true", help="tiny models, to see that it works")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE",
                        help="for the document, which is printed below the table otherwise")
    args = parser.parse_args(argv)

    def save(document: dict[str, Any]) -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(document, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        if jax.config.jax_compilation_cache_dir is None:  # pairs share their programs
            jax.config.update("jax_compilation_cache_dir", folder)
        document = check(TOY if args.toy else FULL, args.budget_s, save)
    save(document)
    print(table(document))
    if args.json is None:
        print(json.dumps(document, indent=1))
    return 1 if document["run"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
