"""A wheel, made by way of an sdist, holds all that is needed and starts alone."""

import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ("tpuspec", "kernels", "serving", "protos", "pyproject.toml", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
OFFLINE = ("--no-index", "--no-deps")


def package_files(root: pathlib.Path) -> set[str]:
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with only our package, installed from the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"  # a copy: a build leaves its own files in the tree
    tree.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, tree / name)

    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=tree, check=True, stdout=subprocess.DEVNULL
    )
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    wheel_options = ("--no-build-isolation", "--wheel-dir", str(folder))
    subprocess.run([*PIP, "wheel", *OFFLINE, *wheel_options, str(unpacked)], check=True)
    (wheel,) = folder.glob("*.whl")
    target = folder / "target"
    subprocess.run([*PIP, "install", *OFFLINE, "--target", str(target), str(wheel)], check=True)
    return target


def run(installed: pathlib.Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        command, env=environment, cwd=installed, check=True, text=True, capture_output=True
    )
    return done.stdout


def test_the_wheel_holds_every_file_of_the_packages(installed: pathlib.Path) -> None:
    wanted = package_files(ROOT / "tpuspec")
    for folder in ("kernels", "serving", "protos"):
        wanted |= {f"{folder}/{name}" for name in package_files(ROOT / folder)}
    assert package_files(installed / "tpuspec") == wanted


def test_the_wheel_brings_nothing_else_to_the_top_level(installed: pathlib.Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"tpuspec", "bin"}


def test_every_package_imports_from_the_wheel(installed: pathlib.Path) -> None:
    code = """
import tpuspec, tpuspec.kernels, tpuspec.protos, tpuspec.serving
import tpuspec.serving.client, tpuspec.engine
for module in (tpuspec, tpuspec.kernels, tpuspec.protos, tpuspec.serving):
    print(module.__file__)
"""
    places = run(installed, sys.executable, "-c", code).split()
    assert len(places) == 4
    assert all(place.startswith(str(installed)) for place in places)


def test_the_console_script_starts_from_the_wheel(installed: pathlib.Path) -> None:
    help_text = run(installed, str(installed / "bin" / "tpuspec"), "--help")
    assert "demo" in help_text and "serve" in help_text
