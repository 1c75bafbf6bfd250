"""pyproject.toml and the lock files against the tree and against each other."""

import pathlib
import re
import sys
import tomllib
from importlib import metadata

import test_layering
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tpuspec

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PIN = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)==([0-9][0-9A-Za-z.+!]*)")
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
# Where a distribution's import name is another.
IMPORT_NAMES = {
    "absl-py": "absl",
    "googleapis-common-protos": "google",
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "orbax-checkpoint": "orbax",
    "prometheus-client": "prometheus_client",
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-grpc": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "protobuf": "google",
}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    matches = [PIN.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(matches), f"{name}: lines must have the form name==version"
    return {match[1]: match[2] for match in matches if match}


def test_packages_listed_are_the_folders_on_disk() -> None:
    roots = {"tpuspec": ROOT / "tpuspec"} | {
        name: ROOT / folder for name, folder in SETUPTOOLS["package-dir"].items()
    }
    found = {
        ".".join((package, *init.parent.relative_to(folder).parts))
        for package, folder in roots.items()
        for init in folder.rglob("__init__.py")
    }
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)


def test_every_module_lies_in_a_listed_package() -> None:
    packages = set(SETUPTOOLS["packages"])
    stray = {
        module
        for module, path in test_layering.MODULES.items()
        if path.name != "__init__.py" and module.rpartition(".")[0] not in packages
    }
    assert not stray


def test_dependencies_are_the_imported_distributions() -> None:
    imported = {
        test_layering.package_of(name)
        for path in test_layering.MODULES.values()
        for name in test_layering.imports_of(path)
    }
    extras = PROJECT["optional-dependencies"]
    declared = {
        IMPORT_NAMES.get(Requirement(text).name, Requirement(text).name)
        for text in PROJECT["dependencies"] + extras["otel"] + extras["ray"] + extras["score"]
    }
    assert imported - set(test_layering.FOLDERS) - sys.stdlib_module_names == declared


def test_every_dependency_is_pinned_within_its_range() -> None:
    locked = pins("requirements.lock")
    for text in PROJECT["dependencies"] + PYPROJECT["build-system"]["requires"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)])


def test_every_test_dependency_is_pinned_within_its_range() -> None:
    locked = pins("requirements.lock") | pins("requirements-test.lock")
    for text in PROJECT["optional-dependencies"]["test"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)])


def test_the_locks_do_not_overlap_and_leave_torch_out() -> None:
    user, test = pins("requirements.lock"), pins("requirements-test.lock")
    assert not user.keys() & test.keys()
    assert "torch" not in user.keys() | test.keys()


def test_what_the_locked_packages_need_is_locked_too() -> None:
    """The locks install without a resolver, so nothing may be missing."""
    locked = pins("requirements.lock") | pins("requirements-test.lock")
    for name in locked:
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                version = locked[canonicalize_name(requirement.name)]
                assert requirement.specifier.contains(version, prereleases=True), (name, text)


def test_public_names_resolve() -> None:
    for name in tpuspec.__all__:
        assert getattr(tpuspec, name).__name__ == name


def test_the_installed_version_is_that_of_the_tree() -> None:
    assert metadata.version("tpuspec") == PROJECT["version"]


def test_files_named_in_the_readme_exist() -> None:
    named = re.findall(r"`(?:\./)?((?:\w+/)+[\w.]*)[` ]", (ROOT / "README.md").read_text())
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
