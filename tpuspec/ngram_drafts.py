"""Drafts without a model: what followed the last tokens where they came before.

Outputs that repeat their source or themselves (summaries, corrections, names) go on as they
did there. A draft that was looked up is sure of itself: its distribution q is one-hot, so that
the accept test keeps it with probability p of it, and a correction comes from p without it.
No text makes that wrong; one without repetitions finds nothing, or what is refused.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tpuspec.decode_state import Slots
from tpuspec.kernels import SampledTokens, WarpedRows
from tpuspec.logit_adjustment import NO_ID

LONGEST_CONTEXT = 3  # tokens


def look_up(source_BS: Int[Array, "B S"], history_BT: Int[Array, "B T"], slots: Slots,
            width: int) -> Int[Array, "B W"]:
    """Drafts for the next ``width`` positions of each slot; -1 from where there is none on.

    The longest context of up to 3 last tokens that came before counts, at its latest place:
    the new text counts as later than the source. What follows in the source ends with it; a
    repetition within the new text is taken to go on for ever. The start token is no context.
    Within a decoder prompt, the drafts are what is left of it.

    Args:
      source_BS: below each slot's source length.
      history_BT: final tokens by position, below each slot's length.
    """
    source_size = source_BS.shape[1]
    text_BX = jnp.concatenate([source_BS, history_BT], axis=1)
    place = jnp.arange(text_BX.shape[1])[None, :]
    in_source = place < slots.source_length_B[:, None]
    end_B = source_size + slots.length_B  # of what is known of the new text
    in_text = (place > source_size) & (place < end_B[:, None])  # behind the start token

    # What a place has that is not known, no context has.
    known_BX = jnp.where(in_source | in_text, text_BX, NO_ID)
    same_BX, length_BX = jnp.ones_like(in_text), jnp.zeros_like(text_BX)
    for back in range(LONGEST_CONTEXT):
        last_B1 = jnp.take_along_axis(text_BX, end_B[:, None] - 1 - back, axis=1)
        last_B1 = jnp.where(slots.length_B[:, None] > back + 1, last_B1, NO_ID - 1)
        earlier_BX = jnp.pad(known_BX, ((0, 0), (back, 0)), constant_values=NO_ID)
        same_BX &= earlier_BX[:, :text_BX.shape[1]] == last_B1
        length_BX += same_BX.astype(jnp.int32)
    goes_on = (place + 1 < slots.source_length_B[:, None]) | (
        (place > source_size) & (place + 1 < end_B[:, None]))
    best_BX = jnp.where(goes_on, length_BX, 0) * text_BX.shape[1] + place
    at_B = jnp.argmax(best_BX, axis=1).astype(jnp.int32)[:, None]
    found_B1 = jnp.take_along_axis(jnp.where(goes_on, length_BX, 0), at_B, axis=1) > 0

    ahead = jnp.arange(width)[None, :]
    period_B1 = jnp.maximum(end_B[:, None] - 1 - at_B, 1)
    in_source_B1 = at_B < source_size
    from_BW = at_B + 1 + jnp.where(in_source_B1, ahead, ahead % period_B1)
    there = ~in_source_B1 | (from_BW < slots.source_length_B[:, None])
    copied_BW = jnp.take_along_axis(text_BX, jnp.minimum(from_BW, text_BX.shape[1] - 1), axis=1)
    drafts_BW = jnp.where(found_B1 & there, copied_BW, NO_ID)

    prompt_BP, first_B1 = slots.adjustments.prompt_BP, slots.adjustments.first_B[:, None]
    position_BW = slots.length_B[:, None] + ahead
    prompt_BW = jnp.take_along_axis(
        prompt_BP, jnp.minimum(position_BW - 1, prompt_BP.shape[1] - 1), axis=1)
    return jnp.where(slots.length_B[:, None] < first_B1,
                     jnp.where(position_BW < first_B1, prompt_BW, NO_ID), drafts_BW)


def one_hot(drafts: Int[Array, "*rows"], vocab_size: int,
            ) -> tuple[SampledTokens, Float[Array, "*rows U"]]:
    """Drafts as if a model that is sure of them had been sampled: with its logits, of which the
    figures say that these ids have probability 1."""
    ones = jnp.ones(drafts.shape, jnp.float32)
    rows = WarpedRows(top=0 * ones, threshold=ones, total=ones)
    ids = lax.broadcasted_iota(jnp.int32, (*drafts.shape, vocab_size), drafts.ndim)
    logits = jnp.where(drafts[..., None] == ids, 0.0, -jnp.inf)
    return SampledTokens(drafts, rows, ones > 0), logits


def either(use: Bool[Array, "*rows"], these: tuple[SampledTokens, Float[Array, "*rows U"]],
           others: tuple[SampledTokens, Float[Array, "*rows U"]],
           ) -> tuple[SampledTokens, Float[Array, "*rows U"]]:
    """Row by row ``these`` where ``use``, else the others."""
    (tokens, logits), (other_tokens, other_logits) = these, others
    chosen = jax.tree.map(lambda one, other: jnp.where(use, one, other), tokens, other_tokens)
    return chosen, jnp.where(use[..., None], logits, other_logits)


def agreement(drafts_BW: Int[Array, "B W"], tokens_BG: Int[Array, "B G"],
              num_B: Int[Array, " B"]) -> Int[Array, " B"]:
    """How many leading drafts are the new tokens of the step, ``num_B`` of each slot."""
    width = min(drafts_BW.shape[1], tokens_BG.shape[1])
    same_BW = (drafts_BW[:, :width] == tokens_BG[:, :width]) & (
        jnp.arange(width)[None, :] < num_B[:, None])
    return jnp.sum(jnp.cumprod(same_BW.astype(jnp.int32), axis=1), axis=1)
