"""Writes the lock files from the versions installed beside the running Python.

    .venv/bin/python tools/write_locks.py

``requirements.lock`` holds what a user needs: the dependencies of pyproject.toml
with all that they pull in, and the build backend, since ./tools/run installs the
project without an isolated build. ``requirements-test.lock`` holds what the test
suite needs beyond that. To take newer versions, upgrade them in .venv, run the
suite, then run this.
"""

import pathlib
import tomllib
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parent.parent


def closure(requirements: Iterable[str]) -> dict[str, str]:
    """Name to installed version of the requirements and all that they need here.

    Raises:
      importlib.metadata.PackageNotFoundError: one of them is not installed.
      ValueError: an installed version does not satisfy a requirement.
    """
    pins: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, parent_extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": parent_extra}):
            continue
        distribution = metadata.distribution(requirement.name)
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            raise ValueError(f"{requirement} must hold, got {distribution.version}")
        name = canonicalize_name(requirement.name)
        pins[name] = distribution.version
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [(Requirement(text), extra) for text in distribution.requires or ()]
    return pins


def write(path: pathlib.Path, pins: dict[str, str]) -> None:
    head = "# Made by tools/write_locks.py.\n"
    path.write_text(head + "".join(f"{name}=={pins[name]}\n" for name in sorted(pins)))
    print(f"{path.name}: {len(pins)} packages")


def main() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    user = closure(project["dependencies"] + pyproject["build-system"]["requires"])
    test = closure(project["optional-dependencies"]["test"])
    write(ROOT / "requirements.lock", user)
    write(
        ROOT / "requirements-test.lock",
        {name: version for name, version in test.items() if name not in user},
    )


if __name__ == "__main__":
    main()
