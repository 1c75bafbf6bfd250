"""TPU generations: published figures of one JAX device, and the compiler's names."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One JAX device.

    Attributes:
      bandwidth: HBM bytes a second, as published.
      flops: bfloat16 operations a second, as published.
      hbm_bytes: memory.
      clock_hz: assumed; the compiler does not tell it.
      host: topology of a whole host by the compiler's name.
      options: of the topology. Without "megacore" a v4 host is described as eight
        devices of one core, which a v4 VM does not show.
      dma_granule_bytes: unit of the sizes in the compiler's DMA instructions.
    """

    bandwidth: float
    flops: float
    hbm_bytes: int
    clock_hz: float
    host: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dma_granule_bytes: int = 32


CHIPS: Mapping[str, Chip] = {
    "v4": Chip(bandwidth=1.2e12, flops=275e12, hbm_bytes=32 * 2**30, clock_hz=1.05e9,
               host="2x2x1", options={"chip_config_name": "megacore"}, dma_granule_bytes=512),
    "v5e": Chip(bandwidth=0.819e12, flops=197e12, hbm_bytes=16 * 2**30, clock_hz=1.5e9,
                host="2x2"),
    "v5p": Chip(bandwidth=2.765e12, flops=459e12, hbm_bytes=95 * 10**9, clock_hz=1.75e9,
                host="2x2x1", options={"chip_config_name": "megacore"}),
    "v6e": Chip(bandwidth=1.64e12, flops=918e12, hbm_bytes=32 * 10**9, clock_hz=1.75e9,
                host="2x2"),
}
