"""Attention to a cache in plain jnp: what the kernels compute, and the CPU's path."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tpuspec.kernels.attention_blocks import LANES, MASKED
from tpuspec.kernels.implementation import precision_of


def attend(
    q_BGE: Float[Array, "B G E"],
    k_BPTL: Float[Array, "B P T 128"],
    v_BPTL: Float[Array, "B P T 128"],
    *,
    head_width: int,
    seen_BGT: Bool[Array, "B G T"],
    bias_BNGT: Float[Array, "B N G T"] | None = None,
) -> Float[Array, "B G E"]:
    """softmax(q Kᵀ + bias) V, with logits and softmax in float32 and no 1/sqrt(H).

    Args:
      seen_BGT: which positions a query attends to. Nothing passes from the others, be it
        NaN. A query that sees none gets 0.
    """
    slots, window, width = q_BGE.shape
    _, tiles, positions, _ = k_BPTL.shape
    heads = LANES // head_width
    seen_BNGT = jnp.broadcast_to(seen_BGT[:, None], (slots, tiles * heads, window, positions))
    # A weight of 0 does not hide a NaN.
    live_BPTL = jnp.broadcast_to(jnp.any(seen_BGT, axis=1)[:, None, :, None], v_BPTL.shape)
    values = jnp.where(live_BPTL, v_BPTL, jnp.zeros_like(v_BPTL))
    split = (slots, tiles, positions, heads, head_width)
    options = dict(precision=precision_of(k_BPTL.dtype), preferred_element_type=jnp.float32)
    logits_BNGT = jnp.einsum(
        "bgpih,bptih->bpigt",
        q_BGE.reshape(slots, window, tiles, heads, head_width),
        k_BPTL.reshape(split),
        **options,
    ).reshape(slots, tiles * heads, window, positions)
    if bias_BNGT is not None:
        logits_BNGT = logits_BNGT + bias_BNGT
    logits_BNGT = jnp.where(seen_BNGT, logits_BNGT, MASKED)
    weights_BNGT = jnp.where(seen_BNGT, jax.nn.softmax(logits_BNGT, axis=-1), 0.0)
    mixed = jnp.einsum(
        "bpigt,bptih->bgpih",
        weights_BNGT.astype(values.dtype).reshape(slots, tiles, heads, window, positions),
        values.reshape(split),
        **options,
    )
    return mixed.reshape(slots, window, width).astype(q_BGE.dtype)
