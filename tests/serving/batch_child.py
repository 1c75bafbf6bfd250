"""``tpuspec batch`` around the fake engine: in this process, or in one that is killed.

In a module of its own, because a child process must find it by name.
"""

import contextlib
import pathlib
from collections.abc import Callable

from fake_engine import FakeEngine, FakeVocabulary

from tpuspec.serving import batch, batch_job, models
from tpuspec.serving.cli import make_parser
from tpuspec.serving.service import ModelInfo

type Patch = Callable[[object, str, object], None]


def install(patch: Patch, directory: pathlib.Path, **engine_options) -> list[FakeEngine]:
    """Puts the fake engine in place of the models; returns the list of those made."""
    engines: list[FakeEngine] = []
    for name in ("target", "draft"):
        (directory / name).mkdir(exist_ok=True)
        (directory / name / "weights").write_text(name)

    def load(_, config, **__):
        engines.append(FakeEngine(config, **engine_options))
        return models.Served(engine=engines[-1], vocabulary=FakeVocabulary(),
                             info=ModelInfo(name="count"))

    patch(models, "load", load)
    patch(models, "warm_up", lambda engine, **_: None)
    patch(models, "default_dtype", lambda: "float32")
    patch(models, "pair", lambda target, draft: contextlib.nullcontext(models.Pair(
        target=directory / "target", draft=directory / "draft")))
    patch(batch_job, "_MOST_RECORDS", 20)
    return engines


def run(*args: str) -> int:
    return batch.run(make_parser().parse_args(["batch", *args]))


def main(directory: pathlib.Path, args: tuple[str, ...]) -> None:
    """The life of a child."""
    install(setattr, directory)
    raise SystemExit(run(*args))
