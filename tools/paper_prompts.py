"""The paper's prompts as files: WMT English to German, and CNN/Daily Mail, with T5's prefixes.

    tools/paper_prompts.py wmt.jsonl --task translation --count 1000
    tools/paper_prompts.py cnn.jsonl --task summarization --count 1000

Reads the test splits with Hugging Face's `datasets`, which must be installed (it is no part of
tpuspec) and fetches them. Where they lie in files already, no tool is needed: a line
{"input": "translate English to German: ..."} or {"input": "summarize: ..."} for each.
"""

import argparse
import importlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# By task: the data set's name and configuration, and the prompt of one of its rows.
TASKS: Mapping[str, tuple[str, str, Callable[[Mapping[str, Any]], str]]] = {
    "translation": ("wmt/wmt14", "de-en",
                    lambda row: "translate English to German: " + row["translation"]["en"]),
    "summarization": ("abisee/cnn_dailymail", "3.0.0", lambda row: "summarize: " + row["article"]),
}


def prompts(task: str, count: int) -> Iterator[str]:
    """Raises ValueError where `datasets` is not installed, or the split has too few."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise ValueError("datasets is not installed (pip install datasets)") from None
    name, configuration, prompt = TASKS[task]
    rows = datasets.load_dataset(name, configuration, split="test")
    if len(rows) < count:
        raise ValueError(f"count must be at most {len(rows)}, got {count}")
    for number in range(count):
        yield prompt(rows[number])


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
