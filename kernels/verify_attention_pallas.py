"""The verification attention as a TPU kernel."""

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
from tpuspec.kernels.distance_bias import DistanceBias
from tpuspec.kernels.running_softmax import RunningSoftmax, clear_rows
from tpuspec.kernels.window_write import WindowWrite


def _kernel(
    # Scalars, fetched ahead.
    start_B: Ref,
    # Inputs: blocks in VMEM; the caches stay in HBM.
    q_ref: Ref,  # [1, G padded, tiles * 128]
    k_ref: Ref,
    v_ref: Ref,
    bias_ref: Ref,  # [N, 128] float32, farthest distance first
    k_hbm: Ref,  # [B, P, T, 128]
    v_hbm: Ref,
    # Outputs: the caches are the inputs' own memory.
    out_ref: Ref,  # [1, G padded, tiles * 128]
    k_out: Ref,
    v_out: Ref,
    # Scratch.
    k_buffer: Ref,  # [2, tiles, positions, 128]
    v_buffer: Ref,
    semaphores: Ref,  # DMA [2, 2]
    turn_ref: Ref,  # SMEM [1]
    *rest: Ref,  # of the bias, the running softmax, and the window
    window: int,
    head_width: int,
    blocks: AttentionBlocks,
) -> None:
    step = Step.here()
    heads, rows_G = LANES // head_width, q_ref.shape[1]
    buffers = (k_buffer, v_buffer)
    bias = DistanceBias(rows_G, *rest[:2])
    softmax = RunningSoftmax(head_width, *rest[2:6])
    write = WindowWrite(
        step, window, blocks, start_B, (k_ref, v_ref), buffers, (k_out, v_out), *rest[6:]
    )
    stream = BlockStream(step, blocks, write.end, (k_hbm, v_hbm), buffers, semaphores, turn_ref)
    stream.start()

    start, end = write.start(step.slot), write.end(step.slot)

    first_head = step.tiles(blocks, step.group).start * heads

    def start_slot() -> None:
        @pl.when(step.slot == 0)
        def _() -> None:
            bias.start_group(bias_ref, first_head)

        bias.start_slot(bias_ref, first_head, start)
        softmax.start(q_ref)
        write.take()

    shape = (heads * rows_G, blocks.positions)
    row_RT = lax.broadcasted_iota(jnp.int32, shape, 0) % rows_G
    lane_RT = lax.broadcasted_iota(jnp.int32, shape, 1)
    # Rows beyond the window are padding: they see what its last row sees.
    offset_RT = jnp.minimum(row_RT, window - 1) - lane_RT

    def use_block(block: Any, buffer: Any, wait_for_keys: Any, wait_for_values: Any) -> None:
        wait_for_keys()
        write.blend(0, block, buffer)
        distance_RT = offset_RT + (start - block * blocks.positions)

        def adjust(tile: int, logits_RT: jax.Array) -> jax.Array:
            return jnp.where(distance_RT >= 0, logits_RT + bias.of_block(tile, distance_RT), MASKED)

        def values_ready() -> None:
            wait_for_values()
            write.blend(1, block, buffer)

            @pl.when((block + 1) * blocks.positions >= end)
            def _() -> None:
                clear_rows(v_buffer.at[buffer], end - block * blocks.positions)

        softmax.add(k_buffer.at[buffer], v_buffer.at[buffer], adjust, values_ready)

    stream.use(start_slot, use_block)
    softmax.finish(out_ref)
    write.finish()


# Traced once for all layers of a program.
@functools.partial(jax.jit, static_argnames=("blocks", "interpret"))
def verify_attention_pallas(
    q_BGE: jax.Array,
    k_BGE: jax.Array,
    v_BGE: jax.Array,
    k_BPTL: jax.Array,
    v_BPTL: jax.Array,
    bias_ND: jax.Array,
    start_B: jax.Array,
    *,
    blocks: AttentionBlocks | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``verify_attention``; ``start_B`` is int32."""
    slots, window, width = q_BGE.shape
    tiles, positions = k_BPTL.shape[1:3]
    num_heads, distances = bias_ND.shape
    head_width, dtype = width // num_heads, k_BPTL.dtype
    check_supported(q_BGE, k_BPTL, head_width)
    if distances > LANES:
        raise NotImplementedError(f"distances must be at most {LANES}, got {distances}")
    blocks = blocks or default_blocks(
        slots=slots,
        tiles=tiles,
        positions=positions,
        itemsize=dtype.itemsize,
        interpreted=bool(interpret),
    )
    groups = blocks.groups(tiles, positions)
    rows_G = padded_window(window)
    rows_BGE = [jnp.pad(x, ((0, 0), (0, rows_G - window), (0, 0))) for x in (q_BGE, k_BGE, v_BGE)]
    bias_ND = jnp.pad(bias_ND.astype(jnp.float32), ((0, 0), (0, LANES - distances)), mode="edge")
    of_step, in_hbm = rows_spec(blocks, groups, rows_G), pl.BlockSpec(memory_space=pl.ANY)
    mixed_BGE, k_BPTL, v_BPTL = pl.pallas_call(
        functools.partial(_kernel, window=window, head_width=head_width, blocks=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(blocks.cores, groups, slots),
            in_specs=[
                of_step,
                of_step,
                of_step,
                pl.BlockSpec((num_heads, LANES), lambda *_: (0, 0)),
                in_hbm,
                in_hbm,
            ],
            out_specs=[of_step, in_hbm, in_hbm],
            scratch_shapes=[
                *BlockStream.scratch(blocks, dtype),
                *DistanceBias.scratch(blocks, rows_G, head_width),
                *RunningSoftmax.scratch(blocks, rows_G, head_width, dtype),
                *WindowWrite.scratch(blocks, dtype),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (rows_BGE[0], k_BPTL, v_BPTL)],
        input_output_aliases={5: 1, 6: 2},
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
        name="verify_attention",
    )(start_B, *rows_BGE, bias_ND[:, ::-1], k_BPTL, v_BPTL)
    return mixed_BGE[:, :window], k_BPTL, v_BPTL
