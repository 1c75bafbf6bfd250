"""What int8 weights do to a released demo pair: BLEU, chrF, exact match and α, side by side.

    tools/score_pair.py --target tpuspec/demo_pair/target --draft tpuspec/demo_pair/draft \
        --data DATA

DATA holds the sentence pairs, as for ``train_demo_pair.py``. Everything is computed in
float32; "as stored" are the checkpoints' own weights, "int8" the same ones quantized. The
scores are of greedy outputs; α is accepted / examined drafts at a draft length of 3.
"""

import argparse
import json
import pathlib

import demo_data
import demo_scores
import sentencepiece
from flax import nnx

from tpuspec import checkpoint
from tpuspec.quantization import quantize

Scores = dict[str, float]
AS_STORED, INT8 = "as stored", "int8"
PAIRS = ((AS_STORED, AS_STORED), (INT8, AS_STORED), (INT8, INT8))  # target and draft


def measure(target: pathlib.Path, draft: pathlib.Path,
            examples: dict[str, list[demo_data.Example]]) -> dict[str, dict[str, Scores]]:
    """Scores of both forms of both models, and α of the pairs they make."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(target / "spiece.model"))
    models = {}
    result: dict[str, dict[str, Scores]] = {}
    for role, directory in (("target", target), ("draft", draft)):
        loaded = checkpoint.load(directory, dtype="float32")
        if loaded.vocabulary is None:
            raise SystemExit(f"{directory} has no vocabulary: it is no model of text")
        vocabulary = loaded.vocabulary
        for form, model in ((AS_STORED, loaded.model), (INT8, quantize(loaded.model))):
            models[role, form] = model
            result.setdefault(role, {})[form] = demo_scores.scores(
                processor, *nnx.split(model), examples)
    result["alpha"] = {
        f"target {one}, draft {other}": demo_scores.acceptance(
            models["target", one], models["draft", other], vocabulary, examples)
        for one, other in PAIRS}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "draft", "data"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--sources", type=int,
                        help="of each task, evenly taken from the test split; all without it")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()
    examples = demo_data.load(args.data, "test")
    if args.sources is not None:
        if args.sources < 1:
            parser.error(f"--sources must be at least 1, got {args.sources}")
        examples = {task: rows[::max(1, len(rows) // args.sources)][:args.sources]
                    for task, rows in examples.items()}
    counts = {task: len(rows) for task, rows in examples.items()}
    result = measure(args.target, args.draft, examples)
    if args.json:
        print(json.dumps({"sources": counts} | result, indent=1, ensure_ascii=False))
        return
    print("sources:", counts)
    for part, rows in result.items():
        for form, scores in rows.items():
            print(f"{part:<8}{form:<38}",
                  "  ".join(f"{name} {value:g}" for name, value in scores.items()))


if __name__ == "__main__":
    main()
