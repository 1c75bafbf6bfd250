"""What the Open Inference Protocol's clients are told of the one model."""

from tpuspec.protos import open_inference_pb2 as oip

VERSION = "1"
PLATFORM = "tpuspec"
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
        model_transaction_policy=oip.ModelTransactionPolicy(decoupled=True))
