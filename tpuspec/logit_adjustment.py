"""What changes logits before temperature and warps: penalties, biases, bans, prompts.

One function, for target and draft alike. The target's use decides what the output's
distribution is; the draft's keeps its guesses near it.

State is dense, [B, V]. A list of ids for each slot would be smaller, but it would bound
their number, and adding it to the logits would be a scatter, which a TPU does one id after
the other; a dense row is added as the logits pass by. It takes 8 bytes an id and slot:
4 MB for 16 slots of T5, where the caches of T5-small alone take 100.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tpuspec.sampling import SamplingParams

NO_ID = -1


@functools.partial(
    jax.tree_util.register_dataclass, meta_fields=[],
    data_fields=["bias_BV", "biased_B", "counts_BV", "repetition_B", "presence_B", "frequency_B",
                 "min_length_B", "prompt_BP", "first_B"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotAdjustments:
    """Of all slots; V is the number of ids that exist.

    Attributes:
      bias_BV: float32 added to the logits; -inf for ids that never come.
      biased_B: whether any of a slot's biases is not 0.
      counts_BV: int32 how often an id is among the slot's new tokens; kept for slots with
        a penalty.
      repetition_B, presence_B, frequency_B: penalties, as in ``SamplingParams``.
      min_length_B: length before which no end id comes.
      prompt_BP: int32 ids that the output begins with.
      first_B: decoder position of the first new token: behind start token and prompt.
    """

    bias_BV: jax.Array
    biased_B: jax.Array
    counts_BV: jax.Array
    repetition_B: jax.Array
    presence_B: jax.Array
    frequency_B: jax.Array
    min_length_B: jax.Array
    prompt_BP: jax.Array
    first_B: jax.Array

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocabulary_size: int, longest_prompt: int, *,
           min_new_tokens: int = 0, prompt: Sequence[int] = ()) -> "SlotAdjustments":
        """On the host, a row for each, without any token yet."""
        def column(name: str) -> np.ndarray:
            return np.asarray([getattr(one, name) for one in params], np.float32)

        rows = len(params)
        bias = np.stack([one.bias(vocabulary_size) for one in params])
        prompts = np.zeros((rows, longest_prompt), np.int32)
        prompts[:, :len(prompt)] = prompt
        return cls(bias_BV=bias, biased_B=bias.any(axis=1), counts_BV=np.zeros_like(bias, np.int32),
                   repetition_B=column("repetition_penalty"),
                   presence_B=column("presence_penalty"),
                   frequency_B=column("frequency_penalty"),
                   min_length_B=np.full(rows, 1 + len(prompt) + min_new_tokens, np.int32),
                   prompt_BP=prompts, first_B=np.full(rows, 1 + len(prompt), np.int32))

    @classmethod
    def none(cls, slots: int, vocabulary_size: int, longest_prompt: int) -> "SlotAdjustments":
        return jax.tree.map(jnp.asarray, cls.of([SamplingParams()] * slots, vocabulary_size,
                                                longest_prompt))

    def needed(self, active_B: Bool[Array, " B"], length_B: Int[Array, " B"]) -> jax.Array:
        """Whether any active slot needs ``adjust`` from these lengths on; a scalar."""
        early_B = length_B < jnp.maximum(self.min_length_B, self.first_B)
        return jnp.any(active_B & (self.biased_B | self._penalised_B | early_B))

    @property
    def _penalised_B(self) -> jax.Array:
        return (self.repetition_B != 1) | (self.presence_B != 0) | (self.frequency_B != 0)

    def new(self, tokens_BG: Int[Array, "B G"], positions_BG: Int[Array, "B G"]) -> jax.Array:
        """The tokens, but -1 for those of the prompt."""
        return jnp.where(positions_BG < self.first_B[:, None], NO_ID, tokens_BG)

    def adjust(self, logits_BGV: Float[Array, "B G U"], positions_BG: Int[Array, "B G"],
               before_BGK: Int[Array, "B G K"], eos_ids_BE: Int[Array, "B E"]) -> jax.Array:
        """Repetition, presence, frequency, bias, then bans; in the rows of a prompt, all ids
        but its own are banned, so that the draft guesses it and the target accepts it. Slots
        without any of these keep their logits to the bit.

        Args:
          logits_BGV: U is V or more.
          positions_BG: decoder positions of the tokens that the rows are for.
          before_BGK: new ids that this step has before each row, beside those that
            ``counts_BV`` has; -1 is none.
          eos_ids_BE: end ids; -1 is none.
        """
        width = logits_BGV.shape[-1]
        ids = jnp.arange(width)[None, None, :]

        def rows(x_BV: jax.Array) -> jax.Array:
            return jnp.pad(x_BV, ((0, 0), (0, width - x_BV.shape[1])))[:, None, :]

        def slots(x_B: jax.Array) -> jax.Array:
            return x_B[:, None, None]

        counts = rows(self.counts_BV) + _count(before_BGK, ids)
        x = logits_BGV
        penalised = jnp.where(x > 0, x / slots(self.repetition_B), x * slots(self.repetition_B))
        x = jnp.where(counts > 0, penalised - slots(self.presence_B), x)
        x = x - slots(self.frequency_B) * counts.astype(jnp.float32)
        x = x + rows(self.bias_BV)
        early_BG = positions_BG < self.min_length_B[:, None]
        is_end = _count(eos_ids_BE[:, None, :], ids) > 0
        x = jnp.where(early_BG[..., None] & is_end, -jnp.inf, x)
        place_BG = jnp.minimum(positions_BG - 1, self.prompt_BP.shape[1] - 1)
        prompt_BG1 = jnp.take_along_axis(self.prompt_BP, place_BG, axis=1)[..., None]
        in_prompt_BG = positions_BG < self.first_B[:, None]
        return jnp.where(in_prompt_BG[..., None], jnp.where(ids == prompt_BG1, 0.0, -jnp.inf), x)

    def commit(self, tokens_BG: Int[Array, "B G"], active_B: Bool[Array, " B"],
               ) -> "SlotAdjustments":
        """Counts new tokens; -1 is none."""
        def counted() -> jax.Array:
            ids = jnp.arange(self.counts_BV.shape[1])[None, None, :]
            return self.counts_BV + _count(tokens_BG[:, None, :], ids)[:, 0]

        counts_BV = lax.cond(jnp.any(active_B & self._penalised_B), counted,
                             lambda: self.counts_BV)
        return dataclasses.replace(self, counts_BV=counts_BV)


def _count(ids_BGK: jax.Array, ids: jax.Array) -> jax.Array:
    """[B, G, V] how often each id is among the K. Comparisons, which XLA makes as it reads
    the logits: there are few ids, and a scatter would be a pass of its own."""
    shape = (*ids_BGK.shape[:2], ids.shape[-1])
    counts = jnp.zeros(shape, jnp.int32)
    for k in range(ids_BGK.shape[2]):
        counts += (ids_BGK[:, :, k:k + 1] == ids).astype(jnp.int32)
    return counts
