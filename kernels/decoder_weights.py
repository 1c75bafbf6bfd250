"""The decoder's weights as its kernel reads them, and the maths of one layer beside products."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from tpuspec.kernels.attention_blocks import LANES

Activation = Literal["relu", "gated-gelu", "gated-silu"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["self_norm", "cross_norm", "mlp_norm", "qkv", "self_o", "cross_q", "cross_o",
                 "wi", "wo", "last_norm", "bias"],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """One array of all layers for each weight, and what all layers share.

    Attributes:
      self_norm, cross_norm, mlp_norm: [L, 1, D].
      qkv: [L, 3 E, D], queries first, then keys and values.
      self_o, cross_o: [L, D, E].
      cross_q: [L, E, D].
      wi: [L, F, D], or [L, 2 F, D] if gated, of which the gate comes first.
      wo: [L, D, F].
      last_norm: [1, D], of the norm after the last layer.
      bias: [N, 128] float32, see ``bias_table``.
    """

    self_norm: jax.Array
    cross_norm: jax.Array
    mlp_norm: jax.Array
    qkv: jax.Array
    self_o: jax.Array
    cross_q: jax.Array
    cross_o: jax.Array
    wi: jax.Array
    wo: jax.Array
    last_norm: jax.Array
    bias: jax.Array

    @property
    def maps(self) -> tuple[jax.Array, ...]:
        """The linear maps in the order of their use."""
        return self.qkv, self.self_o, self.cross_q, self.cross_o, self.wi, self.wo


def bias_table(bias_ND: jax.Array) -> jax.Array:
    """Relative bias of at most 128 distances, query position - key position, the last of
    which stands for all beyond, as [N, 128] float32, farthest distance first.

    Raises:
      NotImplementedError: there are more.
    """
    distances = bias_ND.shape[1]
    if distances > LANES:
        raise NotImplementedError(f"distances must be at most {LANES}, got {distances}")
    bias_ND = bias_ND.astype(jnp.float32)
    return jnp.pad(bias_ND, ((0, 0), (0, LANES - distances)), mode="edge")[:, ::-1]


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """In float32 the numbers that ``dtype`` has: v4 computes in float32 only."""
    return x.astype(dtype).astype(jnp.float32)


def rms_norm(x_RD: jax.Array, weight_1D: jax.Array, epsilon: float, dtype: jnp.dtype) -> jax.Array:
    """x / rms(x) * weight of float32 rows, rounded before the weight and after."""
    scale_R1 = lax.rsqrt(jnp.mean(x_RD * x_RD, axis=-1, keepdims=True) + epsilon)
    return (rounded(x_RD * scale_R1, dtype) * weight_1D.astype(jnp.float32)).astype(dtype)


def activate(hidden: jax.Array, activation: Activation, dtype: jnp.dtype) -> jax.Array:
    """[R, F] of float32 products with wi; GELU is the tanh form."""
    hidden = rounded(hidden, dtype)
    if activation == "relu":
        return jax.nn.relu(hidden).astype(dtype)
    gate, linear = jnp.split(hidden, 2, axis=-1)
    gelu = activation == "gated-gelu"
    gate = jax.nn.gelu(gate, approximate=True) if gelu else jax.nn.silu(gate)
    return (rounded(gate, dtype) * linear).astype(dtype)
