"""Engines for tests: compiled once per shape, then filled with other weights."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from tpuspec.config import EngineConfig, T5Config
from tpuspec.decode_state import FinishReason
from tpuspec.engine import Engine
from tpuspec.measurement import SpeculationStats
from tpuspec.sampling import SamplingParams
from tpuspec.t5 import T5

TINY = EngineConfig(slots=4, source_buckets=(8,), max_target_length=32, draft_lengths=(0, 4),
                    draft_length=4)
LONG = EngineConfig(slots=4, source_buckets=(8,), max_target_length=32, draft_lengths=(0, 8),
                    draft_length=8)
SMALL = EngineConfig(slots=4, source_buckets=(8, 64), max_target_length=32,
                     draft_lengths=(0, 4), draft_length=4)


@functools.cache
def _compiled(target: T5Config, draft: T5Config | None, config: EngineConfig,
              vocabulary_size: int, dtype: str) -> Engine:
    def empty(config: T5Config) -> T5:
        return T5(config, dtype=dtype, rngs=nnx.Rngs(0))

    engine = Engine(empty(target), empty(draft) if draft else None, config,
                    vocabulary_size=vocabulary_size)
    engine.compile()
    return engine


def engine_with(target: T5, draft: T5 | None, config: EngineConfig = SMALL,
                vocabulary_size: int | None = None) -> Engine:
    """A warm engine with these weights and no memory of earlier ones."""
    draft_config = draft.config if draft is not None else None
    size = vocabulary_size or min(m.config.vocab_size for m in (target, draft) if m is not None)
    engine = _compiled(target.config, draft_config, config, size,
                       target.embedding[...].dtype.name)
    engine._tenants.clear()
    engine._sources.clear()
    engine._weights = [jax.tree.leaves(nnx.split(model)[1])
                       for model in (target, draft) if model is not None]
    engine._state = engine._definitions.empty_state()
    return engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One request; ``start`` is the step before which it enters."""

    source: Sequence[int] = (1,)
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    max_new_tokens: int = 32
    eos_ids: Sequence[int] = (1,)
    draft_length: int | None = 4
    min_new_tokens: int = 0
    decoder_prompt: Sequence[int] = ()
    logprobs: bool = False
    start: int = 0


@dataclasses.dataclass
class Result:
    ids: list[int]
    finish: FinishReason
    stats: SpeculationStats
    per_step: list[SpeculationStats]
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)


def run(engine: Engine, jobs: Sequence[Job], slots: Sequence[int] | None = None) -> list[Result]:
    """Runs jobs to their end, each in the slot named, else in order of need."""
    config = engine.config
    slots = slots if slots is not None else range(len(jobs))
    results = [Result([], FinishReason.NONE, SpeculationStats(), []) for _ in jobs]
    waiting = dict(zip(range(len(jobs)), slots, strict=True))
    running: dict[int, int] = {}
    for turn in range(10_000):
        for j, slot in list(waiting.items()):
            if jobs[j].start <= turn and slot not in running.values():
                fields = dataclasses.asdict(jobs[j]) | {"sampling": jobs[j].sampling}
                del fields["start"]
                if fields["draft_length"] is not None:
                    fields["draft_length"] = min(fields["draft_length"], config.max_draft_length)
                engine.insert(slot, **fields)
                running[j] = slot
                del waiting[j]
        if not running and not waiting:
            return results
        if not running:
            continue
        output = engine.step().read()
        for j, slot in list(running.items()):
            result, n = results[j], int(output.num_tokens[slot])
            result.ids += np.asarray(output.tokens)[slot, :n].tolist()
            found = output.logprobs
            result.logprobs += found.tokens[slot, :n].tolist()
            result.top += [list(zip(ids.tolist(), values.tolist(), strict=True)) for ids, values
                           in zip(found.top_ids[slot, :n], found.top[slot, :n], strict=True)]
            result.per_step.append(SpeculationStats.of_slot(output, slot))
            result.stats += result.per_step[-1]
            result.finish = FinishReason(int(output.finish[slot]))
            if result.finish:
                del running[j]
    raise AssertionError("jobs did not end")


def solo(engine: Engine, job: Job, slot: int = 0) -> Result:
    return run(engine, [dataclasses.replace(job, start=0)], [slot])[0]
