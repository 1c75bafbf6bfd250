"""Fixed-shape decoder caches, rolled back by index.

K/V at positions at or beyond a slot's length are dead: masked by length and
overwritten later. Rollback is therefore an assignment to a length; nothing is
copied (see ``DecodeState``).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tpuspec.config import T5Config
from tpuspec.kernels import tile_heads, tiled_cache_shape


@functools.partial(jax.tree_util.register_dataclass,
                   data_fields=["self_k", "self_v", "cross_k", "cross_v"],
                   meta_fields=["tiled", "stacked"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderCache:
    """Keys and values of one model for all slots, one array a layer.

    Attributes:
      self_k, self_v: L arrays [B, N, T, H] of decoder positions. Heads come first,
        so that a product over one head's positions reads memory in order.
      cross_k, cross_v: L arrays [B, N, S, H] of source positions, written once
        per request.
      tiled: whether the arrays are in the kernels' layout instead, [B, P, T, 128] and
        [B, P, S, 128] (see ``tpuspec.kernels.attention_blocks``).
      stacked: whether the arrays of all layers, which are tiled, are one: each of the
        four is then a tuple of one array [L, B, P, T or S, 128].
    """

    self_k: tuple[jax.Array, ...]
    self_v: tuple[jax.Array, ...]
    cross_k: tuple[jax.Array, ...]
    cross_v: tuple[jax.Array, ...]
    tiled: bool = False
    stacked: bool = False

    @classmethod
    def zeros(cls, config: T5Config, *, slots: int, positions: int, source_positions: int,
              dtype: jnp.dtype, tiled: bool = False, stacked: bool = False) -> "DecoderCache":
        """Memory: 2 L slots (positions + source_positions) N H elements, both lengths
        rounded up to a multiple of 128 if tiled."""

        def layers(length: int) -> tuple[jax.Array, ...]:
            shape = (slots, config.num_heads, length, config.d_kv)
            if tiled:
                shape = tiled_cache_shape(slots=slots, positions=length, head_width=config.d_kv,
                                          num_heads=config.num_heads)
            layers = config.num_decoder_layers
            if stacked:
                return (jnp.zeros((layers, *shape), dtype),)
            return tuple(jnp.zeros(shape, dtype) for _ in range(layers))

        return cls(self_k=layers(positions), self_v=layers(positions),
                   cross_k=layers(source_positions), cross_v=layers(source_positions),
                   tiled=tiled, stacked=stacked)

    def limit_source(self, positions: int) -> "DecoderCache":
        """A view whose cross-attention reads only the first source positions. The
        kernels read no further than each slot's own length."""
        if self.tiled:
            return self

        def cut(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return tuple(a[:, :, :positions] for a in arrays)
        return dataclasses.replace(self, cross_k=cut(self.cross_k), cross_v=cut(self.cross_v))

    def insert_source(self, slot: Int[Array, ""],
                      keys_values: tuple[tuple[jax.Array, jax.Array], ...],
                      ) -> "DecoderCache":
        """Gives the slot to a request with cross K/V of L pairs [1, N, S', H], S' <= S.

        Everything else of the slot becomes 0: masked positions weigh 0, but a NaN
        left by an earlier tenant would pass through a product with 0.
        """
        def source(row: jax.Array) -> jax.Array:
            return tile_heads(jnp.swapaxes(row, 1, 2).reshape(1, row.shape[2], -1)
                              ) if self.tiled else row

        def fill(buffers: tuple[jax.Array, ...], rows: list[jax.Array]) -> tuple[jax.Array, ...]:
            if self.stacked:
                rows = [jnp.stack(rows)]
            filled = []
            for buffer, row in zip(buffers, rows, strict=True):
                above = buffer.ndim - 4  # axes before that of slots
                rest = buffer.shape[-2] - row.shape[-2]
                row = jnp.pad(row, above * ((0, 0),) + ((0, 0), (0, 0), (0, rest), (0, 0)))
                at = (*above * (0,), slot, 0, 0, 0)
                filled.append(lax.dynamic_update_slice(buffer, row, at))
            return tuple(filled)

        return dataclasses.replace(
            self._empty_slot(slot),
            cross_k=fill(self.cross_k, [source(k) for k, _ in keys_values]),
            cross_v=fill(self.cross_v, [source(v) for _, v in keys_values]))

    def copy_source(self, holder: Int[Array, ""], slot: Int[Array, ""]) -> "DecoderCache":
        """The same with the cross K/V that another slot holds, or this one."""
        def copy(buffers: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            axis = buffers[0].ndim - 4
            rows = [lax.dynamic_slice_in_dim(buffer, holder, 1, axis) for buffer in buffers]
            return tuple(lax.dynamic_update_slice_in_dim(buffer, row, slot, axis)
                         for buffer, row in zip(buffers, rows, strict=True))

        return dataclasses.replace(
            self._empty_slot(slot), cross_k=copy(self.cross_k), cross_v=copy(self.cross_v))

    def _empty_slot(self, slot: Int[Array, ""]) -> "DecoderCache":
        """Without decoder positions of the slot."""
        def empty(buffers: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            axis = buffers[0].ndim - 4
            nothing = jnp.zeros_like(lax.slice_in_dim(buffers[0], 0, 1, axis=axis))
            return tuple(lax.dynamic_update_slice_in_dim(buffer, nothing, slot, axis)
                         for buffer in buffers)

        return dataclasses.replace(
            self, self_k=empty(self.self_k), self_v=empty(self.self_v))


def write_window(buffer_BNTH: Float[Array, "B N T H"], new_BNGH: Float[Array, "B N G H"],
                 start_B: Int[Array, " B"]) -> Float[Array, "B N T H"]:
    """Writes rows ``start .. start + G`` of every slot in place.

    The buffer must hold ``start + G`` rows: JAX would silently shift a window
    that overhangs the end. Engines therefore keep draft_length + 1 spare rows.
    """
    if buffer_BNTH.shape[0] == 1:
        return lax.dynamic_update_slice(buffer_BNTH, new_BNGH, (0, 0, start_B[0], 0))
    return jax.vmap(lambda b, n, s: lax.dynamic_update_slice(b, n, (0, s, 0)))(
        buffer_BNTH, new_BNGH, start_B)
