"""The cross-attention as a TPU kernel."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels.attention_blocks import (
    LANES,
    MASKED,
    AttentionBlocks,
    check_supported,
    default_blocks,
)
from tpuspec.kernels.block_stream import (
    COMPILER_PARAMS,
    BlockStream,
    Ref,
    Step,
    padded_window,
    rows_spec,
)
from tpuspec.kernels.running_softmax import RunningSoftmax, clear_rows


def _kernel(
    # Scalars, fetched ahead.
    lengths_B: Ref,
    # Inputs: blocks in VMEM; the caches stay in HBM.
    q_ref: Ref,  # [1, G padded, tiles * 128]
    k_hbm: Ref,  # [B, P, S, 128]
    v_hbm: Ref,
    # Output.
    out_ref: Ref,  # [1, G padded, tiles * 128]
    # Scratch.
    k_buffer: Ref,  # [2, tiles, positions, 128]
    v_buffer: Ref,
    semaphores: Ref,  # DMA [2, 2]
    turn_ref: Ref,  # SMEM [1]
    *rest: Ref,  # of the running softmax
    head_width: int,
    blocks: AttentionBlocks,
) -> None:
    step = Step.here()
    positions = blocks.positions

    def length_of(slot: Any) -> jax.Array:
        return jnp.clip(lengths_B[slot], 0, k_hbm.shape[2])

    stream = BlockStream(
        step,
        blocks,
        # A block even of an empty slot, so that there always is a next block.
        lambda slot: jnp.maximum(length_of(slot), 1),
        (k_hbm, v_hbm),
        (k_buffer, v_buffer),
        semaphores,
        turn_ref,
    )
    stream.start()
    softmax = RunningSoftmax(head_width, *rest)
    length = length_of(step.slot)
    lane_RS = lax.broadcasted_iota(jnp.int32, (q_ref.shape[1] * LANES // head_width, positions), 1)

    def use_block(block: Any, buffer: Any, wait_for_keys: Any, wait_for_values: Any) -> None:
        wait_for_keys()
        left = length - block * positions

        def values_ready() -> None:
            wait_for_values()

            @pl.when(left < positions)
            def _() -> None:
                clear_rows(v_buffer.at[buffer], left)

        softmax.add(
            k_buffer.at[buffer],
            v_buffer.at[buffer],
            lambda _, logits_RS: jnp.where(lane_RS < left, logits_RS, MASKED),
            values_ready,
        )

    stream.use(lambda: softmax.start(q_ref), use_block)
    softmax.finish(out_ref)


# Traced once for all layers of a program.
@functools.partial(jax.jit, static_argnames=("blocks", "interpret", "head_width"))
def cross_attention_pallas(
    q_BGE: jax.Array,
    k_BPSL: jax.Array,
    v_BPSL: jax.Array,
    lengths_B: jax.Array,
    *,
    head_width: int,
    blocks: AttentionBlocks | None,
    interpret: Any,
) -> jax.Array:
    """See ``cross_attention``; ``lengths_B`` is int32."""
    check_supported(q_BGE, k_BPSL, head_width)
    slots, window, _ = q_BGE.shape
    tiles, positions = k_BPSL.shape[1:3]
    dtype = k_BPSL.dtype
    blocks = blocks or default_blocks(
        slots=slots,
        tiles=tiles,
        positions=positions,
        itemsize=dtype.itemsize,
        interpreted=bool(interpret),
    )
    groups = blocks.groups(tiles, positions)
    rows_G = padded_window(window)
    q_BGE = jnp.pad(q_BGE, ((0, 0), (0, rows_G - window), (0, 0)))
    of_step, in_hbm = rows_spec(blocks, groups, rows_G), pl.BlockSpec(memory_space=pl.ANY)
    mixed_BGE = pl.pallas_call(
        functools.partial(_kernel, head_width=head_width, blocks=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(blocks.cores, groups, slots),
            in_specs=[of_step, in_hbm, in_hbm],
            out_specs=of_step,
            scratch_shapes=[
                *BlockStream.scratch(blocks, dtype),
                *RunningSoftmax.scratch(blocks, rows_G, head_width, dtype),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_BGE.shape, q_BGE.dtype),
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
        name="cross_attention",
    )(lengths_B, q_BGE, k_BPSL, v_BPSL)
    return mixed_BGE[:, :window]
