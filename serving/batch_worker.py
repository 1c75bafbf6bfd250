"""The worker's side of ``tpuspec batch --ray``: an engine in a process of a cluster.

Importing this module imports no JAX: a worker's platform is chosen before that.
"""

import contextlib
import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpuspec import platform
from tpuspec.protos import generation_pb2 as pb

if TYPE_CHECKING:
    from tpuspec.serving.batch_engine import Answer, BatchEngine
    from tpuspec.serving.records import Failure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What every worker makes its engine of.

    Attributes:
      target, draft: as every host finds them; without a target the bundled pair.
      identity: of both, as ``batch_job.checkpoint_identity`` gives it.
      platform: of JAX; None is what the host has.
      options: of ``local.start``.
    """

    target: str | None
    draft: str | None
    identity: Mapping[str, str | None]
    platform: str | None
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker runs."""

    host: str
    pid: int


class Worker:
    """An actor's class."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._stack = contextlib.ExitStack()
        self._engine: BatchEngine

    def start(self) -> Place:
        """Loads and compiles.

        Raises:
          ValueError: this host has other models, or an engine of them cannot be made here.
        """
        setup = self._setup
        platform.choose(setup.platform)
        from tpuspec.serving import local, models
        from tpuspec.serving.batch_job import checkpoint_identity
        host = socket.gethostname()
        pair = self._stack.enter_context(models.pair(setup.target, setup.draft))
        for name, path in (("target", pair.target), ("draft", pair.draft)):
            if path is not None and checkpoint_identity(path) != setup.identity[name]:
                raise ValueError(f"{name} must be the job's on every host, got other files, or "
                                 f"none, at {path} on {host}")
        self._engine = self._stack.enter_context(local.start(pair, **setup.options))
        return Place(host=host, pid=os.getpid())

    def check(self, request: bytes) -> None:
        """Raises ValueError if a request is out of bounds."""
        self._engine.check(pb.GenerateRequest.FromString(request))

    def answer(self, requests: Sequence[bytes]) -> "list[tuple[int, Answer | Failure]]":
        """The answers with their requests' places in the sequence, in any order.

        Raises:
          RequestError: the engine failed.
        """
        return list(self._engine.completed(map(pb.GenerateRequest.FromString, requests)))
