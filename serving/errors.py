"""How a request can fail. Imports nothing, so that clients may use it."""

import enum


class ErrorCode(enum.Enum):
    """How a request can fail; the names are gRPC's."""

    INVALID_ARGUMENT = enum.auto()
    RESOURCE_EXHAUSTED = enum.auto()
    DEADLINE_EXCEEDED = enum.auto()
    CANCELLED = enum.auto()
    UNAVAILABLE = enum.auto()
    INTERNAL = enum.auto()


class RequestError(Exception):
    """Ends one request; neighbours are not concerned."""

    def __init__(self, code: ErrorCode, message: str, *, retry_after: float | None = None):
        """``retry_after``: seconds after which the same request may succeed."""
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after
