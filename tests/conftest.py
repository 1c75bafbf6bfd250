"""Settings that must stand before JAX is imported, for the whole suite.

Helpers beside the tests import by their own names (``from programmable import
...``): ``pythonpath`` in pyproject.toml lists their folders. Names that tests
share are therefore unique across those folders.
"""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# With the root of the repository on the path, `import kernels` would find ours
# (under a name it is not installed by) in any package that probes for one.
sys.path[:] = [entry for entry in sys.path if pathlib.Path(entry or ".").resolve() != ROOT]

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
# libtpu, installed for its compiler, would look for a TPU and warn.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"

from tpuspec.platform import processor  # noqa: E402

# Most of the suite's time would be compilation of the same programs again. Programs
# that tests start as a user would use the same folder.
CACHE = ROOT / ".pytest_cache" / "jax" / processor()
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# Begun first, so that no worker is left alone with one of them at the end.
LONGEST = ("test_kernel_report.py", "test_exactness.py", "test_engine.py", "test_engine_kernels.py",
           "test_multihost.py", "test_mesh.py", "test_demo_pair.py", "test_batch_pair.py",
           "test_options.py", "test_quantization.py", "test_engine_draft_lengths.py")


def pytest_collection_modifyitems(items):
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture
def quick_compilation():
    """Programs of toy size take longer to compile than to run. Without most of LLVM's
    work they compile in half the time; what they compute is the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
