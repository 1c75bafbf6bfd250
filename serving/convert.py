"""``tpuspec convert``: what people have, to a checkpoint that is served."""

import argparse
import dataclasses
import json
import sys

import tqdm

from tpuspec import checkpoint
from tpuspec.checkpoint_location import reading
from tpuspec.config import Activation, Quantization
from tpuspec.conversion import convert
from tpuspec.conversion_check import CheckReport, check
from tpuspec.model_sources import open_source
from tpuspec.serving.inspect import describe
from tpuspec.vocabulary_files import read_vocabulary


def run(args: argparse.Namespace) -> int:
    activation = None if args.activation is None else Activation(args.activation)
    source = open_source(args.source, activation=activation)
    if args.vocabulary is not None:
        source = dataclasses.replace(source, vocabulary=read_vocabulary(args.vocabulary))
    for guess in source.guesses:
        print(f"{args.source}: {guess}", file=sys.stderr)
    if source.vocabulary is None:
        print(f"{args.source} has no vocabulary, neither spiece.model nor tokenizer.json: the "
              "checkpoint will take and give ids, not text", file=sys.stderr)
    with tqdm.tqdm(desc="converting", unit="B", unit_scale=True, file=sys.stderr, leave=False,
                   disable=not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            if bar.total is None:
                bar.total, bar.initial, bar.n = total, done, done  # the rate is of this run
            bar.update(done - bar.n)

        try:
            with reading(args.source):
                convert(source, args.out, dtype=args.dtype, progress=progress,
                        quantization=None if args.quantize is None
                        else Quantization(args.quantize))
        except (KeyboardInterrupt, OSError):
            bar.close()
            print("not finished: the same command goes on from here", file=sys.stderr)
            raise
    facts = describe(checkpoint.describe(args.out))
    if args.check is None:
        print(json.dumps(facts, ensure_ascii=False, indent=1) if args.json else
              f"{args.out}: {facts['family']}, {facts['parameters']:,} parameters, "
              f"{facts['quantization'] or facts['dtype']}")
        return 0
    report = check(args.out, args.check, tolerance=args.tolerance)
    print(json.dumps(report.to_json(), indent=1) if args.json else _shown(report))
    return 0 if report.passed else 1


def _shown(report: CheckReport) -> str:
    verdict = "agrees" if report.passed else "DOES NOT AGREE"
    return (f"{verdict} with {report.against}: over {report.positions} positions the largest "
            f"difference of two logits is {report.largest_difference:.3g} (row {report.row}, "
            f"position {report.position}, id {report.token}), the largest logit "
            f"{report.largest_logit:.3g}, allowed {report.tolerance:g} of it; "
            f"{report.same_argmax:.1%} of the positions have the same likeliest id")
