"""How requests are sampled, and the random numbers for it.

Draft, accept test, residual, bonus and plain decoding all sample by the same
``WarpOptions`` (see ``tpuspec.kernels``), in float32, so that speculation stays
exact under every option.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import random
from jaxtyping import Array, Float, Int, UInt32

from tpuspec.config import Sampler, check_range
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
      repetition_penalty: positive logits of ids among the output's tokens so far are
        divided by it, others multiplied; 1 is off.
      presence_penalty: taken off the logits of ids among the output's tokens so far.
      frequency_penalty: the same, times how often each is among them.
      logit_bias: added to the logits, by id.
      banned_ids: never come.
      allowed_ids: all other ids never come; empty is off.
      lenience: below 1, drafts are accepted more often and outputs are not exact (see
        ``tpuspec.lenience``); 1 is off.

    They act in this order: penalties, bias, bans, temperature, top-k, top-p, min-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    banned_ids: Sequence[int] = ()
    allowed_ids: Sequence[int] = ()
    lenience: float = 1.0

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < 1e-3:
            raise ValueError("temperature must be 0 (greedy) or at least 0.001, "
                             f"got {self.temperature}")
        check_range("top_k", self.top_k, 0, 2**31 - 1)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        check_range("min_p", self.min_p, 0.0, 1.0)
        # Bounded, so that finite logits stay finite.
        check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, value in self.logit_bias.items():
            check_range(f"logit_bias[{token}]", value, -100.0, 100.0)
        if not 0.0 < self.lenience <= 1.0:
            raise ValueError(f"lenience must be in (0, 1], got {self.lenience}")

    @property
    def exact(self) -> bool:
        """Whether outputs have the target's distribution."""
        return self.lenience == 1

    def check_sampler(self, sampler: Sampler) -> None:
        """Raises ValueError on what this sampler cannot do."""
        if sampler is Sampler.COUPLED and not self.exact:
            raise ValueError("lenience must be 1 with coupled sampling, which has no accept test, "
                             f"got {self.lenience}")

    def check_ids(self, vocabulary_size: int) -> None:
        """Raises ValueError on ids that do not exist, and if none may come."""
        for token in self.logit_bias:
            check_range("logit_bias id", token, 0, vocabulary_size - 1)
        for name in ("banned_ids", "allowed_ids"):
            ids = getattr(self, name)
            if len(ids) > vocabulary_size:
                raise ValueError(f"{name} must have at most {vocabulary_size} ids, got {len(ids)}")
            for place, value in enumerate(ids):
                check_range(f"{name}[{place}]", value, 0, vocabulary_size - 1)
        if (self.banned_ids or self.allowed_ids) and not self.leaves_without((), vocabulary_size):
            if self.allowed_ids:
                raise ValueError("allowed_ids must have an id that is not one of banned_ids, got "
                                 f"{len(set(self.allowed_ids))} ids, all banned")
            raise ValueError(f"banned_ids must leave one of {vocabulary_size} ids, got all")

    def leaves_without(self, ids: Iterable[int], vocabulary_size: int) -> bool:
        """Whether an id other than these may come."""
        return bool((np.delete(self.bias(vocabulary_size), list(ids)) > -np.inf).any())

    def bias(self, vocabulary_size: int) -> np.ndarray:
        """[V] float32 what is added to the logits; -inf for ids that never come."""
        bias = np.zeros(vocabulary_size, np.float32)
        bias[list(self.logit_bias)] = list(self.logit_bias.values())
        bias[list(self.banned_ids)] = -np.inf
        if self.allowed_ids:
            bias[np.delete(np.arange(vocabulary_size), list(self.allowed_ids))] = -np.inf
        return bias


def check_min_new_tokens(value: int, *, max_new_tokens: int, eos_ids: Sequence[int],
                         sampling: SamplingParams, vocabulary_size: int) -> None:
    """Raises ValueError if so many tokens without an end id cannot come."""
    check_range("min_new_tokens", value, 0, max_new_tokens)
    if value and not sampling.leaves_without(eos_ids, vocabulary_size):
        raise ValueError("min_new_tokens must be 0 where banned_ids and allowed_ids leave only "
                         f"end ids, got {value}")


@functools.partial(jax.tree_util.register_dataclass,
                   data_fields=["temperature_B", "top_k_B", "top_p_B", "min_p_B", "lenience_B"],
                   meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSampling:
    """``SamplingParams`` of all slots as arrays [B]."""

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array
    lenience_B: jax.Array

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "SlotSampling":
        """On the host, a row for each."""
        def column(name: str, dtype: type) -> np.ndarray:
            return np.asarray([getattr(one, name) for one in params], dtype)

        return cls(temperature_B=column("temperature", np.float32),
                   top_k_B=column("top_k", np.int32), top_p_B=column("top_p", np.float32),
                   min_p_B=column("min_p", np.float32),
                   lenience_B=column("lenience", np.float32))

    @classmethod
    def greedy(cls, slots: int) -> "SlotSampling":
        return jax.tree.map(jnp.asarray, cls.of([SamplingParams()] * slots))

    def where(self, active_B: jax.Array) -> "SlotSampling":
        """The same, with the other slots greedy: the cheapest way to sample."""
        return dataclasses.replace(
            self, temperature_B=jnp.where(active_B, self.temperature_B, 0.0),
            lenience_B=jnp.where(active_B, self.lenience_B, 1.0))

    @property
    def leniently_greedy_B(self) -> jax.Array:
        return (self.temperature_B == 0) & (self.lenience_B < 1)

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
