"""Sources that measurements run on: those of a file, or the demo's for the bundled pair."""

import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tpuspec.serving import batch_input
from tpuspec.serving.batch_engine import BatchEngine
from tpuspec.serving.client import make_request
from tpuspec.serving.demo import SOURCES
from tpuspec.serving.records import Failure
from tpuspec.serving.request import Request
from tpuspec.serving.storage import File

Prompt = str | tuple[int, ...]  # a text or encoder ids
_PARAMETERS: dict[str, Any] = {  # that a line may name; they are left out here
    name: parameter.default
    for name, parameter in inspect.signature(make_request).parameters.items()
    if name not in ("source", "request_id")}


def read(url: str | None, *, bundled: bool) -> list[Prompt]:
    """The sources of a file as ``tpuspec batch`` reads them.

    Args:
      bundled: whether the pair is the bundled one, for which no file need be named.

    Raises:
      OSError, ValueError: the file cannot be read, or a line of it.
    """
    if url is None:
        if not bundled:
            raise ValueError("input must be named: only the bundled pair has sources of its own")
        return list(SOURCES)
    prompts: list[Prompt] = []
    for row in batch_input.read(File(url), _PARAMETERS, seed=0):
        if row is None:
            continue
        if isinstance(row.request, Failure):
            raise ValueError(f"{url}: {row.request.message}")
        request = row.request
        prompts.append(request.text if request.HasField("text") else tuple(request.token_ids.ids))
    if not prompts:
        raise ValueError(f"{url} must have at least 1 source, got 0")
    return prompts


def lengths(prompts: Sequence[Prompt]) -> tuple[list[str], list[int]]:
    """Texts, and lengths of the others: what ``models.source_bucket`` takes."""
    return ([prompt for prompt in prompts if isinstance(prompt, str)],
            [len(prompt) + 1 for prompt in prompts if not isinstance(prompt, str)])


def outputs(engine: BatchEngine, prompts: Sequence[Prompt], *, tokens: int, repeat: bool,
            seed: int, **parameters: Any) -> Iterator[tuple[int, Request, tuple[int, ...]]]:
    """Outputs until there are so many tokens: prompt's number, request, ids.

    Args:
      repeat: whether prompts may come again, with another seed, when all were used.
      parameters: of ``make_request``.
    """
    numbers = itertools.cycle(range(len(prompts))) if repeat else iter(range(len(prompts)))
    done = 0
    for turn in itertools.count():
        # Few at a time: what is beyond the tokens asked for is not generated.
        chosen = list(itertools.islice(numbers, 2 * engine.slots))
        if not chosen:
            return
        answers = engine.generate([prompts[i] for i in chosen], seed=seed + turn, **parameters)
        for number, answer in zip(chosen, answers, strict=True):
            yield number, answer.request, answer.token_ids
            done += len(answer.token_ids)
            if done >= tokens:
                answers.close()
                return

