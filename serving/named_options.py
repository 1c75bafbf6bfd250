"""Options of a request by name, for dialects that carry them as loose keys and values."""

import json
import re
from collections.abc import Mapping

from google.protobuf import json_format
from google.protobuf.message import Message

from tpuspec.protos import generation_pb2 as pb

type Value = bool | int | float | str

_SAMPLING = set(pb.Sampling.DESCRIPTOR.fields_by_name)
# Not options: what a dialect has fields of its own for, and what is no single value. "n" is a
# number of outputs, of which the translations of responses know one.
_REQUEST = set(pb.GenerateRequest.DESCRIPTOR.fields_by_name) - {
    "request_id", "text", "token_ids", "sampling", "decoder_token_ids", "n"}
_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_TEXTS = "stop"  # a list of texts; one may come as it is
_LONGEST = 60  # characters of a bad value that are repeated to the client


def set_option(request: pb.GenerateRequest, name: str, value: Value) -> None:
    """Sets the field of the request, or of its sampling, that has this name.

    Args:
      request: is changed.
      name: as in protos/generation.proto.
      value: of the field's kind; a text is read as JSON where the field is none itself, so
        that lists, maps and what came as metadata fit, too. ``stop`` is a JSON list, or one
        stop that does not begin with "[".

    Raises:
      ValueError: beginning with the name: there is no such option, or the value is of
        another kind. Bounds are for the door.
    """
    home: Message
    if name in _SAMPLING:
        home = request.sampling
    elif name in _REQUEST:
        home = request
    else:
        raise ValueError(f"{name} is not an option of this server")
    default = getattr(type(home)(), name)
    try:
        json_format.ParseDict({name: _json(name, default, value)}, home)
    except (ValueError, TypeError, json_format.ParseError):
        shown = repr(value)
        if len(shown) > _LONGEST:
            shown = shown[:_LONGEST] + "..."
        raise ValueError(f"{name} must be {_kind(name, default)}, got {shown}") from None


def check_name(where: str, name: str) -> None:
    """Raises ValueError on what is no name at all: it would be repeated in the error.

    Args:
      where: the names are, which the message begins with.
      name: as the client gave it.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{where} must have names of 1 to 64 letters, digits and underscores")


def names(prefix: str) -> Mapping[str, str]:
    """What the door calls an option, to the prefix and its name, for ``RequestError.renamed``."""
    return ({f"sampling.{name}": prefix + name for name in _SAMPLING}
            | {name: prefix + name for name in _REQUEST})


def _json(name: str, default: object, value: Value) -> object:
    if isinstance(value, bool) and not isinstance(default, bool):
        raise ValueError  # would pass as 0 or 1
    if not isinstance(value, str) or isinstance(default, str):
        return value
    if name == _TEXTS and not value.startswith("["):
        return [value]
    return json.loads(value)


def _kind(name: str, default: object) -> str:
    match default:
        case bool():
            return "true or false"
        case int():
            return "an integer of its size"
        case float():
            return "a number"
        case str():
            return "a text"
        case Mapping():
            return "a JSON object"
        case _:
            return "a text, or a JSON list of texts" if name == _TEXTS else "a JSON list"
