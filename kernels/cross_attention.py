"""Attention of G positions per slot to the keys and values of its source."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpuspec.kernels.attention_blocks import AttentionBlocks
from tpuspec.kernels.attention_reference import attend
from tpuspec.kernels.cross_attention_pallas import cross_attention_pallas
from tpuspec.kernels.implementation import Implementation, dispatch


def cross_attention(
    q_BGE: Float[Array, "B G E"],
    k_BPSL: Float[Array, "B P S 128"],
    v_BPSL: Float[Array, "B P S 128"],
    lengths_B: Int[Array, " B"],
    *,
    head_width: int,
    implementation: Implementation | None = None,
    blocks: AttentionBlocks | None = None,
    interpret: Any = False,
) -> Float[Array, "B G E"]:
    """softmax(q Kᵀ) V over the first ``length`` source positions of every slot.

    No bias, no 1/sqrt(H), logits and softmax in float32. Only the blocks below the
    length are read; what lies beyond can do no harm. A slot of length 0 gets 0.
    E = N * H.

    Args:
      q_BGE: projections of the positions, heads side by side.
      k_BPSL, v_BPSL: of the sources, in the layout of ``attention_blocks``.
      lengths_B: int32 source lengths, 0 to S.
      head_width: H.
      implementation: None takes the kernel on a TPU if it supports the shapes.
      blocks: block sizes of the kernel, by default by TPU generation.
      interpret: True, or ``pltpu.InterpretParams``, runs the kernel on a CPU.

    Raises:
      NotImplementedError: "pallas" was asked for, and the shapes are not G <= 16, S a
        multiple of 128, whole heads in 128 lanes, float32 or bfloat16.
    """
    arguments = (q_BGE, k_BPSL, v_BPSL, lengths_B.astype(jnp.int32))
    return dispatch(
        implementation,
        pallas=lambda: cross_attention_pallas(
            *arguments, head_width=head_width, blocks=blocks, interpret=interpret
        ),
        xla=lambda: _xla(*arguments, head_width=head_width),
    )


def sharded_cross_attention(
    mesh: jax.sharding.Mesh, *, heads: str | None, slots: str | None = None, **options: Any
) -> Any:
    """``cross_attention`` with heads, and slots if named, split over axes of a mesh.

    Nothing is exchanged between devices. Each needs whole lane tiles of heads.

    Args:
      mesh: the devices.
      heads: axis that splits E and P, or None.
      slots: axis that splits B.
      options: keyword arguments of ``cross_attention``.
    """
    rows, cache = jax.P(slots, None, heads), jax.P(slots, heads)
    return jax.shard_map(
        functools.partial(cross_attention, **options),
        mesh=mesh,
        in_specs=(rows, cache, cache, jax.P(slots)),
        out_specs=rows,
        check_vma=False,
    )


def _xla(
    q_BGE: jax.Array,
    k_BPSL: jax.Array,
    v_BPSL: jax.Array,
    lengths_B: jax.Array,
    *,
    head_width: int,
) -> jax.Array:
    seen_BS = jnp.arange(k_BPSL.shape[2])[None, :] < lengths_B[:, None]
    seen_BGS = jnp.broadcast_to(seen_BS[:, None], (q_BGE.shape[0], q_BGE.shape[1], k_BPSL.shape[2]))
    return attend(q_BGE, k_BPSL, v_BPSL, head_width=head_width, seen_BGT=seen_BGS)
