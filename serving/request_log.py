"""A line in the log for every request that ended: who, how and how long; never its text."""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging as absl_logging

from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving.errors import RequestError

_MOST_ID = 256  # characters; the door refuses longer ones, and they are logged, too


class RequestLog:
    """What is known of one request.

    Attributes:
      began, first: when it came and when its first tokens did, or None; nanoseconds since 1970.
    """

    def __init__(self, request: pb.GenerateRequest):
        self.began = time.time_ns()
        self.first: int | None = None
        self._request = request
        self._began = time.monotonic()
        self._last: dict[int, pb.GenerateResponse] = {}  # of every sample

    def saw(self, response: pb.GenerateResponse) -> None:
        if self.first is None and response.tokens:
            self.first = time.time_ns()
        self._last[response.index] = response

    def fields(self, code: str, field: str | None) -> dict[str, Any]:
        """What is said of it.

        Args:
          code: name of the status.
          field: which one was refused.
        """
        fields: dict[str, Any] = {
            "request_id": self._request.request_id[:_MOST_ID], "code": code,
            "label": self._request.label[:_MOST_ID],
            "seconds": round(time.monotonic() - self._began, 6)}
        if field is not None:
            fields["field"] = field
        last = [response for _, response in sorted(self._last.items())]
        counts = [response.speculation for response in last]
        if last:
            fields |= {"request_id": last[0].request_id,
                       "new_tokens": sum(s.emitted for s in counts),
                       "target_runs": sum(s.target_runs for s in counts),
                       "drafted": sum(s.drafted for s in counts),
                       "accepted": sum(s.accepted for s in counts)}
        ends = [response.finish for response in last if response.HasField("finish")]
        if len(ends) == max(1, self._request.n):
            fields |= {
                "code": "OK",  # also where the client did not wait for the status
                "finish": ",".join(pb.FinishReason.Name(end.reason).removeprefix("FINISH_REASON_")
                                   for end in ends),
                "source_tokens": ends[0].source_tokens,
                "queue_seconds": round(min(end.timings.queue_seconds for end in ends), 6),
                "first_token_seconds": round(
                    min(end.timings.first_token_seconds for end in ends), 6)}
        return fields


type Ended = Callable[[RequestLog, dict[str, Any]], None]


@contextlib.contextmanager
def of(request: pb.GenerateRequest, ended: Ended | None = None) -> Iterator[RequestLog]:
    """Logs the request's end, however it ends.

    Args:
      request: as it came.
      ended: called then, with what is logged.
    """
    log = RequestLog(request)
    code, field = "CANCELLED", None
    try:
        yield log
        code = "OK"
    except RequestError as error:
        code, field = error.code.name, error.field
        raise
    except Exception:
        code = "UNKNOWN"  # a fault of ours, which gRPC reports by this name
        raise
    finally:
        fields = log.fields(code, field)
        if absl_logging.level_info():
            absl_logging.get_absl_logger().info(
                "request %s", json.dumps(fields), extra={"fields": {"event": "request"} | fields})
        if ended is not None:
            ended(log, fields)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, severity, message, and the fields of a request's line."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
            + f".{int(record.msecs):03d}Z", "severity": record.levelname}
        line |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)



def use_json() -> None:
    """From now on everything that is logged is JSON, one object a line."""
    absl_logging.get_absl_handler().setFormatter(JsonFormatter())
