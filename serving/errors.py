"""How a request can fail. Imports nothing, so that clients may use it."""

import enum
from collections.abc import Mapping


class ErrorCode(enum.Enum):
    """How a request can fail; the names are gRPC's."""

    INVALID_ARGUMENT = enum.auto()
    NOT_FOUND = enum.auto()
    RESOURCE_EXHAUSTED = enum.auto()
    FAILED_PRECONDITION = enum.auto()
    DEADLINE_EXCEEDED = enum.auto()
    CANCELLED = enum.auto()
    UNAVAILABLE = enum.auto()
    INTERNAL = enum.auto()


class RequestError(Exception):
    """Ends one request; neighbours are not concerned."""

    def __init__(self, code: ErrorCode, message: str, *, field: str | None = None,
                 retry_after: float | None = None):
        """
        Args:
          code: the status.
          message: for people.
          field: which one was refused, where the message begins with it.
          retry_after: seconds after which the same request may succeed, an estimate.
        """
        super().__init__(message)
        self.code = code
        self.field = field
        self.retry_after = retry_after

    @classmethod
    def of_field(cls, error: ValueError) -> "RequestError":
        """What the door refused: its messages begin with the field's name."""
        return cls(ErrorCode.INVALID_ARGUMENT, str(error), field=str(error).partition(" ")[0])

    def renamed(self, names: Mapping[str, str]) -> "RequestError":
        """The same for clients who know fields by other names; indices stay as they are."""
        if self.field is None:
            return self
        known, bracket, index = self.field.partition("[")
        field = names.get(known, known) + bracket + index
        message = field + str(self).removeprefix(self.field)
        return RequestError(self.code, message, field=field, retry_after=self.retry_after)
