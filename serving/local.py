"""An engine in this process, just large enough for the requests at hand."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence

from tpuspec.config import EngineConfig
from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving import models
from tpuspec.serving.engine_loop import EngineLoop
from tpuspec.serving.service import GenerationService

SLOTS = 4
_MOST_SOURCE = 2048  # tokens
_OUTPUT, _MOST_OUTPUT = 256, 4096  # tokens; the first if no request asks for more
_DRAFT_LENGTH, _MOST_DRAFTS = 3, 16


@contextlib.contextmanager
def session(args: argparse.Namespace, requests: Sequence[pb.GenerateRequest],
            ) -> Iterator[GenerationService]:
    """Loads, warms up and runs the pair that the flags name.

    Only what the requests need is compiled: one source length, and plain decoding
    beside the draft lengths asked for.
    """
    with models.pair(args.target, args.draft) as pair:
        config = _config(requests, pair)
        served = models.load(pair, config, dtype=args.dtype, mesh_shape=args.mesh)
    models.warm_up(served.engine)
    loop = EngineLoop(served.engine, served.vocabulary, queue_limit=SLOTS)
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
    drafts = {min(r.draft_length, _MOST_DRAFTS) for r in requests if r.draft_length > 0}
    if not all(r.HasField("draft_length") for r in requests):
        drafts.add(_DRAFT_LENGTH)
    ladder = (0,) if pair.draft is None else (0, *sorted(drafts))
    return EngineConfig(
        slots=min(SLOTS, max(1, len(requests))),
        source_buckets=(min(bucket, _MOST_SOURCE),),
        max_target_length=min(max([_OUTPUT, *outputs]), _MOST_OUTPUT), draft_lengths=ladder,
        draft_length=_DRAFT_LENGTH if _DRAFT_LENGTH in ladder else ladder[-1])
