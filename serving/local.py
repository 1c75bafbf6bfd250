"""An engine in this process: for the few requests at hand, or for as many as come."""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from tpuspec.config import EngineConfig, Sampler
from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving import models
from tpuspec.serving.batch_engine import BatchEngine
from tpuspec.serving.engine_loop import EngineLoop
from tpuspec.serving.service import GenerationService

SLOTS = 4
BATCH_SLOTS = 16
_MOST_SOURCE = 2048  # tokens
_OUTPUT, _MOST_OUTPUT = 256, 4096  # tokens; the first if no request asks for more
DRAFT_LENGTH, _MOST_DRAFTS = 3, 16
_MOST_SAMPLES = 16  # of one request


@contextlib.contextmanager
def session(args: argparse.Namespace, requests: Sequence[pb.GenerateRequest],
            ) -> Iterator[GenerationService]:
    """Loads, warms up and runs the pair that the flags name.

    Only what the requests need is compiled: one source length, and plain decoding
    beside the draft lengths asked for.
    """
    with models.pair(args.target, args.draft) as pair:
        config = dataclasses.replace(_config(requests, pair), sampler=args.sampler)
        served = models.load(pair, config, dtype=args.dtype, mesh_shape=args.mesh)
    models.warm_up(served.engine)
    loop = EngineLoop(served.engine, served.vocabulary, queue_limit=max(SLOTS, config.slots))
    loop.start()
    try:
        yield GenerationService(loop, served.vocabulary, served.info)
    finally:
        loop.stop()


def _config(requests: Sequence[pb.GenerateRequest], pair: models.Pair) -> EngineConfig:
    """What no engine here can do is left for the door to refuse, request by request."""
    bucket = models.source_bucket(
        pair, [r.text for r in requests if r.HasField("text")],
        [len(r.token_ids.ids) + 1 for r in requests if r.HasField("token_ids")])
    outputs = [r.max_new_tokens for r in requests if r.HasField("max_new_tokens")]
    prompts = [r for r in requests if r.decoder_text or r.decoder_token_ids.ids]
    prompt = models.source_bucket(
        pair, [r.decoder_text for r in prompts],
        [len(r.decoder_token_ids.ids) for r in prompts]) if prompts else 0
    drafts = {min(r.draft_length, _MOST_DRAFTS) for r in requests if r.draft_length > 0}
    if not all(r.HasField("draft_length") for r in requests):
        drafts.add(DRAFT_LENGTH)
    ladder = (0,) if pair.draft is None else (0, *sorted(drafts))
    samples = [min(max(1, r.n), _MOST_SAMPLES) for r in requests]
    return EngineConfig(
        slots=max(min(SLOTS, sum(samples)), 1, *samples),
        source_buckets=(min(bucket, _MOST_SOURCE),),
        max_target_length=min(max([_OUTPUT, *outputs]) + prompt, _MOST_OUTPUT),
        draft_lengths=ladder,
        draft_length=DRAFT_LENGTH if DRAFT_LENGTH in ladder else ladder[-1])


@contextlib.contextmanager
def open_engine(target: str | None = None, draft: str | None = None, *,
                slots: int = BATCH_SLOTS,
                source_buckets: tuple[int, ...] = EngineConfig().source_buckets,
                max_new_tokens: int = _OUTPUT, draft_length: int = DRAFT_LENGTH,
                dtype: str | None = None, mesh: tuple[int, int] = (1, 1),
                sampler: Sampler = Sampler.REJECTION) -> Iterator[BatchEngine]:
    """An engine for ``BatchEngine.generate``, loaded and compiled.

    Args:
      target, draft: checkpoint directories; without a target the bundled pair, without a
        draft plain decoding.
      slots: requests that run at once.
      source_buckets: compiled source lengths in tokens, ascending; the last is the longest
        source.
      max_new_tokens: of a request that names none, and the most of one that does.
      draft_length: the same for drafts per target run; 0 is plain decoding.
      dtype: of the weights; None is bfloat16 on TPU and float32 elsewhere.
      mesh: devices that share slots and weights.
      sampler: how drafts are judged (see ``EngineConfig``).

    Raises:
      ValueError: a checkpoint is broken, or a number is out of bounds.
    """
    with models.pair(target, draft) as pair, start(
            pair, slots=slots, source_buckets=source_buckets, max_new_tokens=max_new_tokens,
            draft_length=draft_length, dtype=dtype, mesh=mesh, sampler=sampler) as engine:
        yield engine


@contextlib.contextmanager
def start(pair: models.Pair, *, slots: int, source_buckets: tuple[int, ...], max_new_tokens: int,
          draft_length: int, dtype: str | None, mesh: tuple[int, int],
          sampler: Sampler) -> Iterator[BatchEngine]:
    """As ``open_engine``, for a pair that was found already."""
    if pair.draft is None:
        draft_length = 0
    config = EngineConfig(
        slots=slots, source_buckets=source_buckets, max_target_length=max_new_tokens,
        draft_lengths=(0, draft_length) if draft_length else (0,), draft_length=draft_length,
        sampler=sampler)
    served = models.load(pair, config, dtype=dtype, mesh_shape=mesh)
    models.warm_up(served.engine, measure=False)
    engine = BatchEngine(served.engine, served.vocabulary, eos_id=served.info.eos_id)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
