"""The experiment of Leviathan et al. 2022 (T5-XXL, Tables 1 to 4) for checkpoints at hand.

    tools/reproduce_paper.py DIR --target xxl --draft small=t5-small --draft base=t5-base \\
        --draft large=t5-large --translation wmt.jsonl --summarization cnn.jsonl
    tools/reproduce_paper.py DIR --demo

For each task: α of every draft, and of bigram and unigram tables, along the target's own texts
(`tpuspec measure alpha`); plain against speculative decoding of the same prompts with each draft
(`tpuspec measure speedup`); and the cost of passes (`tpuspec measure cost`). In DIR, each of these
is a JSON document, written when it is whole: a run that was interrupted goes on with what is
missing, and one with other settings is refused. At the end DIR has tables.txt, the paper's tables
beside the measured ones, and a page of figures for each pair and task (`tpuspec report`).

Checkpoints are those of `tpuspec convert`. The paper's were T5 1.1 fine-tuned on both tasks, which
are not public; the nearest public ones were trained on them among others: T5 1.0 (t5-11b with
t5-small, t5-base, t5-large) and Flan-T5. Prompt files are JSONL with `input`, one a line, or text;
`tools/paper_prompts.py` makes them of WMT and CNN/Daily Mail. That these files stay as they are
is checked; that checkpoints do is not.

--demo is the same experiment in minutes, on the bundled pair and on a function-preserving
expansion of its target (tools/expand_model.py): a real acceptance rate, at the price of a target
of T5-large's size. It says nothing about T5-XXL.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from paper_tables import tables

from tpuspec.config import check_range

ROOT = pathlib.Path(__file__).parent.parent
EXPAND = ROOT / "tools" / "expand_model.py"
DEMO_PROMPTS = ROOT / "tests" / "data" / "demo_prompts.txt"
DEMO_PAIR = ROOT / "tpuspec" / "demo_pair"
EXPANDED = "expanded"  # name of the demo's larger target


@dataclasses.dataclass(frozen=True)
class Pair:
    """One target with one draft, by directory; the name is the draft's, or the expansion's."""

    name: str
    target: str
    draft: str


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run does: all that its documents depend on.

    Attributes:
      tasks: file of prompts by task.
      sha256: of these files, by task.
      prompts: of each task, for times; α has as many as its tokens need.
    """

    pairs: tuple[Pair, ...]
    tasks: dict[str, str]
    sha256: dict[str, str]
    tokens: int
    prompts: int
    repeats: int
    temperatures: str
    draft_lengths: str
    max_new_tokens: int
    dtype: str | None
    platform: str | None
    mesh: str | None

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))


def documents(settings: Settings, directory: pathlib.Path) -> dict[str, list[str]]:
    """The arguments of ``tpuspec`` that print each document, by its name, in the order of need."""
    common = [word for name in ("dtype", "platform", "mesh")
              if (value := getattr(settings, name)) is not None
              for word in (f"--{name}", value)]
    texts = ["--temperatures", settings.temperatures,
             "--max_new_tokens", str(settings.max_new_tokens), *common, "--json"]
    made: dict[str, list[str]] = {}
    for task in settings.tasks:
        # An expansion computes what its model does, and so its α is the model's.
        measured = [pair for pair in settings.pairs if pair.name != EXPANDED]
        drafts = [word for pair in measured for word in ("--draft", pair.draft)]
        made[f"alpha-{task}"] = [
            "measure", "alpha", "--target", measured[0].target, *drafts, "--draft", "bigram",
            "--draft", "unigram", "--input", settings.tasks[task], "--tokens",
            str(settings.tokens), *texts]
        for pair in settings.pairs:
            made[f"speedup-{task}-{pair.name}"] = [
                "measure", "speedup", "--target", pair.target, "--draft", pair.draft, "--input",
                str(directory / f"prompts-{task}.jsonl"), "--repeats", str(settings.repeats),
                "--draft_lengths", settings.draft_lengths, *texts]
    for pair in settings.pairs:
        made[f"cost-{pair.name}"] = ["measure", "cost", "--target", pair.target, "--draft",
                                     pair.draft, "--widths", "1,2,4,6,8", *common, "--json"]
    return made


def begin(settings: Settings, directory: pathlib.Path) -> None:
    """Makes the directory of a new run, or checks that it is one with these settings.

    Raises:
      ValueError: names the setting that differs, or a file of prompts with too few.
    """
    plan = directory / "settings.json"
    if plan.exists():
        before = json.loads(plan.read_text())
        for name, value in settings.to_json().items():
            if before.get(name) != value:
                raise ValueError(f"{name} must be {before.get(name)!r}, with which {directory} was "
                                 f"begun, got {value!r}: another run needs another directory")
        return
    directory.mkdir(parents=True, exist_ok=True)
    for task, file in settings.tasks.items():
        _write(directory / f"prompts-{task}.jsonl", _first(file, settings.prompts))
    _write(plan, json.dumps(settings.to_json(), indent=1) + "\n")


def _first(file: str, count: int) -> str:
    """So many lines of a file of prompts, as JSONL."""
    with open(file, encoding="utf-8") as lines:
        kept = [line.strip() for line in lines if line.strip()][:count]
    if len(kept) < count:
        raise ValueError(f"prompts must be at most {len(kept)} ({file} has no more), got {count}")
    if not file.endswith(".jsonl"):
        kept = [json.dumps({"input": line}) for line in kept]
    return "".join(line + "\n" for line in kept)


def _write(path: pathlib.Path, text: str) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def command(*words: str) -> str:
    """What ``tpuspec`` with these arguments prints. Raises ValueError if it fails."""
    done = subprocess.run(
        [sys.executable, "-c", "from tpuspec.serving.cli import main; main()", *words],
        stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(f"tpuspec {' '.join(words)} ended with exit code {done.returncode}")
    return done.stdout


def run(settings: Settings, directory: pathlib.Path) -> dict[str, Any]:
    """Makes what is missing. Returns all documents by name."""
    begin(settings, directory)
    wanted = documents(settings, directory)
    for number, (name, words) in enumerate(wanted.items(), 1):
        path = directory / f"{name}.json"
        if path.exists():
            continue
        print(f"{number} of {len(wanted)}: {name}", file=sys.stderr, flush=True)
        _write(path, command(*words))
    return {name: json.loads((directory / f"{name}.json").read_text()) for name in wanted}


def pages(settings: Settings, directory: pathlib.Path) -> list[pathlib.Path]:
    """A page of figures for each task and pair."""
    made = []
    for task in settings.tasks:
        for pair in settings.pairs:
            page = directory / f"report-{task}-{pair.name}.html"
            names = (f"alpha-{task}", f"speedup-{task}-{pair.name}", f"cost-{pair.name}")
            command("report", "--output", str(page),
                    *(str(directory / f"{name}.json") for name in names))
            made.append(page)
    return made


def demo_settings(args: argparse.Namespace, directory: pathlib.Path) -> Settings:
    """The bundled pair and its expansion, which is made if it is not there yet."""
    larger = directory / f"expanded-{args.like}"
    if not larger.exists():
        print(f"making a target of the size of {args.like} ...", file=sys.stderr, flush=True)
        unfinished = directory / f"{larger.name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was interrupted
        done = subprocess.run([sys.executable, str(EXPAND), str(DEMO_PAIR / "target"),
                               str(unfinished), "--like", args.like], stdout=subprocess.DEVNULL)
        if done.returncode:
            raise ValueError(f"no target of the size of {args.like} was made")
        os.replace(unfinished, larger)
    tasks = {}
    for task in ("translate", "restore"):
        lines = [line for line in DEMO_PROMPTS.read_text().splitlines() if line.startswith(task)]
        tasks[task] = str(directory / f"demo-{task}.txt")
        _write(pathlib.Path(tasks[task]), "".join(line + "\n" for line in lines))
    draft = str(DEMO_PAIR / "draft")
    return _settings(args, (Pair("bundled", str(DEMO_PAIR / "target"), draft),
                            Pair(EXPANDED, str(larger), draft)), tasks)


def paper_settings(args: argparse.Namespace) -> Settings:
    """Raises ValueError on what is not named or named twice."""
    pairs = []
    for text in args.draft or ():
        name, _, draft = text.rpartition("=")
        name = name or pathlib.Path(draft).resolve().name
        if name in (*(pair.name for pair in pairs), EXPANDED) or "/" in name:
            raise ValueError(f"draft must have a name of its own, got {text}")
        pairs.append(Pair(name, args.target, draft))
    tasks = {task: file for task in ("translation", "summarization")
             if (file := getattr(args, task)) is not None}
    for name, value in (("target", args.target), ("draft", pairs), ("translation", tasks)):
        if not value:
            raise ValueError(f"{name} must be named without --demo" + (
                ", or summarization: tools/paper_prompts.py makes such files"
                if name == "translation" else ""))
    return _settings(args, tuple(pairs), tasks)


def _settings(args: argparse.Namespace, pairs: tuple[Pair, ...], tasks: dict[str, str],
              ) -> Settings:
    for name in ("tokens", "prompts", "repeats", "max_new_tokens"):
        check_range(name, getattr(args, name), 1, None)
    digests = {task: hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()
               for task, file in tasks.items()}
    return Settings(pairs=pairs, tasks=tasks, sha256=digests, **{
        field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)
        if field.name not in ("pairs", "tasks", "sha256")})


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path, metavar="DIR", help="of the run")
    parser.add_argument("--demo", action="store_true",
                        help="the bundled pair and an expansion of it, in minutes")
    parser.add_argument("--like", default="t5-v1_1-large", help="size of the demo's expansion")
    parser.add_argument("--target", metavar="DIR", help="checkpoint")
    parser.add_argument("--draft", action="append", metavar="NAME=DIR",
                        help="small, base and large have rows in the paper; may be repeated")
    parser.add_argument("--translation", metavar="FILE", help="prompts")
    parser.add_argument("--summarization", metavar="FILE", help="prompts")
    parser.add_argument("--tokens", type=int, help="that α is measured along, at each "
                        "temperature: 10000 as in the paper, 1000 for the demo")
    parser.add_argument("--prompts", type=int, help="timed, of each task: 100, 6 for the demo")
    parser.add_argument("--repeats", type=int, help="of each prompt: 3, 2 for the demo")
    parser.add_argument("--temperatures", default="0,1", help="0 is greedy")
    parser.add_argument("--draft_lengths", help="3,5,7 as in the paper; 2,3,5 for the demo")
    parser.add_argument("--max_new_tokens", type=int, help="128, 32 for the demo")
    for name in ("dtype", "platform", "mesh"):
        parser.add_argument(f"--{name}", help=f"see tpuspec measure speedup --{name}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    defaults = (dict(tokens=1000, prompts=6, repeats=2, draft_lengths="2,3,5", max_new_tokens=32)
                if args.demo else dict(tokens=10_000, prompts=100, repeats=3,
                                       draft_lengths="3,5,7", max_new_tokens=128))
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    try:
        if args.demo:
            args.directory.mkdir(parents=True, exist_ok=True)
        settings = (demo_settings(args, args.directory) if args.demo else paper_settings(args))
        found = run(settings, args.directory)
        text = tables(found, {pair.name: pair.draft for pair in settings.pairs},
                      list(settings.tasks), demo=args.demo)
        _write(args.directory / "tables.txt", text)
        made = pages(settings, args.directory)
    except (OSError, ValueError) as error:
        print(f"reproduce_paper: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    print("Figures:", *made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
