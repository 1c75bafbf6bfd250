"""What the Open Inference Protocol's clients are told of the one model."""

from tpuspec.protos import generation_pb2 as pb
from tpuspec.protos import open_inference_pb2 as oip
from tpuspec.serving.engine_loop import Totals
from tpuspec.serving.validation import MAX_PRIORITY

VERSION = "1"
PLATFORM = "tpuspec"
MIDDLE_LEVEL = MAX_PRIORITY + 1  # Triton's levels of priority begin with 1, which goes first
LEVELS = 2 * MAX_PRIORITY + 1
_INPUTS = (("text_input", "BYTES", oip.TYPE_STRING, 1),
           ("input_ids", "INT32", oip.TYPE_INT32, -1))
_OUTPUTS = (("text_output", "BYTES", oip.TYPE_STRING, 1),
            ("token_ids", "INT32", oip.TYPE_INT32, -1),
            ("finish_reason", "BYTES", oip.TYPE_STRING, 1))


def metadata(name: str) -> oip.ModelMetadataResponse:
    """The protocol's own description."""
    tensor = oip.ModelMetadataResponse.TensorMetadata
    return oip.ModelMetadataResponse(
        name=name, versions=[VERSION], platform=PLATFORM,
        inputs=[tensor(name=of, datatype=datatype, shape=[size])
                for of, datatype, _, size in _INPUTS],
        outputs=[tensor(name=of, datatype=datatype, shape=[size])
                 for of, datatype, _, size in _OUTPUTS])


def config(name: str) -> oip.ModelConfig:
    """Triton's, as far as its clients look at it."""
    return oip.ModelConfig(
        name=name, platform=PLATFORM, backend=PLATFORM, max_batch_size=0,
        input=[oip.ModelInput(name=of, data_type=kind, dims=[size], optional=True)
               for of, _, kind, size in _INPUTS],
        output=[oip.ModelOutput(name=of, data_type=kind, dims=[size])
                for of, _, kind, size in _OUTPUTS],
        dynamic_batching=oip.ModelDynamicBatching(
            priority_levels=LEVELS, default_priority_level=MIDDLE_LEVEL),
        model_transaction_policy=oip.ModelTransactionPolicy(decoupled=True))


def statistics(name: str, load: pb.Load, totals: Totals) -> oip.ModelStatistics:
    """Triton's, of all requests so far."""
    def spent(count: int, seconds: float) -> oip.StatisticDuration:
        return oip.StatisticDuration(count=count, ns=round(1e9 * seconds))

    done = load.finished
    return oip.ModelStatistics(
        name=name, version=VERSION, last_inference=round(1e3 * totals.last),
        inference_count=done, execution_count=totals.steps,
        inference_stats=oip.InferStatistics(
            success=spent(done, totals.finished),
            fail=spent(load.cancelled + load.failed, totals.lost),
            queue=spent(done, totals.queue),
            compute_infer=spent(done, totals.finished - totals.queue)))
