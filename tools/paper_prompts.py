"""The paper's prompts as files: WMT English to German, and CNN/Daily Mail, with T5's prefixes.

    tools/paper_prompts.py wmt.jsonl --task translation --count 1000
    tools/paper_prompts.py cnn.jsonl --task summarization --count 1000

Reads the test splits with Hugging Face's `datasets` or with `tensorflow_datasets`, one of which
must be installed (they are no part of tpuspec) and fetches them. Where texts lie in files already,
no tool is needed: a line {"input": "translate English to German: ..."} or
{"input": "summarize: ..."} for each.
"""

import argparse
import importlib
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# By task: T5's prefix, the column, and name and configuration by loader.
TASKS: Mapping[str, tuple[str, str, tuple[str, str], str]] = {
    "translation": ("translate English to German: ", "en", ("wmt/wmt14", "de-en"),
                    "wmt14_translate/de-en"),
    "summarization": ("summarize: ", "article", ("abisee/cnn_dailymail", "3.0.0"),
                      "cnn_dailymail"),
}


def prompts(task: str, count: int) -> Iterator[str]:
    """Raises ValueError where no loader is installed, or the split has too few."""
    prefix, column, *_ = TASKS[task]
    found = list(itertools.islice(_rows(task), count))
    if len(found) < count:
        raise ValueError(f"count must be at most {len(found)}, got {count}")
    for row in found:
        text = row.get("translation", row)[column]
        yield prefix + (text.decode() if isinstance(text, bytes) else text)


def _rows(task: str) -> Iterator[Mapping[str, Any]]:
    """Of the test split, by whichever loader is there."""
    prefix, _, (name, configuration), name_of_tensorflow = TASKS[task]
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        datasets = None
    if datasets is not None:
        yield from datasets.load_dataset(name, configuration, split="test")
        return
    try:
        tfds = importlib.import_module("tensorflow_datasets")
    except ImportError:
        line = json.dumps({"input": f"{prefix}..."})
        raise ValueError("neither datasets nor tensorflow_datasets is installed (pip install "
                         f"datasets); or write the file yourself, a line {line} for each text"
                         ) from None
    yield from tfds.as_numpy(tfds.load(name_of_tensorflow, split="test"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path, metavar="FILE.jsonl")
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    parser.add_argument("--count", type=int, default=1000)
    args = parser.parse_args(argv)
    try:
        lines = [json.dumps({"id": str(number), "input": text}) + "\n"
                 for number, text in enumerate(prompts(args.task, args.count))]
        args.output.write_text("".join(lines))
    except (OSError, ValueError) as error:
        print(f"paper_prompts: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
