"""``tpuspec convert``: a Hugging Face directory to a checkpoint that is served."""

import argparse
import sys

from tpuspec import checkpoint
from tpuspec.huggingface import import_huggingface


def run(args: argparse.Namespace) -> int:
    loaded = import_huggingface(args.source, dtype=args.dtype)
    if loaded.vocabulary is None:
        print(f"{args.source} has no spiece.model: the checkpoint will take and give ids, "
              "not text", file=sys.stderr)
    checkpoint.save(args.out, loaded.model, loaded.vocabulary, provenance=loaded.provenance)
    return 0
