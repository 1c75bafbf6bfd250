"""Log-probabilities of tokens under the model itself: before penalties, biases, bans,
temperature and warps, over the ids that exist."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

MAX_TOP_LOGPROBS = 20


class TokenLogprobs(NamedTuple):
    """Natural logarithms, on device or host; all 0 where no slot asks.

    Attributes:
      tokens: [B, G] of the step's tokens.
      top: [B, G, N] of the most likely ids, best first; N is ``MAX_TOP_LOGPROBS``, or the
        vocabulary's size if that is less.
      top_ids: [B, G, N] which these are; ties with the lowest id first.
    """

    tokens: jax.Array | np.ndarray
    top: jax.Array | np.ndarray
    top_ids: jax.Array | np.ndarray

    def pack(self) -> jax.Array:
        """[B, G (1 + 2 N)] int32."""
        slots = self.tokens.shape[0]
        arrays = (lax.bitcast_convert_type(jnp.asarray(self.tokens), jnp.int32),
                  lax.bitcast_convert_type(jnp.asarray(self.top), jnp.int32),
                  jnp.asarray(self.top_ids))
        return jnp.concatenate([x.reshape(slots, -1) for x in arrays], axis=1)

    @classmethod
    def unpack(cls, packed: np.ndarray, width: int) -> "TokenLogprobs":
        """Args: width: G."""
        slots = len(packed)
        tokens, top, top_ids = np.split(
            packed, [width, (packed.shape[1] + width) // 2], axis=1)
        return cls(np.ascontiguousarray(tokens).view(np.float32),
                   np.ascontiguousarray(top).view(np.float32).reshape(slots, width, -1),
                   top_ids.reshape(slots, width, -1))


def token_logprobs(logits_BGV: Float[Array, "B G V"], tokens_BG: Int[Array, "B G"],
                   asked: Bool[Array, ""], vocabulary_size: int) -> TokenLogprobs:
    """Of one token for each row; nothing is computed unless it is asked for."""
    def compute() -> TokenLogprobs:
        exist = jnp.arange(logits_BGV.shape[-1])[None, None, :] < vocabulary_size
        logits = jnp.where(exist, logits_BGV, -jnp.inf)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        top, top_ids = lax.top_k(logits, shape[-1])
        chosen = jnp.take_along_axis(logits, tokens_BG[..., None], axis=-1)
        return TokenLogprobs((chosen - total)[..., 0], top - total, top_ids)

    def nothing() -> TokenLogprobs:
        return TokenLogprobs(jnp.zeros(shape[:2]), jnp.zeros(shape), jnp.zeros(shape, jnp.int32))

    shape = (*logits_BGV.shape[:2], min(MAX_TOP_LOGPROBS, vocabulary_size))
    return lax.cond(asked, compute, nothing)
