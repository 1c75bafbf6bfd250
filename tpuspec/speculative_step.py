"""The step program: draft, verify, accept, commit. Plain decoding is γ = 0."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from tpuspec.config import Sampler
from tpuspec.coupled_sampling import accept_equal, arrivals, propose_one
from tpuspec.decode_state import DecodeState, FinishReason, Slots, StepOutput
from tpuspec.fused_decoder import Model
from tpuspec.kernel_choice import XLA, KernelChoice
from tpuspec.kernels import SampledTokens
from tpuspec.kv_cache import DecoderCache
from tpuspec.lenience import lenient_coins, lenient_logits
from tpuspec.logit_adjustment import NO_ID
from tpuspec.ngram_drafts import agreement, either, look_up, one_hot
from tpuspec.sampling import Purpose, uniforms
from tpuspec.t5 import T5
from tpuspec.token_logprobs import TokenLogprobs, token_logprobs


def step(target: T5, draft: Model | None, state: DecodeState,
         looking_up_B: jax.Array | None = None, *, draft_length: int,
         target_width: int, source_positions: int, vocabulary_size: int,
         draft_width: int = 1, sampler: Sampler = Sampler.REJECTION,
         kernels: KernelChoice = XLA) -> tuple[DecodeState, StepOutput]:
    """Advances every active slot by 1 to ``draft_length + 1`` tokens.

    Args:
      draft: makes the drafts; without one they are looked up, where the state has the
        sources (see ``ngram_drafts``), and a slot for which none is found takes none.
      looking_up_B: slots that take looked-up drafts, as far as any are found, and the
        draft's own behind them; None is no slot.
      draft_length: γ, static.
      target_width: positions of the target pass, static; γ + 1 or more. What is more
        is padding: its K/V lies beyond every length and its logits are dropped.
      source_positions: source bucket read by cross-attention, static; at least the
        source length of every active slot.
      vocabulary_size: ids that exist.
      draft_width: positions of a draft pass, static; what is more than its tokens is
        padding, as in the target pass.
      sampler: how drafts are made and judged, static. The kernels know one way; coupled
        sampling is left to XLA on a TPU, too.

    Source: Leviathan et al. 2022, Algorithm 1; Chen et al. 2023, Algorithm 2.
    """
    # An ended request's options must not cost its neighbours anything.
    slots = dataclasses.replace(state.slots, sampling=state.slots.sampling.where(
        state.slots.active_B))
    pending_B = pending_token(slots)
    positions_BG = slots.length_B[:, None] + jnp.arange(draft_length + 1)[None, :]
    coupled, options = sampler is Sampler.COUPLED, slots.sampling.options()
    if coupled:
        arrivals_BGV = arrivals(slots.seed_B2, positions_BG, options, vocabulary_size)
        random_Bγ = arrivals_BGV[:, :-1]
    else:
        coins = uniforms(slots.seed_B2, positions_BG)
        random_Bγ = coins[Purpose.DRAFT, :, :-1]
    limit_B = jnp.minimum(slots.draft_limit_B, draft_length)
    found_BG = jnp.full(positions_BG.shape, NO_ID)
    if state.source_BS is not None:
        assert state.history_BT is not None
        with jax.named_scope("look_up"):
            found_BG = look_up(state.source_BS, state.history_BT, slots, draft_length + 1)
    found_Bγ = found_BG[:, :-1]
    draft_cache = state.draft_cache
    with jax.named_scope("draft"):
        if draft is not None and draft_length:
            assert draft_cache is not None
            given_Bγ = None if looking_up_B is None else jnp.where(
                looking_up_B[:, None], found_Bγ, NO_ID)
            drafted, draft_logits_BγV, draft_cache = propose(
                draft, slots, draft_cache, random_Bγ, given_Bγ, source_positions,
                vocabulary_size, draft_width, coupled, kernels)
        else:
            drafted, draft_logits_BγV = one_hot(jnp.maximum(found_Bγ, 0), target.config.vocab_size)
            limit_B = jnp.minimum(limit_B, _number(found_Bγ))
    drafts_Bγ = drafted.token_B

    with jax.named_scope("verify"):
        window_BG = jnp.concatenate([pending_B[:, None], drafts_Bγ], axis=1)
        window_BG = jnp.pad(window_BG, ((0, 0), (0, target_width - draft_length - 1)))
        logits_BGV, target_cache = read(target, window_BG, slots.length_B - 1, slots,
                                        state.target_cache, source_positions, kernels=kernels)
        logits_BGV = logits_BGV[:, :draft_length + 1]
    with jax.named_scope("accept"):
        index = jnp.arange(draft_length + 1)[None, :]
        examined_Bγ = index[:, :-1] < limit_B[:, None]

        def adjusted() -> jax.Array:
            earlier = index[:, None, :-1] < index[:, :, None]
            new_Bγ = slots.adjustments.new(drafts_Bγ, positions_BG[:, :-1])
            before_BGγ = jnp.where(earlier, new_Bγ[:, None, :], NO_ID)
            chosen_BGV = slots.adjustments.adjust(logits_BGV, positions_BG, before_BGγ,
                                                  slots.eos_ids_BE)
            return chosen_BGV if coupled else lenient_logits(
                chosen_BGV, drafts_Bγ, examined_Bγ, slots.sampling, vocabulary_size)

        # Where nothing is to be adjusted this is a copy: a microsecond or two a slot. The
        # accept test in both branches would compile, and lie in memory, twice.
        adjusting = slots.adjusting | jnp.any(slots.sampling.leniently_greedy_B)
        chosen_BGV = lax.cond(adjusting, adjusted, lambda: logits_BGV)
        if coupled:
            outcome = accept_equal(drafts_Bγ, chosen_BGV, options, arrivals_BGV, limit_B,
                                   slots.active_B, vocabulary_size)
        else:
            outcome = kernels.rejection_sample(
                drafts_Bγ, draft_logits_BγV, drafted.rows_B, chosen_BGV, options, limit_B,
                slots.active_B, lenient_coins(coins[Purpose.ACCEPT, :, :-1], slots.sampling),
                coins[Purpose.CORRECTION], vocabulary_size=vocabulary_size)
    with jax.named_scope("commit"):
        accepted_B = outcome.accepted_B
        tokens_BG = jnp.where(
            index < accepted_B[:, None], jnp.pad(drafts_Bγ, ((0, 0), (0, 1))),
            jnp.where(index == accepted_B[:, None], outcome.next_token_B[:, None], 0))
        # min(p, q) is the chance of acceptance under the strict rule alone.
        kept_Bγ = (index[:, :-1] < accepted_B[:, None]).astype(jnp.float32)
        overlap_Bγ = jnp.where((slots.sampling.lenience_B < 1)[:, None], kept_Bγ,
                               outcome.overlap_Bγ)
        sound_B = outcome.sound_B & jnp.all(drafted.sound_B | ~examined_Bγ, axis=1)
        asked = jnp.any(slots.active_B & slots.logprobs_B)
        logprobs = token_logprobs(logits_BGV, tokens_BG, asked, vocabulary_size)
        history_BT = state.history_BT
        before_B = slots.length_B
        slots, output = commit(slots, tokens_BG, logprobs, accepted_B, limit_B,
                               overlap_Bγ, sound_B)
        new_B = slots.length_B - before_B
        if history_BT is not None:
            history_BT = appended(history_BT, before_B, tokens_BG, new_B)
        if state.source_BS is not None:
            in_prompt_B = before_B < slots.adjustments.first_B
            output = output._replace(
                found=jnp.where(in_prompt_B, NO_ID, _number(found_BG)),
                agreed=jnp.where(in_prompt_B, 0, agreement(found_BG, tokens_BG, new_B)))
    return DecodeState(slots=slots, target_cache=target_cache, draft_cache=draft_cache,
                       history_BT=history_BT, source_BS=state.source_BS), output


def _number(ids_BK: jax.Array) -> jax.Array:
    """[B] how many ids there are; -1 is none."""
    return jnp.sum((ids_BK != NO_ID).astype(jnp.int32), axis=1)


def pending_token(slots: Slots) -> jax.Array:
    """[B] the last final token, which no model has read yet."""
    return jnp.where(slots.length_B == 1, slots.last_two_B2[:, 0], slots.last_two_B2[:, 1])


def read(model: Model, tokens_BG: jax.Array, start_B: jax.Array, slots: Slots,
         cache: DecoderCache, source_positions: int, row_B: jax.Array | None = None,
         kernels: KernelChoice = XLA) -> tuple[jax.Array, DecoderCache]:
    """One pass over a window, with cross-attention limited to the source bucket."""
    logits, written = model.decode(tokens_BG, start_B, slots.source_length_B,
                                   cache.limit_source(source_positions), row_B, kernels)
    return logits, dataclasses.replace(cache, self_k=written.self_k, self_v=written.self_v)


def propose(draft: Model, slots: Slots, cache: DecoderCache, random_Bγ: jax.Array,
            given_Bγ: jax.Array | None, source_positions: int, vocabulary_size: int, width: int,
            coupled: bool, kernels: KernelChoice,
            ) -> tuple[SampledTokens, jax.Array, DecoderCache]:
    """γ draft passes. Returns the drafts with the figures of their distributions, all [B, γ],
    the logits [B, γ, V] and the draft's cache.

    Args:
      random_Bγ: a uniform number for each draft; with coupled sampling one for each id.
      given_Bγ: drafts that are there already, for the draft to go on from; -1 is none, and
        None is none at all. The draft reads them as its own: its cache stays whole.

    The first pass reads the last two final tokens. The first of them is a rewrite
    with the same values, except after a step in which every draft was accepted,
    where it is the catch-up that keeps the draft's cache whole.
    """
    options = slots.sampling.options()

    def sample(tokens_BG: jax.Array, start_B: jax.Array, row_B: jax.Array, random_B: jax.Array,
               given_B: jax.Array | None, before_Bγ: jax.Array, cache: DecoderCache,
               ) -> tuple[tuple[SampledTokens, jax.Array], DecoderCache]:
        padding = max(width - tokens_BG.shape[1], 0)
        logits_BRV, cache = read(
            draft, jnp.pad(tokens_BG, ((0, 0), (0, padding))), start_B, slots, cache,
            source_positions, None if width > 1 else row_B, kernels)
        if width > 1:  # rows were added because few are slow: the head gets them too
            logits_BRV = jnp.take_along_axis(logits_BRV, row_B[:, None, None], axis=1)
        logits_BV = lax.cond(
            slots.adjusting, lambda: slots.adjustments.adjust(
                logits_BRV, (start_B + row_B + 1)[:, None], before_Bγ[:, None],
                slots.eos_ids_BE), lambda: logits_BRV)[:, 0]
        if coupled:
            own = propose_one(logits_BV, options, random_B, vocabulary_size)
        else:
            own = kernels.sample_tokens(logits_BV, options, random_B,
                                        vocabulary_size=vocabulary_size)
        if given_B is None:
            return (own, logits_BV), cache
        given = one_hot(jnp.maximum(given_B, 0), logits_BV.shape[-1])
        return either(given_B != NO_ID, given, (own, logits_BV)), cache

    start_B = jnp.maximum(slots.length_B - 2, 0)
    nothing_Bγ = jnp.full(random_Bγ.shape[:2], NO_ID)
    first, cache = sample(slots.last_two_B2, start_B, slots.length_B - 1 - start_B,
                          random_Bγ[:, 0], None if given_Bγ is None else given_Bγ[:, 0],
                          nothing_Bγ, cache)

    def body(carry, step):
        token_B, position_B, before_Bγ, cache = carry
        random_B, given_B = step
        new_B1 = slots.adjustments.new(token_B[:, None], position_B[:, None])
        before_Bγ = jnp.concatenate([before_Bγ[:, 1:], new_B1], axis=1)
        sampled, cache = sample(token_B[:, None], position_B, jnp.zeros_like(position_B),
                                random_B, given_B, before_Bγ, cache)
        return (sampled[0].token_B, position_B + 1, before_Bγ, cache), sampled

    (*_, cache), rest = lax.scan(
        body, (first[0].token_B, slots.length_B, nothing_Bγ, cache),
        jax.tree.map(lambda x: jnp.moveaxis(x[:, 1:], 1, 0), (random_Bγ, given_Bγ)))
    drafted, logits_BγV = jax.tree.map(
        lambda one, more: jnp.moveaxis(jnp.concatenate([one[None], more]), 0, 1), first, rest)
    return drafted, logits_BγV, cache


def appended(history_BT: jax.Array, start_B: jax.Array, tokens_BG: jax.Array,
             num_B: jax.Array) -> jax.Array:
    """Writes the first ``num_B`` tokens of every slot from position ``start_B`` on. By
    selection: a scatter is many operations on a TPU."""
    place_BT = jnp.arange(history_BT.shape[1])[None, :] - start_B[:, None]
    for place in range(tokens_BG.shape[1]):
        new = (place_BT == place) & (place < num_B)[:, None]
        history_BT = jnp.where(new, tokens_BG[:, place, None], history_BT)
    return history_BT


def catch_up(draft: Model, state: DecodeState, behind: jax.Array, *, width: int,
             source_positions: int, kernels: KernelChoice = XLA) -> DecodeState:
    """The draft reads a window of final tokens that plain steps have not shown it.

    Args:
      behind: plain steps since the draft's cache was whole; as many positions before the
        last two, which ``propose`` reads, are missing at the most. Of a longer stretch,
        windows are read one after the other, with ``behind`` less by ``width`` each time.
      width: positions of the window, at most those of the history.
    """
    slots = state.slots
    assert state.draft_cache is not None and state.history_BT is not None
    # A request younger than this stretch, or near the end of the buffer, reads some
    # positions again, to the same effect.
    start_B = jnp.clip(slots.length_B - 2 - behind, 0, state.history_BT.shape[1] - width)
    tokens_BG = jnp.take_along_axis(
        state.history_BT, start_B[:, None] + jnp.arange(width)[None, :], axis=1)
    _, cache = read(draft, tokens_BG, start_B, slots, state.draft_cache, source_positions,
                    kernels=kernels)
    return dataclasses.replace(state, draft_cache=cache)


def commit(slots: Slots, tokens_BG: jax.Array, logprobs: TokenLogprobs, accepted_B: jax.Array,
           limit_B: jax.Array, overlap_Bγ: jax.Array, sound_B: jax.Array,
           ) -> tuple[Slots, StepOutput]:
    """Cuts at the first EOS and at the length cap, and moves the lengths.

    That is the whole rollback: K/V beyond the new length is dead. What of the window is the
    decoder prompt is no output: it can end nothing, and it enters no count.
    """
    index = jnp.arange(tokens_BG.shape[1])[None, :]
    full_B = accepted_B + 1
    is_eos = jnp.any(tokens_BG[..., None] == slots.eos_ids_BE[:, None, :], axis=-1)
    prompt_B = jnp.where(
        slots.active_B, jnp.maximum(slots.adjustments.first_B - slots.length_B, 0), 0)
    is_eos &= (index >= prompt_B[:, None]) & (index < full_B[:, None])
    to_eos_B = jnp.where(jnp.any(is_eos, axis=1), jnp.argmax(is_eos, axis=1) + 1,
                         tokens_BG.shape[1] + 1)
    room_B = slots.max_length_B - slots.length_B
    live_B = slots.active_B & sound_B
    num_B = jnp.where(live_B, jnp.minimum(jnp.minimum(full_B, to_eos_B), room_B), 0)
    length_B = slots.length_B + num_B
    finish_B = jnp.where(to_eos_B <= num_B, FinishReason.EOS,
                         jnp.where(length_B >= slots.max_length_B, FinishReason.LENGTH,
                                   FinishReason.NONE))
    finish_B = jnp.where(live_B, finish_B, jnp.where(
        slots.active_B, FinishReason.NON_FINITE, FinishReason.NONE)).astype(jnp.int32)

    history = jnp.concatenate([pending_token(slots)[:, None], tokens_BG], axis=1)
    last = jnp.maximum(num_B, 1)[:, None]
    last_two = jnp.take_along_axis(history, jnp.concatenate([last - 1, last], axis=1), axis=1)
    last_two = jnp.where((num_B > 0)[:, None], last_two, slots.last_two_B2)

    kept_B = jnp.minimum(accepted_B, num_B)
    rejected_B = (accepted_B < limit_B) & (num_B == full_B)
    examined_B = jnp.where(live_B, kept_B + rejected_B.astype(jnp.int32), 0)
    overlap_B = jnp.sum(jnp.where(
        (index[:, :-1] >= prompt_B[:, None]) & (index[:, :-1] < examined_B[:, None]),
        overlap_Bγ, 0.0), axis=1)

    def behind_prompt(x_BG: jax.Array) -> jax.Array:
        at = jnp.minimum(index + prompt_B[:, None], index.shape[1] - 1)
        return jnp.take_along_axis(x_BG, at.reshape(at.shape + (1,) * (x_BG.ndim - 2)), axis=1)

    def beside_prompt(count_B: jax.Array) -> jax.Array:
        return jnp.maximum(count_B - prompt_B, 0)

    nothing_B = jnp.zeros_like(num_B)
    new = (tokens_BG, logprobs)
    tokens_BG, logprobs = lax.cond(
        jnp.any(prompt_B > 0), lambda: jax.tree.map(behind_prompt, new), lambda: new)
    output = StepOutput(
        tokens=tokens_BG, num_tokens=beside_prompt(num_B),
        drafted=jnp.where(slots.active_B, beside_prompt(limit_B), 0),
        accepted=beside_prompt(kept_B), examined=beside_prompt(examined_B), finish=finish_B,
        overlap=overlap_B, found=nothing_B, agreed=nothing_B, logprobs=logprobs)
    adjustments = slots.adjustments.commit(
        jnp.where(index < output.num_tokens[:, None], tokens_BG, NO_ID), slots.active_B)
    running_B = slots.active_B & (finish_B == FinishReason.NONE)
    return dataclasses.replace(slots, active_B=running_B, length_B=length_B,
                               last_two_B2=last_two, adjustments=adjustments), output
