"""Building blocks of T5 as Flax NNX modules.

Weights are stored ``[out, in]``, as Hugging Face does and as XLA's CPU backend
multiplies fastest for a few rows; TPU compilers choose their own layout.
Numerics follow T5: norms, attention logits, softmax and final logits in
float32, no 1/sqrt(H) scale in attention, no biases in linear maps, and a
relative bias that depends on the distance only.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from tpuspec.config import Activation, Quantization, T5Config
from tpuspec.int8_weights import quantize_weight
from tpuspec.kernels.implementation import precision_of

# Up to this many rows XLA's CPU backend is faster when the product is written as
# what it is: one streaming pass over W [out, in] whatever the number of rows.
_FEW_ROWS = 32

def matmul_out_in(x: jax.Array, weight: jax.Array, *, scale: jax.Array | None = None,
                  preferred: jnp.dtype | None = None) -> jax.Array:
    """x Wᵀ over the last axis of ``x``, with ``weight`` stored [*parts, out, in].

    Returns [*x.shape[:-1], *parts, out], times ``scale`` [*parts, out] if given. The
    scale of int8 weights comes after the product, so that TPU v4 multiplies by the bytes
    as they are: of W times scale it makes bfloat16 first, at twice the cycles.

    A verify pass has γ+1 rows, and XLA's CPU backend is slow at products of few
    rows: written as a sum of products they take two thirds of the time or less
    (float32, 4 and 8 rows, weights of 0.25 to 11 MB, 2 cores).
    """
    result = preferred or x.dtype
    preferred = jnp.float32 if scale is not None else result  # rounded once, when scaled
    rows = math.prod(x.shape[:-1])
    streamed = rows <= _FEW_ROWS and not (
        rows == 1 and x.dtype == weight.dtype == jnp.float32)

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.dot_general(x, weight.astype(x.dtype), (((1,), (weight.ndim - 1,)), ((), ())),
                               preferred_element_type=preferred,
                               precision=precision_of(x.dtype))

    def on_cpu(x: jax.Array, weight: jax.Array) -> jax.Array:
        flat = weight.reshape(-1, weight.shape[-1])  # a product with parts would copy them
        if streamed:
            products = flat[:, None, :].astype(jnp.float32) * x[None, :, :].astype(jnp.float32)
            y = jnp.sum(products, axis=-1).T.astype(preferred)
        else:
            y = product(x, flat)
        return y.reshape(rows, *weight.shape[:-1])

    x_RI = x.reshape(rows, x.shape[-1])
    if streamed or weight.ndim > 2:
        y = lax.platform_dependent(x_RI, weight, cpu=on_cpu, default=product)
    else:
        y = product(x_RI, weight)
    if scale is not None:
        y = (y * lax.broadcast_in_dim(scale, y.shape, tuple(range(1, y.ndim)))).astype(result)
    return y.reshape(*x.shape[:-1], *weight.shape[:-1])


class _Weights(nnx.Module):
    """W of shape [*parts, out, in], with a scale [*parts, out] if it is quantized."""

    def __init__(self, weight: jax.Array, *, logical: tuple[str, ...],
                 quantization: Quantization | None):
        scale = None
        if quantization is Quantization.INT8:
            weight, scale = quantize_weight(weight)
        self.weight = nnx.Param(weight, logical=logical)
        self.scale = None if scale is None else nnx.Param(scale, logical=logical[:-1])

    def product(self, x: jax.Array) -> jax.Array:
        return matmul_out_in(x, self.weight[...],
                             scale=None if self.scale is None else self.scale[...])


class Linear(_Weights):
    """y = x Wᵀ with W of shape [out, in], no bias."""

    def __init__(self, in_dim: int, out_dim: int, *, logical: tuple[str, str],
                 std: float, dtype: jnp.dtype, rngs: nnx.Rngs,
                 quantization: Quantization | None = None):
        weight = std * jax.random.normal(rngs.params(), (out_dim, in_dim), dtype)
        super().__init__(weight, logical=logical, quantization=quantization)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.product(x)


class Linears(_Weights):
    """Linear maps that read the same x, in one product: weights [parts, out, in]."""

    def __init__(self, in_dim: int, out_dim: int, *, logical: tuple[str, str],
                 stds: Sequence[float], dtype: jnp.dtype, rngs: nnx.Rngs,
                 quantization: Quantization | None = None):
        shape = (len(stds), out_dim, in_dim)
        weight = jnp.asarray(stds, dtype)[:, None, None] * jax.random.normal(
            rngs.params(), shape, dtype)
        super().__init__(weight, logical=("parts", *logical), quantization=quantization)

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        """One result for each part."""
        y = self.product(x)
        return [y[..., part, :] for part in range(y.shape[-2])]


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


def _of_one_row(rows: int, cpu: Callable[[jax.Array, jax.Array], jax.Array],
                default: Callable[[jax.Array, jax.Array], jax.Array],
                *arrays: jax.Array) -> jax.Array:
    """XLA's CPU backend copies a whole cache, twice, before a product of one row with
    what was just written to it; a sum of products reads it in place."""
    if rows == 1:
        return lax.platform_dependent(*arrays, cpu=cpu, default=default)
    return default(*arrays)


def attention_logits(q_BNGH: jax.Array, k_BNTH: jax.Array) -> jax.Array:
    """[B, N, G, T] float32."""
    def as_sum(q: jax.Array, k: jax.Array) -> jax.Array:
        products = q.astype(jnp.float32) * k.astype(jnp.float32)
        return jnp.sum(products, axis=-1)[:, :, None, :]

    def as_product(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.einsum("bngh,bnth->bngt", q, k, preferred_element_type=jnp.float32,
                          precision=precision_of(q.dtype))

    return _of_one_row(q_BNGH.shape[2], as_sum, as_product, q_BNGH, k_BNTH)


def attention_mix(weights_BNGT: jax.Array, v_BNTH: jax.Array) -> jax.Array:
    """[B, N, G, H] in the dtype of v."""
    def as_sum(weights: jax.Array, v: jax.Array) -> jax.Array:
        products = weights[:, :, 0, :, None].astype(jnp.float32) * v.astype(jnp.float32)
        return jnp.sum(products, axis=2)[:, :, None, :].astype(v.dtype)

    def as_product(weights: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.einsum("bngt,bnth->bngh", weights, v, precision=precision_of(v.dtype))

    return _of_one_row(weights_BNGT.shape[2], as_sum, as_product, weights_BNGT, v_BNTH)


class Attention(nnx.Module):
    """What self- and cross-attention share; the caller brings bias and mask."""

    def __init__(self, config: T5Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.o = Linear(config.inner_dim, config.d_model, std=config.inner_dim**-0.5,
                        logical=("embed", "heads"), dtype=dtype, rngs=rngs,
                        quantization=config.quantization)
        self.num_heads = config.num_heads

    def heads(self, x_BGI: jax.Array) -> jax.Array:
        """[B, N, G, H]."""
        return jnp.swapaxes(x_BGI.reshape(*x_BGI.shape[:2], self.num_heads, -1), 1, 2)

    def attend(self, q_BNGH: jax.Array, k_BNTH: jax.Array, v_BNTH: jax.Array,
               bias: jax.Array) -> jax.Array:
        """Args: bias broadcasts to [B, N, G, T] float32 and holds the mask."""
        logits = attention_logits(q_BNGH, k_BNTH)
        logits = logits + jnp.broadcast_to(bias, logits.shape)
        weights = jax.nn.softmax(logits, axis=-1).astype(v_BNTH.dtype)
        mixed = jnp.swapaxes(attention_mix(weights, v_BNTH), 1, 2)
        return self.o(mixed.reshape(*mixed.shape[:2], -1))


def _reader_stds(config: T5Config) -> tuple[float, float, float]:
    """Of q, k, v: attention has no 1/sqrt(H), so q starts smaller."""
    return ((config.d_model * config.d_kv) ** -0.5, config.d_model**-0.5, config.d_model**-0.5)


class SelfAttention(Attention):
    """Queries, keys and values of the same states."""

    def __init__(self, config: T5Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.qkv = Linears(config.d_model, config.inner_dim, stds=_reader_stds(config),
                           logical=("heads", "embed"), dtype=dtype, rngs=rngs,
                           quantization=config.quantization)

    def queries_keys_values(self, x_BGD: jax.Array) -> list[jax.Array]:
        """Three [B, N, G, H]."""
        return [self.heads(part) for part in self.qkv(x_BGD)]


class CrossAttention(Attention):
    """Queries of the decoder's states, keys and values of the encoder's."""

    def __init__(self, config: T5Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        q_std, *kv_stds = _reader_stds(config)
        reader = dict(logical=("heads", "embed"), dtype=dtype, rngs=rngs,
                      quantization=config.quantization)
        self.q = Linear(config.d_model, config.inner_dim, std=q_std, **reader)
        self.kv = Linears(config.d_model, config.inner_dim, stds=kv_stds, **reader)

    def queries(self, x_BGD: jax.Array) -> jax.Array:
        """[B, N, G, H]."""
        return self.heads(self.q(x_BGD))

    def keys_values(self, encoded_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Two [B, N, S, H]."""
        k, v = self.kv(encoded_BSD)
        return self.heads(k), self.heads(v)


class FeedForward(nnx.Module):
    """ReLU (T5 1.0) or gated GELU / SiLU (T5 1.1, Flan, mT5, UL2, ...).

    ``wo`` is never quantized: in T5 it reads the largest activations, and others keep it
    in float32 for that.
    """

    def __init__(self, config: T5Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        d_model, d_ff = config.d_model, config.d_ff
        parts = 2 if config.activation.gated else 1  # of a gated one the gate comes first
        self.wi = Linears(d_model, d_ff, stds=[d_model**-0.5] * parts,
                          logical=("mlp", "embed"), dtype=dtype, rngs=rngs,
                          quantization=config.quantization)
        self.wo = Linear(d_ff, d_model, std=d_ff**-0.5, logical=("embed", "mlp"),
                         dtype=dtype, rngs=rngs)
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden, *linear = self.wi(x)
        match self.activation:
            case Activation.RELU:
                return self.wo(jax.nn.relu(hidden))
            case Activation.GATED_GELU:
                hidden = jax.nn.gelu(hidden, approximate=True)
            case Activation.GATED_SILU:
                hidden = jax.nn.silu(hidden)
        return self.wo(hidden * linear[0])
