"""Rows of a JSONL file to requests, and answers to JSON records."""

import codecs
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import grpc
import grpc.aio
from google.protobuf import json_format

from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving.client import make_request
from tpuspec.serving.errors import RequestError


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a row has no output.

    Attributes:
      code: name of the gRPC status.
      message: for people.
      retry_after: seconds after which it may succeed; None is never.
    """

    CAUSES: ClassVar[tuple[type[Exception], ...]] = (RequestError, grpc.aio.AioRpcError)

    code: str
    message: str
    retry_after: float | None = None

    @classmethod
    def of(cls, error: Exception) -> Self:
        if isinstance(error, RequestError):
            return cls(error.code.name, str(error), error.retry_after)
        assert isinstance(error, grpc.aio.AioRpcError)
        trailers = dict(tuple(error.trailing_metadata()))  # an iterator in older versions
        milliseconds = trailers.get("retry-after-ms")
        return cls(error.code().name, error.details() or "",
                   None if milliseconds is None else 1e-3 * int(milliseconds))


@dataclasses.dataclass(frozen=True)
class Row:
    """One source and the name of its answer."""

    id: str
    request: pb.GenerateRequest | Failure


def read_rows(lines: Iterable[bytes], defaults: Mapping[str, Any]) -> Iterator[Row]:
    """One row for each line that is not blank; a bad line is a row that has failed.

    Args:
      lines: JSON objects in UTF-8 with "text" or "token_ids", and if need be "id" and parameters.
      defaults: parameters of ``make_request`` for rows that do not name them.
    """
    for number, line in enumerate(lines):
        if number == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        row_id = str(number)
        try:
            fields = json.loads(line.decode())
            if not isinstance(fields, dict):
                raise ValueError("must be a JSON object")
            row_id = str(fields.pop("id", row_id))
            yield Row(row_id, _request(fields, defaults))
        except ValueError as error:
            yield Row(row_id, Failure("INVALID_ARGUMENT", f"line {number + 1}: {error}"))


def record(row_id: str, result: Sequence[pb.GenerateResponse] | Failure) -> dict[str, Any]:
    """The JSON of one answer."""
    if isinstance(result, Failure):
        return {"id": row_id, "error": {"code": result.code, "message": result.message}}
    speculation, finish = result[-1].speculation, result[-1].finish
    return {
        "id": row_id,
        "text": "".join(response.text for response in result),
        "token_ids": [token.id for response in result for token in response.tokens],
        "finish_reason": finish_reason(finish),
        "source_tokens": finish.source_tokens,
        "new_tokens": finish.new_tokens,
        "seed": finish.seed,
        "draft_length": finish.draft_length,
        **{name: optional(speculation, name) for name in (
            "alpha", "alpha_low", "alpha_high", "alpha_overlap", "draft_acceptance_rate", "c",
            "tokens_per_target_run")},
        **{name: optional(finish, name) for name in ("predicted_speedup", "observed_speedup")},
        "timings": json_format.MessageToDict(
            finish.timings, preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True),
    }


def finish_reason(finish: pb.Finish) -> str:
    return pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()


def optional(message: pb.Speculation | pb.Finish | pb.Cost, name: str) -> float | None:
    """A field's value, or None if it is absent."""
    return getattr(message, name) if message.HasField(name) else None


def _request(fields: dict[str, Any], defaults: Mapping[str, Any]) -> pb.GenerateRequest:
    sources = [fields.pop(name) for name in ("text", "token_ids") if name in fields]
    if len(sources) != 1:
        raise ValueError("must have text or token_ids")
    if unknown := sorted(set(fields) - set(defaults)):
        raise ValueError(f"unknown fields {unknown}")
    return make_request(sources[0], **{**defaults, **fields})
