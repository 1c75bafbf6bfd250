"""Accept / reject of drafts and the next token, from logits, in one pass over them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tpuspec.kernels.implementation import Implementation, dispatch
from tpuspec.kernels.rejection_sampling_pallas import rejection_sample_pallas
from tpuspec.kernels.sampling_blocks import SamplingBlocks
from tpuspec.kernels.sampling_reference import WarpedRows, WarpOptions, draw, warp
from tpuspec.kernels.slot_sharding import by_slots
from tpuspec.kernels.token_sampling import sample_tokens


class RejectionSample(NamedTuple):
    """Outcome for each slot, before any cut at an end of sequence.

    Attributes:
      accepted_B: n, leading drafts accepted.
      next_token_B: correction after a rejection, else bonus token.
      overlap_Bγ: Σ_v min(p, q) at each draft's position: its chance of acceptance.
      sound_B: no NaN, and no infinite largest logit, in the target's rows that led
        here (the first n + 1). Without it, the other figures mean nothing.
    """

    accepted_B: Int[Array, " B"]
    next_token_B: Int[Array, " B"]
    overlap_Bγ: Float[Array, "B g"]
    sound_B: Bool[Array, " B"]


def rejection_sample(
        drafts_Bγ: Int[Array, "B g"], draft_logits_BγV: Float[Array, "B g U"],
        draft_rows_Bγ: WarpedRows, target_logits_BGV: Float[Array, "B g+1 V"],
        options: WarpOptions, limit_B: Int[Array, " B"], active_B: Bool[Array, " B"],
        accept_uniforms_Bγ: Float[Array, "B g"], next_uniforms_BG: Float[Array, "B g+1"], *,
        vocabulary_size: int, implementation: Implementation | None = None,
        blocks: SamplingBlocks | None = None, interpret: Any = False) -> RejectionSample:
    """Accepts a prefix of the drafts and draws one token from the target itself.

    With p and q the warped distributions of target and draft, draft x_i is accepted
    iff u_i q_i(x_i) < p_i(x_i), strictly, so that a draft of target probability 0 is
    never accepted, not even by u = 0. After a rejection at i the next token is drawn
    from norm(max(0, p_i - q_i)); when all are accepted, from p at the position after
    them. Accepted tokens fill min(p, q), corrections the rest of p: together exactly
    p. In a greedy slot p is the one-hot of the argmax and q that of the draft.

    The TPU kernel reads the logits once and writes no probabilities to HBM; logits of
    slots that do not need them (all of a slot that is not active, the draft's of a
    greedy slot) are not read.

    Args:
      draft_rows_Bγ: figures of the draft's distributions, as they were drawn from
        (see ``sample_tokens``).
      limit_B: drafts beyond the first ``limit`` <= γ of a slot are not examined; the
        token after them is a bonus token.
      active_B: the other slots accept nothing, return token 0 and count as sound.
      accept_uniforms_Bγ: in [0, 1).
      next_uniforms_BG: in [0, 1); the one at the next token's position is used.
      vocabulary_size: ids from here on do not exist, in either model.
      implementation: "xla" is plain jnp, "pallas" the TPU kernel; None is the kernel
        on TPU, for the shapes that it takes, and else plain jnp.
      blocks: how the kernel cuts the vocabulary, by default by TPU generation.
      interpret: runs the kernel on the CPU; as in ``pl.pallas_call``.

    Raises:
      NotImplementedError: "pallas" does not take these shapes: more than 15 drafts,
        logits that are not float32, or rows that do not fit in VMEM. On v4, which has
        the least, 8 rows of 320,000 ids do, or 16 of 150,000.

    Source: Leviathan et al. 2022, Algorithm 1 and appendix A.1.
    """
    arguments = (drafts_Bγ, draft_logits_BγV, draft_rows_Bγ, target_logits_BGV, options, limit_B,
                 active_B, accept_uniforms_Bγ, next_uniforms_BG)

    def pallas() -> RejectionSample:
        if drafts_Bγ.shape[1] == 0:
            return _without_drafts(target_logits_BGV[:, 0], options, active_B,
                                   next_uniforms_BG[:, 0], vocabulary_size, blocks, interpret)
        return RejectionSample(*rejection_sample_pallas(
            *arguments, vocabulary_size=vocabulary_size, blocks=blocks, interpret=interpret))

    return dispatch(implementation, pallas=pallas,
                    xla=lambda: _reference(*arguments, vocabulary_size=vocabulary_size))


def sharded_rejection_sample(
        mesh: jax.sharding.Mesh, *, slots: str | tuple[str, ...], **options: Any) -> Any:
    """``rejection_sample`` with slots split over axes of a mesh; takes its array arguments.

    The kernel needs whole rows. Where the vocabulary of the logits is split over an axis,
    name that axis too: instead of all devices along it gathering all rows, each gets the
    rows of its own slots. With M devices along it and B slots along the others, that is
    an all-to-all in which a device receives (M - 1) / M² * B * (2 G - 1) * V * 4 bytes,
    1/M of what a gather would bring (8 slots, G = 8, V = 32128, M = 4: 2.9 MB), and the
    kernel's work is shared as well. What comes out is a few numbers a slot.

    Args:
      mesh: the devices.
      slots: axes that split B. Missing slots are made up by such that are not active.
      options: keyword arguments of ``rejection_sample``.
    """
    return by_slots(functools.partial(rejection_sample, **options), mesh, slots)


def _without_drafts(logits_BV, options, active_B, uniform_B, vocabulary_size, blocks, interpret):
    """Plain decoding has one row per slot: better eight slots at once than one."""
    options = options._replace(temperature_B=jnp.where(active_B, options.temperature_B, 0.0))
    token_B, _, sound_B = sample_tokens(logits_BV, options, uniform_B,
                                        vocabulary_size=vocabulary_size,
                                        implementation="pallas", blocks=blocks,
                                        interpret=interpret)
    return RejectionSample(jnp.zeros_like(token_B), jnp.where(active_B, token_B, 0),
                           jnp.zeros((len(token_B), 0), jnp.float32), sound_B | ~active_B)


def _reference(drafts_Bγ, draft_logits_BγV, draft_rows_Bγ, target_logits_BGV, options, limit_B,
               active_B, accept_uniforms_Bγ, next_uniforms_BG, *, vocabulary_size):
    width = drafts_Bγ.shape[1]
    p_BGV, _, sound_BG = warp(target_logits_BGV, options, vocabulary_size)
    q_BγV = _draft_probabilities(draft_logits_BγV, draft_rows_Bγ, drafts_Bγ, options,
                                 vocabulary_size, target_logits_BGV.shape[-1])
    index = jnp.arange(width)[None, :]
    at_draft = drafts_Bγ[..., None]
    p = jnp.take_along_axis(p_BGV[:, :width], at_draft, axis=-1)[..., 0]
    q = jnp.take_along_axis(q_BγV, at_draft, axis=-1)[..., 0]
    kept = (accept_uniforms_Bγ * q < p) & (index < limit_B[:, None])
    accepted_B = jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=-1), axis=-1)

    uniform_B = jnp.take_along_axis(next_uniforms_BG, accepted_B[:, None], axis=1)[:, 0]
    row = accepted_B[:, None, None]
    p_next = jnp.take_along_axis(p_BGV, row, axis=1)[:, 0]
    q_next = jnp.take_along_axis(jnp.pad(q_BγV, ((0, 0), (0, 1), (0, 0))), row, axis=1)[:, 0]
    rejected = (accepted_B < limit_B)[:, None]
    residual = jnp.where(rejected, jnp.maximum(p_next - q_next, 0.0), p_next)
    # p = q up to rounding can leave nothing of the residual; p itself is right then.
    empty = jnp.sum(residual, axis=-1, keepdims=True) == 0
    next_token_B = draw(jnp.where(empty, p_next, residual), uniform_B)
    overlap_Bγ = jnp.sum(jnp.minimum(p_BGV[:, :width], q_BγV), axis=-1)
    seen = jnp.arange(width + 1)[None, :] <= accepted_B[:, None]
    return RejectionSample(
        jnp.where(active_B, accepted_B, 0), jnp.where(active_B, next_token_B, 0),
        jnp.where(active_B[:, None], overlap_Bγ, 0.0),
        ~active_B | jnp.all(sound_BG | ~seen, axis=1))


def _draft_probabilities(logits_BγV, rows_Bγ, drafts_Bγ, options, vocabulary_size, size):
    """What ``warp`` gave for these rows, from its figures; as wide as the target's."""
    logits = logits_BγV[..., :size].astype(jnp.float32)
    logits = jnp.pad(logits, ((0, 0), (0, 0), (0, size - logits.shape[-1])),
                     constant_values=-jnp.inf)
    ids = jnp.arange(size)[None, None, :]
    logits = jnp.where(ids < vocabulary_size, logits, -jnp.inf)
    greedy = (options.temperature_B == 0)[:, None, None]
    temperature = jnp.where(greedy, 1.0, options.temperature_B[:, None, None])
    top, threshold, total = (x[..., None] for x in rows_Bγ)
    e = jnp.exp((logits - top) / temperature)
    weights = jnp.where(e >= threshold, e, 0.0)
    return jnp.where(greedy, (ids == drafts_Bγ[..., None]).astype(jnp.float32), weights / total)
