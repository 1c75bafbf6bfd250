"""Profiler traces of this process, in xprof's format."""

import datetime
import os
import pathlib
import tempfile

import jax


class Profiler:
    """Traces what the devices, the runtime and the compiler's programs do, one trace at a time.

    Calls of Python functions are left out: to trace them would slow down all of them.

    Args:
      directory: where traces go, each into a new directory of its own; made if need be.

    Raises:
      OSError: nothing can be written there.
    """

    def __init__(self, directory: os.PathLike[str] | str):
        self._directory = pathlib.Path(directory).expanduser().resolve()
        self._directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._directory):
            pass  # better known now than when a trace is wanted

    def start(self) -> pathlib.Path:
        """Begins a trace and returns the directory where it will lie.

        Raises:
          RuntimeError: one is running already in this process.
        """
        now = datetime.datetime.now(datetime.UTC)
        directory = self._directory / f"trace-{now:%Y%m%dT%H%M%S.%fZ}"
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(directory, profiler_options=options)
        return directory

    def stop(self) -> None:
        """Ends the trace and writes it.

        Raises:
          RuntimeError: none is running.
        """
        jax.profiler.stop_trace()
