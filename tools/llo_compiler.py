"""Compiling a function for a TPU with the compiler's last passes written to a folder."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from tpuspec import platform


def environment(dump_to: os.PathLike[str] | str) -> dict[str, str]:
    """Variables for a process that compiles; they must stand before JAX is imported.

    Args:
      dump_to: folder that the compiler writes its last passes to. Only these: all
        of them would be up to a gigabyte a kernel.
    """
    passes = "(final_bundles|pre-finalize-registers-and-allocations)"
    return platform.compiler_environment() | {
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump_to} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex={passes}",
    }


def compile_for(
    device: Any,
    function: Callable[..., Any],
    shapes: Sequence[jax.ShapeDtypeStruct],
    donate_argnums: tuple[int, ...] = (),
) -> Any:
    """Compiles ``function`` for one device."""
    sharding = SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in shapes]
    return jax.jit(function, donate_argnums=donate_argnums).lower(*arguments).compile()
