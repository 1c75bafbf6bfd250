"""Messages of the Open Inference Protocol to ours and back; tensors are bytes and numbers."""

import dataclasses
import math
import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tpuspec.protos import generation_pb2 as pb
from tpuspec.protos import open_inference_pb2 as oip
from tpuspec.serving import named_options
from tpuspec.serving.inference_model import LEVELS, MIDDLE_LEVEL

OUTPUTS = ("text_output", "token_ids", "finish_reason")
_PREFIX = "parameters."
_MOST_DIMENSIONS = 8
NAMES = {**named_options.names(_PREFIX), "request_id": "id", "source": "inputs",
         "text": "text_input", "token_ids": "input_ids",
         "max_new_tokens": _PREFIX + "max_tokens"}
_REASONS: Mapping[pb.FinishReason, str] = {
    pb.FINISH_REASON_EOS: "eos_token", pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_STOP: "stop_sequence"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks for.

    Attributes:
      message: as our own dialect has it.
      timeout: seconds that it may take; None is for ever.
      empty_final: an empty response is to follow the last one.
      outputs: names of the tensors that are sent.
    """

    message: pb.GenerateRequest
    timeout: float | None
    empty_final: bool
    outputs: frozenset[str]


def asked(request: oip.ModelInferRequest) -> Asked:
    """Raises ValueError beginning with the field's name."""
    message = pb.GenerateRequest(request_id=request.id)
    _source(request, message)
    timeout, empty_final = None, False
    for name, parameter in request.parameters.items():
        named_options.check_name("parameters", name)
        value = _value(name, parameter)
        match name:
            case "triton_enable_empty_final_response" if isinstance(value, bool):
                empty_final = value
            case "timeout" if isinstance(value, int) and not isinstance(value, bool):
                if value < 0:
                    raise ValueError(f"parameters.timeout must be at least 0, got {value}")
                timeout = 1e-6 * value or None
            case "max_new_tokens":
                raise ValueError(f"{_PREFIX}{name} is not an option: max_tokens is")
            case "priority":
                message.priority = _priority(value)
            case _:
                option = "max_new_tokens" if name == "max_tokens" else name
                try:
                    named_options.set_option(message, option, value)
                except ValueError as error:
                    raise ValueError(_PREFIX + name + str(error).removeprefix(option)) from None
    return Asked(message=message, timeout=timeout, empty_final=empty_final,
                 outputs=_outputs(request))


def _priority(level: named_options.Value) -> int:
    """Triton's level as ours: the lowest number goes first, and 0 is the middle."""
    if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= LEVELS:
        raise ValueError(f"{_PREFIX}priority must be an integer in [0, {LEVELS}]")
    return MIDDLE_LEVEL - (level or MIDDLE_LEVEL)


def _value(name: str, parameter: oip.InferParameter) -> named_options.Value:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise ValueError(f"{_PREFIX}{name} must have a value")
    value: named_options.Value = getattr(parameter, kind)
    return value


def _outputs(request: oip.ModelInferRequest) -> frozenset[str]:
    for place, output in enumerate(request.outputs):
        if output.name not in OUTPUTS:
            raise ValueError(f"outputs[{place}].name must be one of {', '.join(OUTPUTS)}")
        if output.parameters:
            raise ValueError(f"outputs[{place}].parameters must be empty, got "
                             f"{len(output.parameters)}")
    return frozenset(output.name for output in request.outputs) or frozenset(OUTPUTS)


def _source(request: oip.ModelInferRequest, message: pb.GenerateRequest) -> None:
    if len(request.inputs) != 1:
        raise ValueError(f"inputs must be one of text_input and input_ids, got "
                         f"{len(request.inputs)} tensors")
    tensor, raw = request.inputs[0], request.raw_input_contents
    if tensor.parameters:
        raise ValueError(f"inputs[0].parameters must be empty, got {len(tensor.parameters)}")
    if raw and tensor.HasField("contents"):
        raise ValueError("raw_input_contents must be empty where inputs have contents")
    if raw and len(raw) != 1:
        raise ValueError(f"raw_input_contents must be one for each of 1 inputs, got {len(raw)}")
    match tensor.name:
        case "text_input":
            _check_datatype(tensor, "BYTES")
            texts = _bytes(raw[0]) if raw else list(tensor.contents.bytes_contents)
            _check_shape(tensor, len(texts))
            if len(texts) != 1:
                raise ValueError(f"text_input must have 1 element, got {len(texts)}")
            try:
                message.text = texts[0].decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"text_input must be UTF-8: {error.reason} at byte "
                                 f"{error.start}") from None
        case "input_ids":
            _check_datatype(tensor, "INT32")
            ids = _integers(raw[0]) if raw else tensor.contents.int_contents
            _check_shape(tensor, len(ids))
            message.token_ids.SetInParent()
            message.token_ids.ids.extend(ids)
        case _:
            raise ValueError("inputs[0].name must be text_input or input_ids")


def _check_datatype(tensor: oip.ModelInferRequest.InferInputTensor, datatype: str) -> None:
    if tensor.datatype != datatype:
        raise ValueError(f"inputs[0].datatype must be {datatype} for {tensor.name}")


def _check_shape(tensor: oip.ModelInferRequest.InferInputTensor, count: int) -> None:
    shape = tensor.shape
    if len(shape) > _MOST_DIMENSIONS or any(size < 0 for size in shape) or (
            math.prod(shape) != count):
        raise ValueError(f"inputs[0].shape must hold the {count} elements that came, got "
                         f"{list(shape[:_MOST_DIMENSIONS])}")


def _bytes(raw: bytes) -> list[bytes]:
    """Elements of a BYTES tensor: each its length, four bytes little-endian, and itself."""
    elements, place = [], 0
    while place < len(raw):
        length = int.from_bytes(raw[place:place + 4], "little")
        element = raw[place + 4:place + 4 + length]
        if place + 4 + length > len(raw):
            raise ValueError(f"raw_input_contents[0] must have {length} bytes after its length, "
                             f"got {len(element)}")
        elements.append(element)
        place += 4 + length
    return elements


def _integers(raw: bytes) -> Sequence[int]:
    if len(raw) % 4:
        raise ValueError(f"raw_input_contents[0] must be of INT32, got {len(raw)} bytes")
    ids: list[int] = np.frombuffer(raw, "<i4").tolist()
    return ids


def answer(request: oip.ModelInferRequest, model: str, version: str,
           responses: Iterable[pb.GenerateResponse], outputs: frozenset[str], *,
           final: bool) -> oip.ModelInferResponse:
    """One message of one or more consecutive responses.

    Args:
      request: whose id is echoed.
      model, version: that answered.
      responses: in order; the last of all brings the finish reason.
      outputs: tensors that were asked for.
      final: no message follows.
    """
    responses = list(responses)
    message = empty(request, model, version, final=final)
    message.parameters["drafted"].int64_param = sum(r.drafted for r in responses)
    message.parameters["accepted"].int64_param = sum(r.accepted for r in responses)
    ids = [token.id for r in responses for token in r.tokens]
    tensors = [("text_output", "BYTES", 1, _element("".join(r.text for r in responses))),
               ("token_ids", "INT32", len(ids), np.asarray(ids, "<i4").tobytes())]
    last = responses[-1]
    if last.HasField("finish"):
        tensors.append(("finish_reason", "BYTES", 1, _element(_REASONS[last.finish.reason])))
        if last.finish.inexact:
            message.parameters["inexact"].bool_param = True
        for name in ("alpha", "c"):
            if last.speculation.HasField(name):
                message.parameters[name].double_param = getattr(last.speculation, name)
    for name, datatype, count, raw in tensors:
        if name in outputs:
            message.outputs.add(name=name, datatype=datatype, shape=[count])
            message.raw_output_contents.append(raw)
    return message


def empty(request: oip.ModelInferRequest, model: str, version: str, *,
          final: bool) -> oip.ModelInferResponse:
    """A message without tensors."""
    message = oip.ModelInferResponse(model_name=model, model_version=version, id=request.id)
    message.parameters["triton_final_response"].bool_param = final
    return message


def _element(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data
