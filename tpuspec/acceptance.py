"""The accept / reject rule that keeps the target's distribution."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpuspec.sampling import draw


class Acceptance(NamedTuple):
    """Outcome of one verify pass, before any cut.

    Attributes:
      accepted_B: n, leading drafts accepted.
      next_token_B: correction after a rejection, else bonus token.
      overlap_Bγ: Σ_v min(p, q) at each draft's position: its chance of acceptance.
    """

    accepted_B: Int[Array, " B"]
    next_token_B: Int[Array, " B"]
    overlap_Bγ: Float[Array, "B g"]


def accept(drafts_Bγ: Int[Array, "B g"], draft_probs_BγV: Float[Array, "B g V"],
           target_probs_BGV: Float[Array, "B g+1 V"], limit_B: Int[Array, " B"],
           accept_uniforms_Bγ: Float[Array, "B g"], next_uniforms_BG: Float[Array, "B g+1"],
           ) -> Acceptance:
    """Accepts a prefix of the drafts and draws one token from the target itself.

    Draft x_i is accepted iff u_i q_i(x_i) < p_i(x_i), strictly, so that a draft of
    target probability 0 is never accepted, not even by u = 0. After a rejection at
    i the next token is drawn from norm(max(0, p_i - q_i)); when all are accepted,
    from p at the position after them. Accepted tokens fill min(p, q), corrections
    the rest of p: together exactly p.

    Example, one slot, V = 4, γ = 1: p = (.5, .3, .15, .05), q = (.3, .5, .1, .1),
    draft 1, u = .7: .7 * .5 ≥ .3, rejected; the residual is (.8, 0, .2, 0).

    Args:
      limit_B: drafts beyond the first ``limit`` of a slot are not examined; the
        token after them is a bonus token.
      accept_uniforms_Bγ: in [0, 1).
      next_uniforms_BG: in [0, 1); the one at the next token's position is used.

    Source: Leviathan et al. 2022, Algorithm 1 and appendix A.1.
    """
    width = drafts_Bγ.shape[1]
    index = jnp.arange(width)[None, :]
    examined_probs = target_probs_BGV[:, :width]
    at_draft = drafts_Bγ[..., None]
    p = jnp.take_along_axis(examined_probs, at_draft, axis=-1)[..., 0]
    q = jnp.take_along_axis(draft_probs_BγV, at_draft, axis=-1)[..., 0]
    kept = (accept_uniforms_Bγ * q < p) & (index < limit_B[:, None])
    accepted_B = jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=-1), axis=-1)

    uniform_B = jnp.take_along_axis(next_uniforms_BG, accepted_B[:, None], axis=1)[:, 0]
    row = accepted_B[:, None, None]
    p_next = jnp.take_along_axis(target_probs_BGV, row, axis=1)[:, 0]
    padded_q = jnp.pad(draft_probs_BγV, ((0, 0), (0, 1), (0, 0)))
    q_next = jnp.take_along_axis(padded_q, row, axis=1)[:, 0]
    rejected = (accepted_B < limit_B)[:, None]
    residual = jnp.where(rejected, jnp.maximum(p_next - q_next, 0.0), p_next)
    # p = q up to rounding can leave nothing of the residual; p itself is right then.
    empty = jnp.sum(residual, axis=-1, keepdims=True) == 0
    next_token_B = draw(jnp.where(empty, p_next, residual), uniform_B)
    overlap = jnp.sum(jnp.minimum(examined_probs, draft_probs_BγV), axis=-1)
    return Acceptance(accepted_B, next_token_B, overlap)
