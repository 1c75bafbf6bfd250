"""Coupled sampling: draft and target choose by the same random numbers.

Every id has an exponential number E at every decoder position of a request, made of its
seed. Whoever samples at that position, draft or target, takes the id with the largest p / E:
a race in which id x arrives after E(x) / p(x), so that it wins with probability exactly p(x).
(It is argmax of log p + g with Gumbel noise g = -log E.) A draft is accepted iff it is the
target's own choice, and the first that is not is replaced by that. The output is therefore what
the target alone chooses: for a seed it is the same whatever the draft and the draft length.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import random
from jaxtyping import Array, Bool, Float, Int, UInt32

from tpuspec.kernels import RejectionSample, SampledTokens, WarpedRows, WarpOptions
from tpuspec.kernels.sampling_reference import warp

_PURPOSE = 3  # beside those of ``tpuspec.sampling.Purpose``


def arrivals(seed_B2: UInt32[Array, "B 2"], positions_BG: Int[Array, "B G"],
             options: WarpOptions, vocabulary_size: int) -> Float[Array, "B G V"]:
    """Exponential numbers above 0, by slot, position and id; 1 if no slot needs any.

    Counter-based: a key of (position, purpose) under the request's seed, then Threefry of the
    ids under that key, so that they depend on nothing else.
    """
    def row(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = random.threefry_2x32(seed, jnp.stack([position.astype(jnp.uint32),
                                                    jnp.uint32(_PURPOSE)]))
        return random.threefry_2x32(key, jnp.arange(vocabulary_size, dtype=jnp.uint32))

    def draw() -> jax.Array:
        bits = jax.vmap(jax.vmap(row, in_axes=(None, 0)))(seed_B2, positions_BG)
        # Small numbers decide who wins, and near 0 a float32 has its full precision.
        uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
        return -jnp.log1p(-jnp.minimum(uniform, jnp.float32(1 - 2**-24)))

    shape = (*positions_BG.shape, vocabulary_size)
    return lax.cond(jnp.any(options.temperature_B > 0), draw,
                    lambda: jnp.ones(shape, jnp.float32))


def choose(logits_BGV: Float[Array, "B G U"], options: WarpOptions,
           arrivals_BGV: Float[Array, "B G V"], vocabulary_size: int,
           ) -> tuple[Int[Array, "B G"], Bool[Array, "B G"]]:
    """The id that wins in each row, the argmax in greedy slots; and whether the row is sound.

    Args:
      logits_BGV: U is V or more.
    """
    probabilities, _, sound_BG = warp(logits_BGV, options, vocabulary_size)
    speed = probabilities[..., :vocabulary_size] / arrivals_BGV
    ids = jnp.arange(vocabulary_size)[None, None, :]
    fastest = jnp.max(speed, axis=-1, keepdims=True)
    # As in ``warp``: the lowest of equal ids. An unsound row has none: its id must exist too.
    token_BG = jnp.min(jnp.where(speed == fastest, ids, vocabulary_size - 1), axis=-1)
    return token_BG, sound_BG


def propose_one(logits_BV: Float[Array, "B U"], options: WarpOptions,
                arrivals_BV: Float[Array, "B V"], vocabulary_size: int) -> SampledTokens:
    """A draft for each slot; the figures of its distribution, which nobody needs, are 1."""
    token_B1, sound_B1 = choose(logits_BV[:, None], options, arrivals_BV[:, None],
                                vocabulary_size)
    one_B = jnp.ones(len(logits_BV), jnp.float32)
    return SampledTokens(token_B1[:, 0], WarpedRows(one_B, one_B, one_B), sound_B1[:, 0])


def accept_equal(drafts_Bγ: Int[Array, "B g"], logits_BGV: Float[Array, "B g+1 U"],
                 options: WarpOptions, arrivals_BGV: Float[Array, "B g+1 V"],
                 limit_B: Int[Array, " B"], active_B: Bool[Array, " B"], vocabulary_size: int,
                 ) -> RejectionSample:
    """Accepts the drafts that are the target's own choice; what follows is its own as well.

    Args: as of ``kernels.rejection_sample``. The overlap of a draft is 1 if it is accepted and
    else 0: what it is on average has no form that is cheap to compute.
    """
    width = drafts_Bγ.shape[1]
    own_BG, sound_BG = choose(logits_BGV, options, arrivals_BGV, vocabulary_size)
    kept = (drafts_Bγ == own_BG[:, :width]) & (jnp.arange(width)[None, :] < limit_B[:, None])
    leading_Bγ = jnp.cumprod(kept.astype(jnp.int32), axis=-1)
    accepted_B = jnp.where(active_B, jnp.sum(leading_Bγ, axis=-1), 0)
    next_token_B = jnp.take_along_axis(own_BG, accepted_B[:, None], axis=1)[:, 0]
    seen = jnp.arange(width + 1)[None, :] <= accepted_B[:, None]
    return RejectionSample(
        accepted_B, jnp.where(active_B, next_token_B, 0),
        jnp.where(active_B[:, None], leading_Bγ.astype(jnp.float32), 0.0),
        ~active_B | jnp.all(sound_BG | ~seen, axis=1))
