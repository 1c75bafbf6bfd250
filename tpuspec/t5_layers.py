"""Building blocks of T5 as Flax NNX modules.

Weights are stored ``[out, in]``, as Hugging Face does and as XLA's CPU backend
multiplies fastest for a few rows; TPU compilers choose their own layout.
Numerics follow T5: norms, attention logits, softmax and final logits in
float32, no 1/sqrt(H) scale in attention, no biases in linear maps, and a
relative bias that depends on the distance only.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from tpuspec.config import Activation, T5Config

# Below this many rows the weights go first in the product: one streaming pass
# over W [out, in] whatever the number of rows.
_FEW_ROWS = 64

MASKED = -1e30  # added to float32 attention logits; finite, so empty rows stay finite


def precision_of(dtype: jnp.dtype) -> lax.Precision | None:
    """float32 means float32: accelerators would round the factors of a product."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def matmul_out_in(x: jax.Array, weight: jax.Array, *,
                  preferred: jnp.dtype | None = None) -> jax.Array:
    """x Wᵀ over the last axis of ``x``, with ``weight`` stored [out, in]."""
    preferred = preferred or x.dtype
    options = dict(preferred_element_type=preferred, precision=precision_of(x.dtype))
    rows = math.prod(x.shape[:-1])
    if rows > _FEW_ROWS:
        return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), **options)
    flat = x.reshape(rows, x.shape[-1])
    out = lax.dot_general(weight, flat, (((1,), (1,)), ((), ())), **options)
    return out.T.reshape(*x.shape[:-1], weight.shape[0])


class Linear(nnx.Module):
    """y = x Wᵀ with W of shape [out, in], no bias."""

    def __init__(self, in_dim: int, out_dim: int, *, logical: tuple[str, str],
                 std: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(
            std * jax.random.normal(rngs.params(), (out_dim, in_dim), dtype),
            logical=logical)

    def __call__(self, x: jax.Array) -> jax.Array:
        return matmul_out_in(x, self.weight[...])


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, computed in float32; no mean, no bias."""

    def __init__(self, dim: int, *, epsilon: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((dim,), dtype), logical=("embed",))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        weight = self.weight[...]
        return (x32 * scale).astype(x.dtype) * lax.broadcast_in_dim(
            weight, x.shape, (x.ndim - 1,))


def relative_buckets(distance: np.ndarray, *, bidirectional: bool, num_buckets: int,
                     max_distance: int) -> np.ndarray:
    """T5's bucket of ``distance = query position - key position``.

    Host-side on constants: the table of biases by distance is what programs see.
    """
    distance = np.asarray(distance, np.int64)
    bucket = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        bucket += num_buckets * (distance < 0)  # the key is to the right
        distance = np.abs(distance)
    else:
        distance = np.maximum(distance, 0)
    exact = num_buckets // 2
    safe = np.maximum(distance, 1).astype(np.float64)
    far = exact + (np.log(safe / exact) / math.log(max_distance / exact)
                   * (num_buckets - exact)).astype(np.int64)
    return bucket + np.where(distance < exact, distance,
                             np.minimum(far, num_buckets - 1))


class RelativeBias(nnx.Module):
    """Learned attention bias by bucketed distance (T5)."""

    def __init__(self, config: T5Config, *, bidirectional: bool, dtype: jnp.dtype,
                 rngs: nnx.Rngs):
        self.weight = nnx.Param(
            0.1 * jax.random.normal(
                rngs.params(), (config.relative_attention_num_buckets, config.num_heads),
                dtype),
            logical=("buckets", "heads"))
        self.bidirectional = bidirectional
        self.num_buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance

    def by_distance(self) -> jax.Array:
        """[N, distances] float32; the bias is constant from max_distance on.

        Distances 0..max_distance for a decoder; -max..max for an encoder.
        """
        low = -self.max_distance if self.bidirectional else 0
        buckets = relative_buckets(
            np.arange(low, self.max_distance + 1), bidirectional=self.bidirectional,
            num_buckets=self.num_buckets, max_distance=self.max_distance)
        return self.weight[...].astype(jnp.float32)[buckets].T

    def __call__(self, distance: jax.Array) -> jax.Array:
        """Bias [N, *distance.shape] float32 of ``distance = query - key``."""
        low = -self.max_distance if self.bidirectional else 0
        index = jnp.clip(distance, low, self.max_distance) - low
        return jnp.take(self.by_distance(), index, axis=1)


class Attention(nnx.Module):
    """Multi-head attention; the caller brings bias and mask, so that one module
    serves encoder, decoder and cross-attention."""

    def __init__(self, config: T5Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        d_model, inner, head = config.d_model, config.inner_dim, config.d_kv
        reader = dict(logical=("heads", "embed"), dtype=dtype, rngs=rngs)
        self.q = Linear(d_model, inner, std=(d_model * head) ** -0.5, **reader)
        self.k = Linear(d_model, inner, std=d_model**-0.5, **reader)
        self.v = Linear(d_model, inner, std=d_model**-0.5, **reader)
        self.o = Linear(inner, d_model, std=inner**-0.5, logical=("embed", "heads"),
                        dtype=dtype, rngs=rngs)
        self.num_heads = config.num_heads

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], self.num_heads, -1)

    def queries(self, x_BGD: jax.Array) -> jax.Array:
        return self._split(self.q(x_BGD))

    def keys_values(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._split(self.k(x_BTD)), self._split(self.v(x_BTD))

    def attend(self, q_BGNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array,
               bias: jax.Array) -> jax.Array:
        """Args: bias broadcasts to [B, N, G, T] float32 and holds the mask."""
        logits = jnp.einsum("bgnh,btnh->bngt", q_BGNH, k_BTNH,
                            preferred_element_type=jnp.float32,
                            precision=precision_of(q_BGNH.dtype))
        logits = logits + jnp.broadcast_to(bias, logits.shape)
        weights = jax.nn.softmax(logits, axis=-1).astype(v_BTNH.dtype)
        mixed = jnp.einsum("bngt,btnh->bgnh", weights, v_BTNH,
                           precision=precision_of(v_BTNH.dtype))
        return self.o(mixed.reshape(*mixed.shape[:2], -1))


class FeedForward(nnx.Module):
    """ReLU (T5 1.0) or gated GELU / SiLU (T5 1.1, Flan, mT5, UL2, ...)."""

    def __init__(self, config: T5Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        d_model, d_ff = config.d_model, config.d_ff
        wide = dict(logical=("mlp", "embed"), std=d_model**-0.5, dtype=dtype, rngs=rngs)
        self.wi_0 = Linear(d_model, d_ff, **wide)
        self.wi_1 = Linear(d_model, d_ff, **wide) if config.activation.gated else None
        self.wo = Linear(d_ff, d_model, std=d_ff**-0.5, logical=("embed", "mlp"),
                         dtype=dtype, rngs=rngs)
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.wi_0(x)
        match self.activation:
            case Activation.RELU:
                return self.wo(jax.nn.relu(hidden))
            case Activation.GATED_GELU:
                hidden = jax.nn.gelu(hidden, approximate=True)
            case Activation.GATED_SILU:
                hidden = jax.nn.silu(hidden)
        assert self.wi_1 is not None
        return self.wo(hidden * self.wi_1(x))
