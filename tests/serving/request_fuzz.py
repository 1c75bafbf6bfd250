"""Requests out of range and out of shape, made from the descriptors of all three dialects."""

import dataclasses
import math
import random
import struct
from collections.abc import Callable

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from tpuspec.protos import generation_pb2 as pb
from tpuspec.protos import jetstream_pb2 as jet
from tpuspec.protos import open_inference_pb2 as oip

METHODS: list[MethodDescriptor] = [
    method for protos in (pb, jet, oip)
    for service in protos.DESCRIPTOR.services_by_name.values() for method in service.methods]
_GENERATING = [method for method in METHODS if "Generate" in method.name
               or "Decode" in method.name or "Infer" in method.name]
_F = FieldDescriptor
_INTEGERS = (0, 1, -1, 2, 5, 8, 9, 20, 21, 64, 100, 101, 1999, 2000, 2**31 - 1, -2**31)
_WIDE = (*_INTEGERS, 2**63 - 1, -2**63)
_NUMBERS = (0.0, -0.0, 1.0, 0.5, -0.1, 1e-4, 2.5, 101.0, 1e38, 1e-45, math.nan, math.inf, -math.inf)
_TEXTS = ("", "zero", "one two", "\0", "\n\n", "</s>", "💥" * 3, "a" * 300, "[", '["a", 5]',
          "token_ids", "count", "1", "text_input", "input_ids", "BYTES", "INT32", "é" * 70)
_BYTES = (b"", b"\xff" * 9, struct.pack("<I", 4) + b"zero", struct.pack("<I", 2**32 - 1),
          struct.pack("<3i", 10, 5, 1), b"\xed\xa0\x80")
_OPTIONS = [*pb.Sampling.DESCRIPTOR.fields_by_name, *pb.GenerateRequest.DESCRIPTOR.fields_by_name,
            "max_tokens", "timeout", "priority", "sequence_id", "details", "colour",
            "triton_enable_empty_final_response"]


@dataclasses.dataclass(frozen=True)
class Fuzzed:
    """What to send.

    Attributes:
      method: to which.
      data: the bytes of one request.
      metadata: beside it.
      malformed: the bytes may be no message at all.
    """

    method: MethodDescriptor
    data: bytes
    metadata: tuple[tuple[str, str], ...]
    malformed: bool


def fuzzed(rng: random.Random) -> Fuzzed:
    method = rng.choice(_GENERATING if rng.random() < 0.9 else METHODS)
    message = _valid(method.input_type) if rng.random() < 0.7 else _new(method.input_type)
    for _ in range(rng.choice((1, 1, 2, 5))):
        _disturb(message, rng, depth=0)
    if isinstance(message, oip.ModelInferRequest):
        for _ in range(rng.choice((0, 0, 1, 2))):
            name = rng.choice((*_OPTIONS, "two words", "p" * 20_000))
            _fill(message.parameters[name], rng, depth=3)
    data, malformed = message.SerializeToString(), False
    damage = rng.random()
    if damage < 0.1:  # a field that nobody has
        data += bytes([0xf8, 0x3f, rng.randrange(128)])
    elif damage < 0.2:
        data, malformed = data[:rng.randrange(len(data) + 1)], True
    elif damage < 0.25 and data:
        place = rng.randrange(len(data))
        data = data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1:]
        malformed = True
    elif damage < 0.3:
        data, malformed = rng.randbytes(rng.randrange(40)), True
    metadata: tuple[tuple[str, str], ...] = ()
    if rng.random() < 0.2:
        values = ("0", "-1", "1.5", "nan", "true", "[1, 2000]", '{"5": 1}', "", "[", "x" * 200)
        metadata = ((f"x-tpuspec-{rng.choice(_OPTIONS)}", rng.choice(values)),)
    return Fuzzed(method, data, metadata, malformed)


def _new(kind: Descriptor) -> Message:
    return message_factory.GetMessageClass(kind)()


def _valid(kind: Descriptor) -> Message:
    """A small request that is in order."""
    if kind is pb.GenerateRequest.DESCRIPTOR:
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[10, 5]))
    if kind is jet.DecodeRequest.DESCRIPTOR:
        return jet.DecodeRequest(token_content=jet.DecodeRequest.TokenContent(token_ids=[10, 5]))
    if kind is oip.ModelInferRequest.DESCRIPTOR:
        return oip.ModelInferRequest(model_name="count", inputs=[dict(
            name="text_input", datatype="BYTES", shape=[1],
            contents=dict(bytes_contents=[b"zero"]))])
    return _new(kind)


def _disturb(message: Message, rng: random.Random, depth: int) -> None:
    """Sets one field of the message, or of one inside it, to something."""
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(fields)
    value = getattr(message, field.name)
    if isinstance(value, Message):
        if rng.random() < 0.2:
            value.SetInParent()
        elif depth < 4:
            _disturb(value, rng, depth + 1)
        return
    single = _scalar(field, rng)
    if single is not None and isinstance(value, bool | int | float | str | bytes):
        setattr(message, field.name, single())
        return
    count = rng.choice((0, 1, 2, 9, 70) if depth == 0 else (0, 1, 2))
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, item = field.message_type.fields
        of_key, of_item = _scalar(key, rng), _scalar(item, rng)
        for _ in range(count):
            assert of_key is not None
            if of_item is None:
                _fill(value[of_key()], rng, depth + 1)
            else:
                value[of_key()] = of_item()
    elif single is None:
        for _ in range(min(count, 3)):
            _fill(value.add(), rng, depth + 1)
    else:
        value.extend(single() for _ in range(count))


def _fill(message: Message, rng: random.Random, depth: int) -> None:
    for _ in range(3):
        _disturb(message, rng, depth)


def _scalar(field: FieldDescriptor, rng: random.Random) -> Callable[[], object] | None:
    """Makes values of the field's type; None for messages."""
    match field.type:
        case _F.TYPE_BOOL:
            return lambda: rng.random() < 0.5
        case _F.TYPE_INT32 | _F.TYPE_ENUM:
            return lambda: rng.choice(_INTEGERS)
        case _F.TYPE_INT64:
            return lambda: rng.choice(_WIDE)
        case _F.TYPE_UINT32:
            return lambda: abs(rng.choice(_INTEGERS))
        case _F.TYPE_UINT64:
            return lambda: abs(rng.choice(_WIDE))
        case _F.TYPE_DOUBLE | _F.TYPE_FLOAT:
            return lambda: rng.choice(_NUMBERS)
        case _F.TYPE_STRING:
            return lambda: rng.choice(_TEXTS)
        case _F.TYPE_BYTES:
            return lambda: rng.choice(_BYTES)
    assert field.type == _F.TYPE_MESSAGE
    return None
