"""Everything that a step reads and writes, as one donated pytree."""

import dataclasses
import enum
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuspec.kv_cache import DecoderCache
from tpuspec.logit_adjustment import NO_ID, SlotAdjustments
from tpuspec.sampling import SlotSampling
from tpuspec.token_logprobs import TokenLogprobs

MAX_EOS_IDS = 8


class FinishReason(enum.IntEnum):
    """Why a slot stopped; NONE while it runs."""

    NONE = 0
    EOS = 1
    LENGTH = 2
    NON_FINITE = 3


@functools.partial(
    jax.tree_util.register_dataclass, meta_fields=[],
    data_fields=["active_B", "length_B", "last_two_B2", "max_length_B", "source_length_B",
                 "eos_ids_BE", "draft_limit_B", "seed_B2", "sampling", "adjustments",
                 "logprobs_B"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """Per-slot state.

    Attributes:
      active_B: an inactive slot is inert: no tokens, no counts, no state change.
      length_B: final decoder positions; the start token counts. Caches hold K/V of
        positions below length - 1: no model has read the last final token yet.
      last_two_B2: tokens at positions s and s + 1 with s = max(length - 2, 0).
      max_length_B: length at which the slot ends.
      source_length_B: source tokens, EOS included.
      eos_ids_BE: ids that end the output; unused places hold -1.
      draft_limit_B: drafts examined per step at the most; 0 is plain decoding.
      seed_B2: the request's seed as two 32-bit words.
      sampling: temperature, top-k, top-p, min-p.
      adjustments: penalties, biases, bans and the decoder prompt.
      logprobs_B: whether the request asks for log-probabilities.
    """

    active_B: jax.Array
    length_B: jax.Array
    last_two_B2: jax.Array
    max_length_B: jax.Array
    source_length_B: jax.Array
    eos_ids_BE: jax.Array
    draft_limit_B: jax.Array
    seed_B2: jax.Array
    sampling: SlotSampling
    adjustments: SlotAdjustments
    logprobs_B: jax.Array

    @classmethod
    def empty(cls, slots: int, vocabulary_size: int, longest_prompt: int) -> "Slots":
        ints = functools.partial(jnp.zeros, dtype=jnp.int32)
        return cls(active_B=jnp.zeros(slots, bool), length_B=jnp.ones(slots, jnp.int32),
                   last_two_B2=ints((slots, 2)), max_length_B=jnp.ones(slots, jnp.int32),
                   source_length_B=jnp.ones(slots, jnp.int32),
                   eos_ids_BE=jnp.full((slots, MAX_EOS_IDS), NO_ID, jnp.int32),
                   draft_limit_B=ints(slots), seed_B2=jnp.zeros((slots, 2), jnp.uint32),
                   sampling=SlotSampling.greedy(slots),
                   adjustments=SlotAdjustments.none(slots, vocabulary_size, longest_prompt),
                   logprobs_B=jnp.zeros(slots, bool))

    @property
    def adjusting(self) -> jax.Array:
        """Whether any active slot's logits must be adjusted in the next step; a scalar."""
        return self.adjustments.needed(self.active_B, self.length_B)

    def insert(self, slot: jax.Array, row: "Slots") -> "Slots":
        """Puts the single row of ``row`` in place of the slot's."""
        return jax.tree.map(
            lambda all_, one: lax.dynamic_update_slice(
                all_, one, (slot,) + (jnp.int32(0),) * (all_.ndim - 1)), self, row)


@functools.partial(jax.tree_util.register_dataclass, meta_fields=[],
                   data_fields=["slots", "target_cache", "draft_cache", "history_BT",
                                "source_BS"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """Slots and both models' caches.

    Attributes:
      slots, target_cache: always there.
      draft_cache: None without a draft.
      history_BT: final tokens by position, below each slot's length; None where no step
        may leave the draft's cache behind and no drafts are looked up.
      source_BS: tokens of each slot's source, below its length; None where no drafts are
        looked up.
    """

    slots: Slots
    target_cache: DecoderCache
    draft_cache: DecoderCache | None
    history_BT: jax.Array | None = None
    source_BS: jax.Array | None = None


class StepOutput(NamedTuple):
    """What one step did, per slot, on device or host.

    Attributes:
      tokens: [B, G] new final tokens, meaningful below ``num_tokens``. Those of a decoder
        prompt are not new and enter no count.
      num_tokens: [B] int32 accepted drafts and the target's own token, after cuts; 0 where
        the step was within the prompt.
      drafted: [B] drafts offered to the verify pass.
      accepted: [B] drafts among the new tokens.
      examined: [B] accepted, plus one if the step ended in a rejection. Drafts after
        a rejection, or cut by EOS or the length cap, were never judged.
      finish: [B] FinishReason.
      overlap: [B] float32 Σ min(p, q) summed over the examined positions.
      found: [B] drafts that a look-up gave, whether or not they were used; at most G. -1
        within a decoder prompt, 0 where nothing is looked up.
      agreed: [B] how many of them, from the first on, are the new tokens.
      logprobs: of the tokens.
    """

    tokens: jax.Array | np.ndarray
    num_tokens: jax.Array | np.ndarray
    drafted: jax.Array | np.ndarray
    accepted: jax.Array | np.ndarray
    examined: jax.Array | np.ndarray
    finish: jax.Array | np.ndarray
    overlap: jax.Array | np.ndarray
    found: jax.Array | np.ndarray
    agreed: jax.Array | np.ndarray
    logprobs: TokenLogprobs

    def pack(self) -> jax.Array:
        """One int32 array [B, 8 + G + G (1 + 2 N)]: one host copy a step."""
        columns = [jnp.asarray(x) for x in self[1:9]]
        columns[5] = lax.bitcast_convert_type(columns[5], jnp.int32)
        return jnp.concatenate([jnp.stack(columns, axis=1), jnp.asarray(self.tokens),
                                self.logprobs.pack()], axis=1)

    @classmethod
    def unpack(cls, packed: np.ndarray, width: int) -> "StepOutput":
        """Args: width: G."""
        counts = np.ascontiguousarray(packed[:, :8].T)
        return cls(tokens=packed[:, 8:8 + width], num_tokens=counts[0], drafted=counts[1],
                   accepted=counts[2], examined=counts[3], finish=counts[4],
                   overlap=counts[5].view(np.float32), found=counts[6], agreed=counts[7],
                   logprobs=TokenLogprobs.unpack(packed[:, 8 + width:], width))
