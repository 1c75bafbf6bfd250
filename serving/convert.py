"""``tpuspec convert``: a Hugging Face directory, or a checkpoint, to one that is served."""

import argparse
import pathlib
import sys

from tpuspec import checkpoint
from tpuspec.huggingface import import_huggingface
from tpuspec.quantization import quantize


def run(args: argparse.Namespace) -> int:
    ours = (pathlib.Path(args.source).expanduser() / checkpoint.CONFIG_FILE).is_file()
    loaded = (checkpoint.load if ours else import_huggingface)(args.source, dtype=args.dtype)
    model, provenance = loaded.model, loaded.provenance
    if args.quantize is not None:
        # Scores that it tells of are not those of the quantized model.
        model, provenance = quantize(model), {"quantized_from": provenance}
    if loaded.vocabulary is None:
        print(f"{args.source} has no spiece.model: the checkpoint will take and give ids, "
              "not text", file=sys.stderr)
    checkpoint.save(args.out, model, loaded.vocabulary, provenance=provenance)
    return 0
