"""A pass of a whole T5 decoder over G positions per slot, weights read once."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpuspec.kernels.cross_attention import cross_attention
from tpuspec.kernels.decoder_pass_pallas import decoder_pass_pallas
from tpuspec.kernels.decoder_weights import Activation, DecoderWeights, activate, rms_norm, rounded
from tpuspec.kernels.implementation import Implementation, dispatch, precision_of
from tpuspec.kernels.verify_attention import verify_attention


def decoder_pass(
    x_BGD: Float[Array, "B G D"],
    weights: DecoderWeights,
    k_LBPTL: Float[Array, "L B P T 128"],
    v_LBPTL: Float[Array, "L B P T 128"],
    cross_k_LBPSL: Float[Array, "L B P S 128"],
    cross_v_LBPSL: Float[Array, "L B P S 128"],
    start_B: Int[Array, " B"],
    source_lengths_B: Int[Array, " B"],
    *,
    activation: Activation,
    epsilon: float,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> tuple[
    Float[Array, "B G D"], Float[Array, "L B P T 128"], Float[Array, "L B P T 128"]
]:
    """All layers: self-attention, cross-attention, feed-forward, and the norm after the last.

    Reads and writes the caches as ``verify_attention`` and ``cross_attention`` do, and
    computes what they do, with every layer's input, and what its linear maps give,
    rounded to the dtype of x.

    Args:
      x_BGD: embeddings of the tokens read.
      weights: of the layers; the relative bias is the same in all of them.
      k_LBPTL, v_LBPTL: self-attention caches, [B, P, T, 128] of every layer in the layout
        of ``attention_blocks``; donate them, so that they are updated in place.
      cross_k_LBPSL, cross_v_LBPSL: keys and values of the sources.
      start_B: int32 position of the first row of each slot, at most T - G; larger ones
        count as T - G.
      source_lengths_B: int32, 0 to S.
      activation: of the feed-forward.
      epsilon: of the norms.
      implementation: None takes the kernel on a TPU if it supports the shapes.
      interpret: True, or ``pltpu.InterpretParams``, runs the kernel on a CPU.

    Returns:
      The normed states [B, G, D] and both self-attention caches.

    Raises:
      NotImplementedError: "pallas" was asked for, and the shapes are not G <= 8, T and
        S multiples of 128, D, E and F multiples of 128, whole heads
        in 128 lanes, one dtype, float32 or bfloat16; or the weights of one layer and the
        caches of two slots do not fit in the VMEM.
    """
    arguments = (
        x_BGD, weights, k_LBPTL, v_LBPTL, cross_k_LBPSL, cross_v_LBPSL,
        start_B.astype(jnp.int32), source_lengths_B.astype(jnp.int32),
    )  # fmt: skip
    options: dict[str, Any] = dict(activation=activation, epsilon=epsilon)
    return dispatch(
        implementation,
        pallas=lambda: decoder_pass_pallas(*arguments, **options, interpret=interpret),
        xla=lambda: _xla(*arguments, **options),
    )


def sharded_decoder_pass(mesh: jax.sharding.Mesh, *, slots: str, **options: Any) -> Any:
    """``decoder_pass`` with slots split over an axis of a mesh.

    Nothing is exchanged between devices: each reads all weights, which a model that fits
    here is small enough for, and along other axes all compute the same.

    Args:
      mesh: the devices.
      slots: axis that splits B.
      options: keyword arguments of ``decoder_pass``.
    """
    rows, cache = jax.P(slots), jax.P(None, slots)
    return jax.shard_map(
        functools.partial(decoder_pass, **options),
        mesh=mesh,
        in_specs=(rows, jax.P(), cache, cache, cache, cache, rows, rows),
        out_specs=(rows, cache, cache),
        check_vma=False,
    )


def _xla(
    x_BGD: jax.Array,
    weights: DecoderWeights,
    k_LBPTL: jax.Array,
    v_LBPTL: jax.Array,
    cross_k_LBPSL: jax.Array,
    cross_v_LBPSL: jax.Array,
    start_B: jax.Array,
    source_lengths_B: jax.Array,
    *,
    activation: Activation,
    epsilon: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    slots, window, width = x_BGD.shape
    dtype, inner = x_BGD.dtype, weights.cross_q.shape[1]
    bias_ND = weights.bias[:, ::-1]
    layers = dataclasses.replace(weights, last_norm=None, bias=None)

    def product(x_RI: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.einsum("ri,oi->ro", x_RI, weight, precision=precision_of(dtype),
                          preferred_element_type=jnp.float32)  # fmt: skip

    def rows(x_RE: jax.Array) -> jax.Array:
        return x_RE.astype(dtype).reshape(slots, window, inner)

    def add(x_RD: jax.Array, mixed: jax.Array, weight: jax.Array) -> jax.Array:
        y_RD = product(mixed.reshape(slots * window, -1), weight)
        return rounded(x_RD + rounded(y_RD, dtype), dtype)

    x_RD = x_BGD.astype(jnp.float32).reshape(slots * window, width)
    for layer in range(k_LBPTL.shape[0]):
        of: DecoderWeights = jax.tree.map(lambda stack, layer=layer: stack[layer], layers)
        qkv_RE = product(rms_norm(x_RD, of.self_norm, epsilon, dtype), of.qkv)
        q, k, v = map(rows, jnp.split(qkv_RE, 3, axis=1))
        mixed, k, v = verify_attention(
            q, k, v, k_LBPTL[layer], v_LBPTL[layer], bias_ND, start_B, implementation="xla",
        )  # fmt: skip
        k_LBPTL, v_LBPTL = k_LBPTL.at[layer].set(k), v_LBPTL.at[layer].set(v)
        x_RD = add(x_RD, mixed, of.self_o)
        q_RE = product(rms_norm(x_RD, of.cross_norm, epsilon, dtype), of.cross_q)
        mixed = cross_attention(
            rows(q_RE), cross_k_LBPSL[layer], cross_v_LBPSL[layer], source_lengths_B,
            head_width=inner // bias_ND.shape[0], implementation="xla",
        )  # fmt: skip
        x_RD = add(x_RD, mixed, of.cross_o)
        hidden_RF = product(rms_norm(x_RD, of.mlp_norm, epsilon, dtype), of.wi)
        x_RD = add(x_RD, activate(hidden_RF, activation, dtype), of.wo)
    x_RD = rms_norm(x_RD, weights.last_norm, epsilon, dtype)
    return x_RD.reshape(x_BGD.shape), k_LBPTL, v_LBPTL
