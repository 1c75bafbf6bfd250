"""Self-attention of G new positions per slot over a fixed cache, written in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tpuspec.kernels.attention_blocks import LANES, AttentionBlocks
from tpuspec.kernels.attention_reference import attend
from tpuspec.kernels.implementation import Implementation, dispatch
from tpuspec.kernels.verify_attention_pallas import verify_attention_pallas


def verify_attention(
    q_BGE: Float[Array, "B G E"],
    k_BGE: Float[Array, "B G E"],
    v_BGE: Float[Array, "B G E"],
    k_BPTL: Float[Array, "B P T 128"],
    v_BPTL: Float[Array, "B P T 128"],
    bias_ND: Float[Array, "N D"],
    start_B: Int[Array, " B"],
    *,
    implementation: Implementation | None = None,
    blocks: AttentionBlocks | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B G E"], Float[Array, "B P T 128"], Float[Array, "B P T 128"]]:
    """Writes G new keys and values of every slot and attends to all up to each position.

    softmax(q Kᵀ + bias) V with T5's relative bias, no 1/sqrt(H), logits and softmax in
    float32. Of the cache only the blocks below ``start + G`` are read, and what lies
    beyond is neither changed nor can it do harm. E = N * H.

    Args:
      q_BGE, k_BGE, v_BGE: projections of the new positions, heads side by side.
      k_BPTL, v_BPTL: caches, in the layout of ``attention_blocks``; donate them, so that
        they are updated in place.
      bias_ND: attention bias by distance, query position - key position; the last column
        is that of all distances >= D - 1.
      start_B: int32 position of the first new row of each slot, at most T - G. Larger
        ones count as T - G, which is what ``lax.dynamic_update_slice`` does.
      implementation: None takes the kernel on a TPU if it supports the shapes.
      blocks: block sizes of the kernel, by default by TPU generation.
      interpret: True, or ``pltpu.InterpretParams``, runs the kernel on a CPU.

    Returns:
      The mixed values [B, G, E] and both caches.

    Raises:
      NotImplementedError: "pallas" was asked for, and the shapes are not G <= 16,
        D <= 128, T a multiple of 128, whole heads in 128 lanes, float32 or bfloat16.
    """
    arguments = (q_BGE, k_BGE, v_BGE, k_BPTL, v_BPTL, bias_ND, start_B.astype(jnp.int32))
    return dispatch(
        implementation,
        pallas=lambda: verify_attention_pallas(*arguments, blocks=blocks, interpret=interpret),
        xla=lambda: _xla(*arguments),
    )


def sharded_verify_attention(
    mesh: jax.sharding.Mesh, *, heads: str | None, slots: str | None = None, **options: Any
) -> Any:
    """``verify_attention`` with heads, and slots if named, split over axes of a mesh.

    Nothing is exchanged between devices. Each needs whole lane tiles of heads.

    Args:
      mesh: the devices.
      heads: axis that splits E, P and N, or None.
      slots: axis that splits B.
      options: keyword arguments of ``verify_attention``.
    """
    rows, cache = jax.P(slots, None, heads), jax.P(slots, heads)
    return jax.shard_map(
        functools.partial(verify_attention, **options),
        mesh=mesh,
        in_specs=(rows, rows, rows, cache, cache, jax.P(heads), jax.P(slots)),
        out_specs=(rows, cache, cache),
        check_vma=False,
    )


def _xla(
    q_BGE: jax.Array,
    k_BGE: jax.Array,
    v_BGE: jax.Array,
    k_BPTL: jax.Array,
    v_BPTL: jax.Array,
    bias_ND: jax.Array,
    start_B: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    slots, window, width = q_BGE.shape
    tiles, positions = k_BPTL.shape[1:3]
    num_heads, distances = bias_ND.shape
    start_B = jnp.clip(start_B, 0, positions - window)

    def write(cache_PTL: jax.Array, new_GE: jax.Array, start: jax.Array) -> jax.Array:
        new_PGL = new_GE.reshape(window, tiles, LANES).swapaxes(0, 1)
        return lax.dynamic_update_slice(cache_PTL, new_PGL, (0, start, 0))

    k_BPTL = jax.vmap(write)(k_BPTL, k_BGE, start_B)
    v_BPTL = jax.vmap(write)(v_BPTL, v_BGE, start_B)
    position_BG1 = start_B[:, None, None] + jnp.arange(window)[None, :, None]
    distance_BGT = position_BG1 - jnp.arange(positions)[None, None, :]
    bias_NBGT = bias_ND.astype(jnp.float32)[:, jnp.clip(distance_BGT, 0, distances - 1)]
    mixed_BGE = attend(
        q_BGE,
        k_BPTL,
        v_BPTL,
        head_width=width // num_heads,
        seen_BGT=distance_BGT >= 0,
        bias_BNGT=jnp.swapaxes(bias_NBGT, 0, 1),
    )
    return mixed_BGE, k_BPTL, v_BPTL
