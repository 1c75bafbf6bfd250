"""The little that serving needs of an engine and a vocabulary, so that tests can fake both."""

import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

from tpuspec.config import EngineConfig
from tpuspec.measurement import CostReport
from tpuspec.sampling import SamplingParams


class StepHandle(Protocol):
    """A launched step."""

    def read(self) -> Any:
        """Waits for the step and returns its ``StepOutput``, rows by slot."""


class SlotEngine(Protocol):
    """See ``tpuspec.engine.Engine``; used by one thread."""

    config: EngineConfig
    vocabulary_size: int
    cost: CostReport | None

    @property
    def compilations(self) -> int: ...

    def insert(self, slot: int, source: Sequence[int], *, sampling: SamplingParams, seed: int,
               max_new_tokens: int, eos_ids: Sequence[int], draft_length: int | None,
               label: str = "", min_new_tokens: int = 0, decoder_prompt: Sequence[int] = (),
               logprobs: bool = False) -> None: ...

    def step(self) -> StepHandle: ...

    def release(self, slot: int) -> None: ...


class Detokenizer(Protocol):
    """Ids to text in pieces; never half a character."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Vocabulary(Protocol):
    """See ``tpuspec.vocabulary.Vocabulary``; used by several threads."""

    eos_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def detokenizer(self) -> Detokenizer: ...


class Tracer(Protocol):
    """See ``tpuspec.profiling.Profiler``; calls may take seconds and are made one at a time."""

    def start(self) -> pathlib.Path: ...

    def stop(self) -> None: ...
