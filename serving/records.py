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
from tpuspec.serving.error_details import error_details
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
        return cls(error.code().name, error.details() or "", error_details(error).retry_after)


@dataclasses.dataclass(frozen=True)
class Row:
    """One source and the name of its answer.

    Attributes:
      id: as the line gives it, so that answers can be joined with their sources; the
        line's number, from 1, where it gives none.
      request: what is asked, or why the line cannot be read.
      target: the text that the answer is compared with.
    """

    id: str | int
    request: pb.GenerateRequest | Failure
    target: str | None = None


def read_rows(lines: Iterable[bytes], defaults: Mapping[str, Any]) -> Iterator[Row]:
    """One row for each line that is not blank; see ``read_row``."""
    for number, line in enumerate(lines, 1):
        if (row := read_row(number, line, defaults)) is not None:
            yield row


def read_row(number: int, line: bytes, defaults: Mapping[str, Any]) -> Row | None:
    """The row of one line, None for a blank one; a bad line is a row that has failed.

    Args:
      number: of the line, from 1; a byte order mark before the first is skipped.
      line: a JSON object in UTF-8 with "input" (or "text") or "token_ids", and if need
        be "id", "target" and parameters.
      defaults: parameters of ``make_request`` for rows that do not name them.
    """
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    if not line.strip():
        return None
    row_id: str | int = number
    try:
        fields = json.loads(line.decode())
        if not isinstance(fields, dict):
            raise ValueError("must be a JSON object")
        row_id = _id(fields.pop("id", row_id))
        target = fields.pop("target", None)
        if target is not None:
            _check_text("target", target)
        return Row(row_id, _request(fields, defaults), target)
    except RecursionError:
        error = ValueError("is nested too deeply")
    except ValueError as bad:
        error = bad
    return Row(row_id, Failure("INVALID_ARGUMENT", f"line {number}: {error}"))


def record(row_id: str | int, result: Sequence[pb.GenerateResponse] | Failure) -> dict[str, Any]:
    """The JSON of one answer; several samples are a list under "samples"."""
    if isinstance(result, Failure):
        return {"id": row_id, "error": {"code": result.code, "message": result.message}}
    return joined(row_id, [_sample(responses) for responses in by_sample(result)])


def by_sample(responses: Iterable[pb.GenerateResponse]) -> list[list[pb.GenerateResponse]]:
    """The responses of each sample of a request, in the order of the samples."""
    found: dict[int, list[pb.GenerateResponse]] = {}
    for response in responses:
        found.setdefault(response.index, []).append(response)
    return [found[index] for index in sorted(found)]


def joined(row_id: str | int, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON of an answer of that of its samples."""
    if len(samples) > 1:
        return {"id": row_id, "samples": list(samples)}
    return {"id": row_id, **samples[0]}


def _sample(result: Sequence[pb.GenerateResponse]) -> dict[str, Any]:
    speculation, finish = result[-1].speculation, result[-1].finish
    tokens = [token for response in result for token in response.tokens]
    return {
        "text": "".join(response.text for response in result),
        "token_ids": [token.id for token in tokens],
        **logprobs([token.logprob for token in tokens if token.HasField("logprob")],
                   [[(one.id, one.logprob) for one in token.top_logprobs] for token in tokens]),
        **inexact(finish.inexact),
        "finish_reason": finish_reason(finish),
        "source_tokens": finish.source_tokens,
        "new_tokens": finish.new_tokens,
        "seed": finish.seed,
        "draft_length": optional(finish, "draft_length"),
        **{name: optional(speculation, name) for name in (
            "alpha", "alpha_low", "alpha_high", "alpha_overlap", "draft_acceptance_rate", "c",
            "tokens_per_target_run")},
        **{name: optional(finish, name) for name in ("predicted_speedup", "observed_speedup")},
        "timings": json_format.MessageToDict(
            finish.timings, preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True),
    }


def logprobs(tokens: Sequence[float], top: Sequence[Sequence[tuple[int, float]]],
             ) -> dict[str, Any]:
    """The JSON of log-probabilities: their sum and each one; nothing without any.

    Args:
      tokens: of each token, or empty.
      top: ids and log-probabilities of the most likely ids at each token's place.
    """
    if not tokens:
        return {}
    fields: dict[str, Any] = {"logprob": round(sum(tokens), 5),
                              "token_logprobs": [round(value, 5) for value in tokens]}
    if any(top):
        fields["top_logprobs"] = [[[token, round(value, 5)] for token, value in place]
                                  for place in top]
    return fields


def inexact(value: bool) -> dict[str, Any]:
    """The JSON of an output that need not have the target's distribution; else nothing."""
    return {"inexact": True} if value else {}


def finish_reason(finish: pb.Finish) -> str:
    return pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()


def optional(message: pb.Speculation | pb.Finish | pb.Cost, name: str) -> float | None:
    """A field's value, or None if it is absent."""
    return getattr(message, name) if message.HasField(name) else None


def _id(value: Any) -> str | int:
    if isinstance(value, str):
        _check_text("id", value)
    elif not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"id must be a string or an integer, got {json.dumps(value)[:40]}")
    return value


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {json.dumps(value)[:40]}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair
        raise ValueError(f"{name} must be valid Unicode, got half a surrogate pair") from None


def _request(fields: dict[str, Any], defaults: Mapping[str, Any]) -> pb.GenerateRequest:
    sources = {name: fields.pop(name) for name in ("input", "text", "token_ids")
               if name in fields}
    if len(sources) != 1:
        raise ValueError(f"must have exactly one of input, text and token_ids, "
                         f"got {' and '.join(sources) or 'none'}")
    if unknown := sorted(set(fields) - set(defaults)):
        raise ValueError(f"unknown fields {unknown}")
    (name, source), = sources.items()
    if name != "token_ids":
        _check_text(name, source)
    elif not isinstance(source, list):
        raise ValueError(f"token_ids must be a list, got {json.dumps(source)[:40]}")
    return make_request(source, **{**defaults, **fields})
