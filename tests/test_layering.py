"""Which folder may import what, and what follows from it."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = {
    "tpuspec.kernels": "kernels",
    "tpuspec.serving": "serving",
    "tpuspec.protos": "protos",
    "tpuspec": "tpuspec",
}
# Beyond the standard library and the package itself.
MAY_IMPORT = {
    "tpuspec.kernels": {"jax", "jaxtyping"},
    "tpuspec": {
        "tpuspec.kernels", "etils", "flax", "jax", "jaxtyping", "msgpack", "numpy", "orbax",
        "sentencepiece", "tensorstore",
    },
    "tpuspec.serving": {
        "tpuspec", "tpuspec.protos", "absl", "fsspec", "google", "grpc", "grpc_health",
        "grpc_reflection", "numpy", "opentelemetry", "prometheus_client", "ray", "sacrebleu",
        "tqdm",
    },
    "tpuspec.protos": {"google", "grpc"},
}  # fmt: skip
# Modules of serving/ that handle arrays besides.
JAX_IN_SERVING = {"tpuspec.serving.engine_loop", "tpuspec.serving.models"}


def package_of(module: str) -> str:
    """The longest of our packages that holds the module, else its top-level name."""
    for package in FOLDERS:  # the longer names come first
        if module == package or module.startswith(f"{package}."):
            return package
    return module.partition(".")[0]


def product_modules() -> dict[str, pathlib.Path]:
    modules = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            modules[name] = path
    return modules


MODULES = product_modules()


def imports_of(path: pathlib.Path, *, for_types: bool = True) -> set[str]:
    """Absolute names imported anywhere in the file.

    Args:
      for_types: whether to count imports under ``if TYPE_CHECKING``.
    """
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(name if name in MODULES else str(node.module) for name in names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.body if for_types else []
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_its_folder_may(module: str) -> None:
    package = package_of(module)
    allowed = MAY_IMPORT[package] | {package} | sys.stdlib_module_names
    if module in JAX_IN_SERVING:
        allowed |= {"jax"}
    imported = {package_of(name) for name in imports_of(MODULES[module])}
    assert imported <= allowed, f"{module} may not import {sorted(imported - allowed)}"


def test_imports_have_no_cycle() -> None:
    graph = {
        module: {name for name in imports_of(path, for_types=False) if name in MODULES}
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


def test_programs_are_made_in_few_places() -> None:
    """``jit`` and donation in one place keep the number of programs countable."""
    users = {
        module
        for module, path in MODULES.items()
        if any(
            isinstance(node, ast.Attribute) and node.attr in ("jit", "pmap", "shard_map")
            for node in ast.walk(ast.parse(path.read_text()))
        )
        and package_of(module) != "tpuspec.kernels"
    }
    assert users <= {"tpuspec.programs"}


def test_mesh_axes_are_known_to_mesh_only() -> None:
    users = {
        module
        for module, path in MODULES.items()
        if any(
            isinstance(node, ast.Attribute | ast.alias) and name_of(node) == "PartitionSpec"
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert users <= {"tpuspec.mesh"}


def name_of(node: ast.Attribute | ast.alias) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.name


def test_a_client_does_not_wait_for_jax() -> None:
    code = "import sys, tpuspec.serving.client; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
