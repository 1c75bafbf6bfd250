"""Ahead-of-time compilation for TPUs on a machine that has none, by libtpu's compiler.

``platform.prepare_compiler`` must run before JAX is imported.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, AxisType

from tpuspec.chips import CHIPS, Chip


@dataclasses.dataclass(frozen=True)
class Topology:
    """A host's chips, described: programs can be compiled for them, not run.

    Attributes:
      generation: key of ``chips.CHIPS``.
      bounds: chips along each axis, three numbers.
    """

    generation: str
    bounds: tuple[int, int, int]

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """"v4" is one chip, "v4:2x2x1" a host. Raises ValueError with what is known."""
        generation, _, shape = text.partition(":")
        known = ", ".join(f"{name}, {name}:{chip.host}" for name, chip in CHIPS.items())
        bounds = shape.split("x") if shape else ["1"]
        if (generation not in CHIPS or not all(n.isdecimal() and int(n) for n in bounds)
                or len(bounds) > 3):
            raise ValueError(f"topology must be one of {known} or alike, got {text!r}")
        x, y, z = (*map(int, bounds), *(3 - len(bounds)) * [1])
        return cls(generation, (x, y, z))

    @property
    def chip(self) -> Chip:
        return CHIPS[self.generation]

    @property
    def num_chips(self) -> int:
        return math.prod(self.bounds)

    def devices(self) -> list[Any]:
        """The chips as devices that can be compiled for. Raises ValueError on shapes that
        the compiler does not know."""
        # One chip is described as the first of a host: alone, not every generation is known.
        shape = "x".join(map(str, self.bounds)) if self.num_chips > 1 else self.chip.host
        bounds = tuple(map(int, shape.split("x")))
        try:
            described = topologies.get_topology_desc(
                f"{self.generation}:{shape}", "tpu", num_slices=1,
                chips_per_host_bounds=bounds + (1,) * (3 - len(bounds)), **self.chip.options)
        except Exception as error:  # of whatever kind libtpu refuses it with
            raise ValueError(f"topology {self.generation}:{shape} is not known to the "
                             f"compiler: {error}") from error
        return list(described.devices)[:self.num_chips]


@contextlib.contextmanager
def lowering_for(device: Any) -> Iterator[pltpu.TpuInfo]:
    """Lowers Pallas kernels for ``device`` inside; gives what is known of it."""
    abstract = jax.sharding.AbstractDevice(
        device_kind=device.device_kind, num_cores=device.num_cores, platform=device.platform)
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=abstract)
    with jax.sharding.use_abstract_mesh(mesh):
        yield pltpu.get_tpu_info()
