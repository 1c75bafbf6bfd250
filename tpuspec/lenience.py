"""Lenience: drafts are accepted more often, and outputs are no longer exact.

Leviathan et al. 2022, appendix A.5: the draft's probability counts for ``lenience`` times as
much in the accept test, so that no id comes more than 1 / lenience times as often as under the
target. Nothing else changes; both work with any implementation of ``kernels.rejection_sample``.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tpuspec.sampling import SlotSampling


def lenient_coins(coins_Bγ: Float[Array, "B g"], sampling: SlotSampling) -> jax.Array:
    """Uniform numbers u with which ``u q < p`` is the accept test; at a temperature."""
    return coins_Bγ * sampling.lenience_B[:, None]


def lenient_logits(logits_BGV: Float[Array, "B g+1 V"], drafts_Bγ: Int[Array, "B g"],
                   examined_Bγ: Bool[Array, "B g"], sampling: SlotSampling,
                   vocabulary_size: int) -> jax.Array:
    """At temperature 0, where the accept test compares two one-hots: an examined draft that is at
    least ``lenience`` times as likely as the most likely id (by these logits, without a
    temperature) gets the largest logit, and so is accepted. Other rows and slots keep theirs."""
    ids = jnp.arange(logits_BGV.shape[-1])[None, None, :]
    top = jnp.max(jnp.where(ids < vocabulary_size, logits_BGV, -jnp.inf), axis=-1, keepdims=True)
    enough = top + jnp.log(sampling.lenience_B)[:, None, None]
    candidates_Bγ = jnp.where(examined_Bγ & sampling.leniently_greedy_B[:, None], drafts_Bγ, -1)
    candidates_BG1 = jnp.pad(candidates_Bγ, ((0, 0), (0, 1)), constant_values=-1)[..., None]
    return jnp.where((ids == candidates_BG1) & (logits_BGV >= enough), top + jnp.abs(top) + 1,
                     logits_BGV)
