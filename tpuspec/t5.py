"""T5 as two stacks: ``encode`` a source, ``decode`` a window of G positions."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tpuspec.config import T5Config
from tpuspec.kernel_choice import XLA, KernelChoice
from tpuspec.kernels.attention_blocks import MASKED
from tpuspec.kv_cache import DecoderCache, write_window
from tpuspec.t5_layers import (
    CrossAttention,
    FeedForward,
    Linear,
    RelativeBias,
    RMSNorm,
    SelfAttention,
    matmul_out_in,
)

KeysValues = tuple[jax.Array, jax.Array]
Drop = Callable[[jax.Array], jax.Array]
# That the kernels take: T5's bias is constant from distance 113 on.
BIAS_DISTANCES = 128


def _keep(x: jax.Array) -> jax.Array:
    return x


class EncoderLayer(nnx.Module):
    """Self-attention, feed-forward, each behind a norm and a residual."""

    def __init__(self, config: T5Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        norm = dict(epsilon=config.layer_norm_epsilon, dtype=dtype)
        self.attention_norm = RMSNorm(config.d_model, **norm)
        self.attention = SelfAttention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.d_model, **norm)
        self.mlp = FeedForward(config, dtype=dtype, rngs=rngs)

    def __call__(self, x_BSD: jax.Array, bias: jax.Array, drop: Drop) -> jax.Array:
        q, k, v = self.attention.queries_keys_values(self.attention_norm(x_BSD))
        x = x_BSD + drop(self.attention.attend(q, k, v, bias))
        return x + drop(self.mlp(self.mlp_norm(x)))


class DecoderLayer(nnx.Module):
    """Causal self-attention, cross-attention, feed-forward."""

    def __init__(self, config: T5Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        norm = dict(epsilon=config.layer_norm_epsilon, dtype=dtype)
        self.self_norm = RMSNorm(config.d_model, **norm)
        self.self_attention = SelfAttention(config, dtype=dtype, rngs=rngs)
        self.cross_norm = RMSNorm(config.d_model, **norm)
        self.cross_attention = CrossAttention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.d_model, **norm)
        self.mlp = FeedForward(config, dtype=dtype, rngs=rngs)

    def __call__(self, x_BGD: jax.Array, cross: KeysValues, bias: jax.Array,
                 cross_bias: jax.Array, cached: KeysValues | None,
                 start_B: jax.Array | None, drop: Drop) -> tuple[jax.Array, KeysValues]:
        """``cached`` None: the window is the whole sequence (teacher forcing)."""
        with jax.named_scope("self_attention"):
            q, k, v = self.self_attention.queries_keys_values(self.self_norm(x_BGD))
            if cached is not None:
                assert start_B is not None
                k = write_window(cached[0], k, start_B)
                v = write_window(cached[1], v, start_B)
            x = x_BGD + drop(self.self_attention.attend(q, k, v, bias))
        with jax.named_scope("cross_attention"):
            queries = self.cross_attention.queries(self.cross_norm(x))
            x = x + drop(self.cross_attention.attend(queries, *cross, cross_bias))
        with jax.named_scope("feed_forward"):
            x = x + drop(self.mlp(self.mlp_norm(x)))
        return x, (k, v)

    def read_tiled(self, x_BGD: jax.Array, cross: KeysValues, bias_ND: jax.Array,
                   source_lengths_B: jax.Array, cached: KeysValues, start_B: jax.Array,
                   config: T5Config, kernels: KernelChoice) -> tuple[jax.Array, KeysValues]:
        """The same by the attention kernels, over caches in their layout."""
        with jax.named_scope("self_attention"):
            mixed, k, v = kernels.verify_attention(
                config, *self.self_attention.qkv(self.self_norm(x_BGD)), *cached, bias_ND, start_B)
            x = x_BGD + self.self_attention.o(mixed)
        with jax.named_scope("cross_attention"):
            queries = self.cross_attention.q(self.cross_norm(x))
            x = x + self.cross_attention.o(
                kernels.cross_attention(config, queries, *cross, source_lengths_B))
        with jax.named_scope("feed_forward"):
            x = x + self.mlp(self.mlp_norm(x))
        return x, (k, v)


class T5(nnx.Module):
    """One encoder-decoder model (T5 1.0, T5 1.1, Flan, mT5, umT5, UL2, ByT5, MADLAD).

    Source: Raffel et al. 2020; Shazeer 2020 (gated feed-forward).
    """

    def __init__(self, config: T5Config, *, dtype: jnp.dtype = jnp.float32,
                 rngs: nnx.Rngs):
        if jnp.dtype(dtype) not in (jnp.dtype("float32"), jnp.dtype("bfloat16")):
            raise ValueError("dtype must be float32 or bfloat16 (T5 activations overflow "
                             f"in float16), got {jnp.dtype(dtype).name}")
        made = dict(dtype=dtype, rngs=rngs)
        norm = dict(epsilon=config.layer_norm_epsilon, dtype=dtype)

        def biases(layers: int, bidirectional: bool) -> nnx.List[RelativeBias]:
            tables = layers if config.per_layer_relative_bias else 1
            return nnx.List([RelativeBias(config, bidirectional=bidirectional, **made)
                             for _ in range(tables)])

        self.config = config
        self.embedding = nnx.Param(
            jax.random.normal(rngs.params(), (config.vocab_size, config.d_model), dtype),
            logical=("vocab", "embed"))
        self.encoder_bias = biases(config.num_layers, True)
        self.encoder_layers = nnx.List(
            [EncoderLayer(config, **made) for _ in range(config.num_layers)])
        self.encoder_norm = RMSNorm(config.d_model, **norm)
        self.decoder_bias = biases(config.num_decoder_layers, False)
        self.decoder_layers = nnx.List(
            [DecoderLayer(config, **made) for _ in range(config.num_decoder_layers)])
        self.decoder_norm = RMSNorm(config.d_model, **norm)
        self.lm_head = None if config.tie_word_embeddings else Linear(
            config.d_model, config.vocab_size, std=config.d_model**-0.5,
            logical=("vocab", "embed"), **made)

    def embed(self, tokens: Int[Array, "B G"]) -> Float[Array, "B G D"]:
        return jnp.take(self.embedding[...], tokens, axis=0)

    def encode(self, tokens_BS: Int[Array, "B S"], lengths_B: Int[Array, " B"],
               drop: Drop = _keep) -> Float[Array, "B S D"]:
        """Encoder states; rows at or beyond a length are defined but meaningless."""
        positions = jnp.arange(tokens_BS.shape[1])
        distance = positions[:, None] - positions[None, :]
        mask = length_mask(lengths_B, tokens_BS.shape[1])
        biases = [jnp.expand_dims(table(distance), 0) + mask for table in self.encoder_bias]
        x = drop(self.embed(tokens_BS))
        for i, layer in enumerate(self.encoder_layers):
            x = layer(x, biases[min(i, len(biases) - 1)], drop)
        return drop(self.encoder_norm(x))

    def cross_keys_values(self, encoded_BSD: Float[Array, "B S D"]) -> tuple[KeysValues, ...]:
        """L pairs [B, N, S, H]: computed once per request, never per step."""
        return tuple(layer.cross_attention.keys_values(encoded_BSD)
                     for layer in self.decoder_layers)

    def decode(self, tokens_BG: Int[Array, "B G"], start_B: Int[Array, " B"],
               source_lengths_B: Int[Array, " B"], cache: DecoderCache,
               row_B: Int[Array, " B"] | None = None, kernels: KernelChoice = XLA,
               ) -> tuple[Float[Array, "B R V"], DecoderCache]:
        """Reads G tokens at positions ``start .. start + G - 1`` of each slot.

        Returns float32 logits for the position after each token, R = G (of row ``row``
        alone, [B, 1, V], if given), and the cache with the K/V of the G positions
        written in place. Every position attends to all positions before it in the
        cache and in the window.
        """
        cross = tuple(zip(cache.cross_k, cache.cross_v, strict=True))
        cached = tuple(zip(cache.self_k, cache.self_v, strict=True))
        if cache.tiled:
            x, written = self._decode_tiled(tokens_BG, source_lengths_B, cross, cached, start_B,
                                            kernels)
        else:
            positions_T = jnp.arange(cache.self_k[0].shape[2])
            positions_BG = start_B[:, None] + jnp.arange(tokens_BG.shape[1])[None, :]
            distance = positions_BG[:, :, None] - positions_T[None, None, :]
            x, written = self._decode(tokens_BG, distance, source_lengths_B, cross, cached,
                                      start_B, _keep)
        cache = dataclasses.replace(cache, self_k=tuple(k for k, _ in written),
                                    self_v=tuple(v for _, v in written))
        return self.logits(x, row_B), cache

    def decode_teacher_forced(self, tokens_BT: Int[Array, "B T"],
                              encoded_BSD: Float[Array, "B S D"],
                              source_lengths_B: Int[Array, " B"], drop: Drop = _keep,
                              ) -> Float[Array, "B T V"]:
        """Float32 logits of whole sequences without a cache (training, tests)."""
        positions = jnp.arange(tokens_BT.shape[1])
        distance = (positions[:, None] - positions[None, :])[None]
        x, _ = self._decode(tokens_BT, distance, source_lengths_B,
                            self.cross_keys_values(encoded_BSD), None, None, drop)
        return self.logits(x)

    def _decode(self, tokens_BG: jax.Array, distance: jax.Array,
                source_lengths_B: jax.Array, cross: tuple[KeysValues, ...],
                cached: tuple[KeysValues, ...] | None, start_B: jax.Array | None,
                drop: Drop) -> tuple[jax.Array, list[KeysValues]]:
        # distance [B or 1, G, T] = query position - key position; the future is masked.
        causal = jnp.where(distance >= 0, 0.0, MASKED)[:, None]
        biases = [jnp.swapaxes(table(distance), 0, 1) + causal for table in self.decoder_bias]
        cross_bias = length_mask(source_lengths_B, cross[0][0].shape[2])
        x = drop(self.embed(tokens_BG))
        written = []
        for i, layer in enumerate(self.decoder_layers):
            x, keys_values = layer(
                x, cross[i], biases[min(i, len(biases) - 1)], cross_bias,
                cached[i] if cached is not None else None, start_B, drop)
            written.append(keys_values)
        return drop(self.decoder_norm(x)), written

    def _decode_tiled(self, tokens_BG: jax.Array, source_lengths_B: jax.Array,
                      cross: tuple[KeysValues, ...], cached: tuple[KeysValues, ...],
                      start_B: jax.Array, kernels: KernelChoice,
                      ) -> tuple[jax.Array, list[KeysValues]]:
        biases = [by_distance(table) for table in self.decoder_bias]
        x = self.embed(tokens_BG)
        written = []
        for i, layer in enumerate(self.decoder_layers):
            x, keys_values = layer.read_tiled(
                x, cross[i], biases[min(i, len(biases) - 1)], source_lengths_B, cached[i], start_B,
                self.config, kernels)
            written.append(keys_values)
        return self.decoder_norm(x), written

    def decoder_bias_by_distance(self) -> Float[Array, "N distances"]:
        """For the kernels, of the first decoder layer."""
        return by_distance(self.decoder_bias[0])

    def logits(self, x_BGD: Float[Array, "B G D"], row_B: Int[Array, " B"] | None = None,
               ) -> Float[Array, "B R V"]:
        """Of the decoder's normed states, R = G, or of row ``row`` alone."""
        with jax.named_scope("logits"):
            x = x_BGD
            if row_B is not None:  # before the head: one row of logits instead of G
                x = jnp.take_along_axis(x, row_B[:, None, None], axis=1)
            if self.config.scale_decoder_outputs:
                x = x * jnp.asarray(self.config.d_model**-0.5, x.dtype)
            head = self.embedding if self.lm_head is None else self.lm_head.weight
            return matmul_out_in(x, head[...], preferred=jnp.float32)


def by_distance(table: RelativeBias) -> jax.Array:
    """[N, distances] for the kernels."""
    return table.by_distance()[:, :BIAS_DISTANCES]


def length_mask(lengths_B: jax.Array, size: int) -> jax.Array:
    """[B, 1, 1, size] float32: 0 below the length, a large negative number beyond.

    From lengths, never from ids: padding, the start id and a real id are all 0 in T5.
    """
    inside = jnp.arange(size)[None, :] < lengths_B[:, None]
    return jnp.where(inside, 0.0, MASKED)[:, None, None, :]
