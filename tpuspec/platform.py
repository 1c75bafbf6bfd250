"""What has to be in the environment before JAX starts. Imports no JAX."""

import glob
import hashlib
import importlib.util
import os
import pathlib
import platform

# Nodes of TPU drivers: accel up to v4, VFIO groups since v5.
_TPU_NODES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
_GPU_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def has_tpu() -> bool:
    """Whether a TPU's device files are here.

    Not by Google's PCI vendor id alone: network cards of Google's machines have it too.
    """
    return any(glob.glob(pattern) for pattern in _TPU_NODES)


def has_gpu() -> bool:
    return any(os.path.exists(path) for path in _GPU_NODES)


def keep_libtpu_quiet() -> None:
    """Keeps libtpu from looking for a TPU on a machine that has none.

    Where libtpu is installed for its compiler, JAX would ask a metadata server
    for the topology, and print warnings about it. What the user has set stays;
    in a process that has imported JAX already this has no effect.
    """
    if importlib.util.find_spec("libtpu") is None or has_tpu():
        return
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    if not has_gpu():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def prepare_compiler() -> None:
    """For a process that compiles for TPUs and runs nothing on one; before JAX is imported.

    Raises:
      ValueError: libtpu, which has the compiler, is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("libtpu, which has the compiler, is not installed (pip install libtpu)")
    os.environ |= compiler_environment()


def compiler_environment() -> dict[str, str]:
    """Variables of a process that compiles for TPUs and runs nothing on one."""
    return {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1",
            # Several processes may hold the compiler: no TPU is asked for.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost",
            # Without it libtpu warns, whatever is compiled for.
            "TPU_ACCELERATOR_TYPE": "v4-8"}


def processor() -> str:
    """Tells CPUs apart by what they can do: code compiled for one may crash another."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    flags = sorted({line for line in text.splitlines() if line.startswith(("flags", "Features"))})
    return hashlib.sha256("".join([platform.machine(), *flags]).encode()).hexdigest()[:16]


def compilation_cache() -> pathlib.Path:
    """The user's folder of compiled programs, so that a second start is a fast one."""
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(caches) / "tpuspec" / "compiled" / processor()


def choose(platform: str | None) -> None:
    """Asks JAX for a platform, before JAX is imported; None takes what the machine has.

    A TPU that is here is asked for by name, so that JAX fails when it cannot open it
    instead of running on the CPU, a thousand times slower.

    Raises:
      ValueError: "tpu" on a machine without one.
    """
    if platform == "tpu" and not has_tpu():
        raise ValueError(f"platform must be cpu on this machine, got tpu: no TPU device files "
                         f"({', '.join(_TPU_NODES)})")
    compiler = importlib.util.find_spec("libtpu") is not None
    if platform == "tpu" and not compiler:
        raise ValueError("platform must be cpu in this environment, got tpu: libtpu is not "
                         "installed (pip install '.[tpu]')")
    if platform is not None:
        os.environ["JAX_PLATFORMS"] = "tpu,cpu" if platform == "tpu" else platform
    elif has_tpu() and compiler:
        os.environ.setdefault("JAX_PLATFORMS", "tpu,cpu")
