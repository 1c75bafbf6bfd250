"""What the decoder kernel keeps on the chip, and which shapes it takes."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels.attention_blocks import (
    LANES,
    AttentionBlocks,
    check_supported,
    padded_positions,
)
from tpuspec.kernels.decoder_weights import DecoderWeights
from tpuspec.kernels.layer_stream import CacheStream
from tpuspec.kernels.row_write import RowWrite
from tpuspec.kernels.running_softmax import RunningSoftmax
from tpuspec.kernels.sampling_blocks import tpu_info

SLOT_ROWS = 8  # of a slot in the kernel: whole tiles in float32
# Attended to at once. The fewer blocks the better, until a short text must wait for a long
# one's; engines have a few positions more than the longest text of 512.
_MOST_POSITIONS = 640
# The rest is for spilled registers and what the compiler adds.
_VMEM_SHARE = 0.85
_UNASKED_BYTES = 16 * 2**20  # that the compiler gives a kernel of any generation


class Scratch(NamedTuple):
    """What the kernel keeps on the chip.

    Attributes:
      maps: [out, in] of each linear map.
      arrivals: DMA [6], of the maps.
      own: see ``CacheStream``; of the self-attention.
      source: the same of the cross-attention.
      new: see ``RowWrite``.
      near: see ``DistanceBias``; [B, N * 8, 128].
      farthest: [N * 8, 128].
      softmax: see ``RunningSoftmax``.
      state: [R, D] float32, the residual.
      rows: [B, 8, 3 E] float32, queries, keys and values.
      mixed: [B, 8, E] float32.
    """

    maps: Any
    arrivals: Any
    own: Any
    source: Any
    new: Any
    near: Any
    farthest: Any
    softmax: Any
    state: Any
    rows: Any
    mixed: Any


def scratch_for(
    weights: DecoderWeights, own: jax.Array, source: jax.Array
) -> Scratch:
    """Shapes of it."""
    dtype, slots, tiles = own.dtype, own.shape[1], own.shape[2]
    width, inner = weights.self_o.shape[1:]
    num_heads = weights.bias.shape[0]
    stacked = num_heads * SLOT_ROWS

    def floats(*shape: int) -> Any:
        return pltpu.VMEM(shape, jnp.float32)

    return Scratch(
        maps=[pltpu.VMEM(stack.shape[1:], dtype) for stack in weights.maps],
        arrivals=pltpu.SemaphoreType.DMA((len(weights.maps),)),
        own=CacheStream.scratch(tiles, whole_blocks(own.shape[3]), dtype),
        source=CacheStream.scratch(tiles, whole_blocks(source.shape[3]), dtype),
        new=RowWrite.scratch(own.shape, dtype),
        near=floats(slots, stacked, LANES),
        farthest=floats(stacked, LANES),
        softmax=RunningSoftmax.scratch(
            AttentionBlocks(cores=1, tiles=tiles, positions=LANES),
            SLOT_ROWS, inner // num_heads, dtype,
        ),
        state=floats(slots * SLOT_ROWS, width),
        rows=floats(slots, SLOT_ROWS, 3 * inner),
        mixed=floats(slots, SLOT_ROWS, inner),
    )  # fmt: skip


def positions_at_once(positions: int) -> int:
    """Positions of a cache that are attended to at once: equal blocks of whole 128."""
    blocks = -(-positions // _MOST_POSITIONS)
    return padded_positions(-(-positions // blocks))


def whole_blocks(positions: int) -> int:
    """Positions that these blocks have."""
    return -(-positions // positions_at_once(positions)) * positions_at_once(positions)


def check_decoder_pass(
    x_BGD: jax.Array,
    weights: DecoderWeights,
    own: jax.Array,
    source: jax.Array,
    *,
    interpret: Any,
) -> int | None:
    """The limit of VMEM that the kernel asks for; None is what it is given unasked.

    Args:
      own, source: keys of each attention, [L, B, P, T or S, 128].

    Raises:
      NotImplementedError: for shapes that the kernel does not take. Shapes suffice.
    """
    window, width = x_BGD.shape[1:]
    num_heads, inner = weights.bias.shape[0], weights.cross_q.shape[1]
    for keys in (own, source):
        layer = jax.ShapeDtypeStruct(keys.shape[1:], keys.dtype)
        rows = jax.ShapeDtypeStruct((*x_BGD.shape[:2], inner), x_BGD.dtype)
        check_supported(rows, layer, inner // num_heads)
    if window > SLOT_ROWS:
        raise NotImplementedError(f"positions in one pass must be at most 8, got {window}")
    if width % LANES or weights.wo.shape[2] % LANES:
        raise NotImplementedError(
            f"widths must be multiples of {LANES}, got {width} and {weights.wo.shape[2]}"
        )
    if any(stack.dtype != x_BGD.dtype for stack in weights.maps):
        raise NotImplementedError("weights must have the dtype of the states")
    need = sum(
        math.prod(shape.shape) * shape.dtype.itemsize
        for shape in jax.tree.leaves(scratch_for(weights, own, source))
        if not isinstance(shape, pltpu.SemaphoreType) and shape.memory_space == pltpu.VMEM
    )
    need = int(need / _VMEM_SHARE)
    room = tpu_info(interpret).vmem_capacity_bytes
    if need > room:
        raise NotImplementedError(f"the kernel needs {need} bytes of VMEM, {room} are there")
    return need if need > _UNASKED_BYTES else None
