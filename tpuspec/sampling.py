"""How requests are sampled, and the random numbers for it.

Draft, accept test, residual, bonus and plain decoding all sample by the same
``WarpOptions`` (see ``tpuspec.kernels``), in float32, so that speculation stays
exact under every option.
"""

import dataclasses
import enum
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import random
from jaxtyping import Array, Float, Int, UInt32

from tpuspec.config import check_range
from tpuspec.kernels import WarpOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
      temperature: 0 is greedy (argmax, ties to the lowest id).
      top_k: keep the k most likely ids; 0 is off. Ids tied with the k-th stay.
      top_p: keep the smallest set of most likely ids with this mass; 1 is off.
        Ids tied with the last of the set stay.
      min_p: of what is left, keep ids at least this times as likely as the most likely
        one; 0 is off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < 1e-3:
            raise ValueError("temperature must be 0 (greedy) or at least 0.001, "
                             f"got {self.temperature}")
        check_range("top_k", self.top_k, 0, 2**31 - 1)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        check_range("min_p", self.min_p, 0.0, 1.0)


@functools.partial(jax.tree_util.register_dataclass,
                   data_fields=["temperature_B", "top_k_B", "top_p_B", "min_p_B"],
                   meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSampling:
    """``SamplingParams`` of all slots as arrays [B]."""

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "SlotSampling":
        """On the host, a row for each."""
        def column(name: str, dtype: type) -> np.ndarray:
            return np.asarray([getattr(one, name) for one in params], dtype)

        return cls(temperature_B=column("temperature", np.float32),
                   top_k_B=column("top_k", np.int32), top_p_B=column("top_p", np.float32),
                   min_p_B=column("min_p", np.float32))

    @classmethod
    def greedy(cls, slots: int) -> "SlotSampling":
        return jax.tree.map(jnp.asarray, cls.of([SamplingParams()] * slots))

    def where(self, active_B: jax.Array) -> "SlotSampling":
        """The same, with the other slots greedy: the cheapest way to sample."""
        return dataclasses.replace(
            self, temperature_B=jnp.where(active_B, self.temperature_B, 0.0))

    def options(self) -> WarpOptions:
        """As kernels take it."""
        return WarpOptions(self.temperature_B, self.top_k_B, self.top_p_B, self.min_p_B)


class Purpose(enum.IntEnum):
    """What a random number is for; part of its key."""

    DRAFT = 0
    ACCEPT = 1
    CORRECTION = 2


def seed_words(seed: int) -> tuple[int, int]:
    """A request's seed, an integer in [0, 2**64), as two 32-bit words."""
    check_range("seed", seed, 0, 2**64 - 1)
    return seed >> 32, seed & 0xFFFFFFFF


def uniforms(seed_B2: UInt32[Array, "B 2"], positions_BG: Int[Array, "B G"],
             ) -> Float[Array, "3 B G"]:
    """Numbers in [0, 1) by Purpose, slot and position.

    Counter-based: Threefry of the counter (position, purpose) under the request's
    seed, so that an output does not depend on slot, neighbours or arrival.
    """

    def one(seed, position, purpose):
        counter = jnp.stack([position.astype(jnp.uint32), purpose])
        return random.threefry_2x32(seed, counter)[0]

    over_positions = jax.vmap(one, in_axes=(None, 0, None))
    over_slots = jax.vmap(over_positions, in_axes=(0, 0, None))
    bits = jax.vmap(over_slots, in_axes=(None, None, 0))(
        seed_B2, positions_BG, jnp.arange(len(Purpose), dtype=jnp.uint32))
    # 24 bits: every value is a float32, and none rounds up to 1.
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
