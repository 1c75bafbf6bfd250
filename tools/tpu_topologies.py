"""Ahead-of-time compilation for TPUs on a machine that has none."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, AxisType, SingleDeviceSharding


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device of a generation.

    Attributes:
      topology: name that the compiler knows a host of four chips by.
      config: further arguments of the topology. Without "megacore" a v4 host is
        described as eight devices of one core, which a v4 VM does not show.
      clock_ghz: assumed; the compiler does not tell it.
      hbm_gb_per_s: bandwidth as published, 1e9 bytes a second.
      dma_granule_bytes: unit of the sizes in the compiler's DMA instructions.
    """

    topology: str
    config: dict[str, Any]
    clock_ghz: float
    hbm_gb_per_s: float
    dma_granule_bytes: int


CHIPS = {
    "v4": Chip("v4:2x2x1", {"chip_config_name": "megacore"}, 1.05, 1200, 512),
    "v5e": Chip("v5e:2x2", {}, 1.5, 819, 32),
    "v5p": Chip("v5p:2x2x1", {"chip_config_name": "megacore"}, 1.75, 2765, 32),
    "v6e": Chip("v6e:2x2", {}, 1.75, 1640, 32),
}


def compiler_environment(dump_to: os.PathLike[str] | str) -> dict[str, str]:
    """Variables for a process that compiles; they must stand before JAX is imported.

    Args:
      dump_to: folder that the compiler writes its last passes to. Only these: all
        of them would be up to a gigabyte a kernel.
    """
    passes = "(final_bundles|pre-finalize-registers-and-allocations)"
    return {
        "JAX_PLATFORMS": "cpu",
        # Several processes may hold libtpu's compiler, no TPU is asked for.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump_to} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex={passes}",
    }


def device_of(generation: str) -> Any:
    """The first chip of a described host: it can be compiled for, not run on."""
    chip = CHIPS[generation]
    bounds = tuple(int(n) for n in chip.topology.partition(":")[2].split("x"))
    return topologies.get_topology_desc(
        chip.topology,
        "tpu",
        chips_per_host_bounds=bounds + (1,) * (3 - len(bounds)),
        num_slices=1,
        **chip.config,
    ).devices[0]


@contextlib.contextmanager
def lowering_for(device: Any) -> Iterator[pltpu.TpuInfo]:
    """Lowers Pallas kernels for ``device`` inside; gives what is known of it."""
    abstract = jax.sharding.AbstractDevice(
        device_kind=device.device_kind, num_cores=device.num_cores, platform=device.platform
    )
    mesh = AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=abstract)
    with jax.sharding.use_abstract_mesh(mesh):
        yield pltpu.get_tpu_info()


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
