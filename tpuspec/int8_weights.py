"""A weight as int8, with one float32 scale for each output channel."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

_STEPS = 127  # to either side of 0: symmetric, so -128 is not used


def quantize_weight(weight: Float[Array, "*parts out in"],
                    ) -> tuple[Int8[Array, "*parts out in"], Float32[Array, "*parts out"]]:
    """Steps and scales, with |weight - steps * scale| <= scale / 2.

    The largest magnitude of a channel is 127 steps. Finite weights only: what is not
    finite has no steps, and it is for the caller to look.
    """
    weight = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(weight), axis=-1) / _STEPS
    # A channel of zeros has steps of 0 at any scale. One of numbers so small that their
    # scale would be flushed to 0 is taken for zeros.
    scale = jnp.where(scale >= jnp.finfo(jnp.float32).tiny, scale, jnp.ones_like(scale))
    return jnp.round(weight / jnp.expand_dims(scale, -1)).astype(jnp.int8), scale
