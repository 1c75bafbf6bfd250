"""What a status says beside its code and message, as ``google.rpc.Status`` details.

A refused field is a ``BadRequest`` violation; a full queue has ``RetryInfo``. Both travel
in the trailing metadata ``grpc-status-details-bin``, where other languages' clients look.
"""

import dataclasses
from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from tpuspec.serving.errors import RequestError

_KEY = "grpc-status-details-bin"


@dataclasses.dataclass(frozen=True)
class Violation:
    """A field that was refused.

    Attributes:
      field: its path, e.g. ``sampling.top_p`` or ``token_ids[3]``.
      description: for people: field, bound and value.
    """

    field: str
    description: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorDetails:
    """What a server said of a refusal.

    Attributes:
      violations: refused fields; empty if it was not about one.
      retry_after: seconds after which the same request may succeed, an estimate; None is
        not known to.
    """

    violations: tuple[Violation, ...] = ()
    retry_after: float | None = None


def trailers(error: RequestError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata of the status; empty if there is nothing more to say."""
    status = status_pb2.Status(code=grpc.StatusCode[error.code.name].value[0], message=str(error))
    if error.field is not None:
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[
            error_details_pb2.BadRequest.FieldViolation(
                field=error.field, description=str(error))]))
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        # At least a millisecond: no delay would read as "at once".
        delay.FromMilliseconds(max(1, round(1e3 * error.retry_after)))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return ((_KEY, status.SerializeToString()),) if status.details else ()


def error_details(error: grpc.RpcError) -> ErrorDetails:
    """Of what ``Client`` or ``BlockingClient`` raised; empty where the server sent none."""
    call: Any = error  # every error of a call has its trailing metadata
    metadata = call.trailing_metadata() or ()
    violations: list[Violation] = []
    retry_after = None
    for key, value in metadata:
        if key != _KEY:
            continue
        for detail in status_pb2.Status.FromString(value).details:
            refusal, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
            if detail.Unpack(refusal):
                violations += [Violation(v.field, v.description)
                               for v in refusal.field_violations]
            elif detail.Unpack(retry):
                retry_after = 1e-9 * retry.retry_delay.ToNanoseconds()
    return ErrorDetails(violations=tuple(violations), retry_after=retry_after)
