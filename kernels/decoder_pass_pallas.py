"""The decoder pass as a TPU kernel: a grid step is a layer.

One core works; the layers follow one another, and its units keep up with the memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels.attention_blocks import LANES, MASKED
from tpuspec.kernels.block_stream import Ref, Scalar
from tpuspec.kernels.decoder_scratch import (
    SLOT_ROWS,
    Scratch,
    check_decoder_pass,
    positions_at_once,
    scratch_for,
)
from tpuspec.kernels.decoder_weights import (
    Activation,
    DecoderWeights,
    activate,
    rms_norm,
    rounded,
)
from tpuspec.kernels.distance_bias import DistanceBias
from tpuspec.kernels.layer_stream import CacheStream, Turn, WeightStream
from tpuspec.kernels.row_write import RowWrite
from tpuspec.kernels.running_softmax import RunningSoftmax, clear_rows


def _attend(
    q_ref: Ref,
    keys_values: tuple[Ref, Ref],
    out_ref: Ref,
    softmax: RunningSoftmax,
    end: Scalar,
    adjust: Callable[[Scalar, int, jax.Array], jax.Array],
) -> None:
    """Attention of a slot, [1, 8, E], to the first ``end`` of [P, T, 128].

    Args:
      adjust: from a block's first position, a tile and its logits to those with bias and
        mask.
    """
    keys, values = keys_values
    at_once = positions_at_once(keys.shape[1])  # of whole blocks the same
    blocks = keys.shape[1] // at_once
    last = sum((jnp.where(end > i * at_once, 1, 0) for i in range(1, blocks)), start=0)

    def part(ref: Ref, first: Scalar) -> Ref:
        if isinstance(first, int):
            return ref.at[:, first : first + at_once, :]
        return ref.at[:, pl.ds(pl.multiple_of(first, LANES), at_once), :]

    clear_rows(part(values, last * at_once), end - last * at_once)
    softmax.start(q_ref)

    def body(block: Scalar, carry: None) -> None:
        first = block * at_once
        softmax.add(
            part(keys, first), part(values, first), functools.partial(adjust, first), lambda: None
        )

    if blocks == 1:
        body(0, None)
    else:
        lax.fori_loop(0, last + 1, body, None)
    softmax.finish(out_ref)


def _kernel(
    # Scalars, fetched ahead.
    start_B: Ref,
    source_B: Ref,
    # Inputs: blocks in VMEM; caches and maps stay in HBM.
    x_ref: Ref,  # [R, D]
    weights: DecoderWeights,  # norms [1, 1, D] of the layer
    own_hbm: tuple[Ref, Ref],  # [L, B, P, T, 128]
    source_hbm: tuple[Ref, Ref],  # [L, B, P, S, 128]
    # Outputs: the caches are the inputs' own memory.
    out_ref: Ref,  # [R, D]
    own_out: tuple[Ref, Ref],
    scratch: Scratch,
    *,
    window: int,
    activation: Activation,
    epsilon: float,
) -> None:
    layer, layers = pl.program_id(0), pl.num_programs(0)
    slots, tiles, positions = own_hbm[0].shape[1:4]
    dtype, inner = own_hbm[0].dtype, tiles * LANES
    head_width = inner // weights.bias.shape[0]
    state_ref, rows_ref, mixed_ref = scratch.state, scratch.rows, scratch.mixed
    softmax = RunningSoftmax(head_width, *scratch.softmax)

    def start_of(slot: Scalar) -> jax.Array:
        return jnp.clip(start_B[slot], 0, positions - window)

    def source_of(slot: Scalar) -> jax.Array:
        return jnp.clip(source_B[slot], 0, source_hbm[0].shape[3])

    def bias_of(slot: Scalar) -> DistanceBias:
        return DistanceBias(SLOT_ROWS, scratch.near.at[slot], scratch.farthest)

    def for_slots(act: Callable[[Scalar], None]) -> None:
        lax.fori_loop(0, slots, lambda slot, _: act(slot), None)

    qkv, self_o, cross_q, cross_o, wi, wo = (
        WeightStream(layer, stack, buffer, scratch.arrivals.at[i])
        for i, (stack, buffer) in enumerate(zip(weights.maps, scratch.maps, strict=True))
    )
    own = CacheStream(lambda slot: start_of(slot) + window, own_hbm, *scratch.own)
    # A part even of an empty source, so that there always is something to wait for.
    source = CacheStream(lambda slot: jnp.maximum(source_of(slot), 1), source_hbm, *scratch.source)
    write = RowWrite(window, start_of, own_out, *scratch.new)

    @pl.when(layer == 0)
    def _() -> None:
        qkv.start()
        first = Turn(0, 0, slots)
        own.start(first)
        self_o.start()
        cross_q.start()
        source.start(first)
        for weight in (cross_o, wi, wo):
            weight.start()
        own.start(first.after(1))
        source.start(first.after(1))
        bias_of(0).start_group(weights.bias, 0)
        for_slots(lambda slot: bias_of(slot).start_slot(weights.bias, 0, start_of(slot)))
        state_ref[...] = x_ref[...].astype(jnp.float32)

    def normed(weight_ref: Ref) -> jax.Array:
        return rms_norm(state_ref[...], weight_ref[0], epsilon, dtype)

    def put(rows_RE: jax.Array) -> None:
        """Rows of all slots, queries first."""
        width = rows_RE.shape[1]
        rows_ref[:, :, :width] = rounded(rows_RE, dtype).reshape(slots, SLOT_ROWS, width)

    def mixed() -> jax.Array:
        return mixed_ref[...].reshape(slots * SLOT_ROWS, inner).astype(dtype)

    def add(y_RD: jax.Array) -> None:
        state_ref[...] = rounded(state_ref[...] + rounded(y_RD, dtype), dtype)

    def iota(positions: int, axis: int) -> jax.Array:
        shape = (SLOT_ROWS * LANES // head_width, positions_at_once(positions))
        return lax.broadcasted_iota(jnp.int32, shape, axis)

    def attend_to_own(slot: Scalar) -> None:
        turn, start, bias = Turn(layer, slot, slots), start_of(slot), bias_of(slot)
        keys_values = own.wait(turn)
        new = rows_ref.at[slot]
        write.put(turn, (new.at[:, inner : 2 * inner], new.at[:, 2 * inner :]), keys_values)
        # Rows beyond the window are padding: they see what its last row sees.
        row_RT = jnp.minimum(iota(positions, 0) % SLOT_ROWS, window - 1)
        offset_RT = row_RT - iota(positions, 1)

        def adjust(first: Scalar, tile: int, logits_RT: jax.Array) -> jax.Array:
            distance_RT = offset_RT + (start - first)
            biased_RT = logits_RT + bias.of_block(tile, distance_RT)
            return jnp.where(distance_RT >= 0, biased_RT, MASKED)

        at = pl.ds(slot, 1)
        _attend(rows_ref.at[at], keys_values, mixed_ref.at[at], softmax, start + window, adjust)
        own.start(turn.after(2))

    def attend_to_source(slot: Scalar) -> None:
        turn, length = Turn(layer, slot, slots), source_of(slot)
        keys_values = source.wait(turn)
        lane_RS = iota(source_hbm[0].shape[3], 1)

        def adjust(first: Scalar, _: int, logits_RS: jax.Array) -> jax.Array:
            return jnp.where(lane_RS < length - first, logits_RS, MASKED)

        at = pl.ds(slot, 1)
        _attend(rows_ref.at[at], keys_values, mixed_ref.at[at], softmax, length, adjust)
        source.start(turn.after(2))

    put(qkv.product(normed(weights.self_norm)))
    for_slots(attend_to_own)
    add(self_o.product(mixed()))
    put(cross_q.product(normed(weights.cross_norm)))
    for_slots(attend_to_source)
    add(cross_o.product(mixed()))
    add(wo.product(activate(wi.product(normed(weights.mlp_norm)), activation, dtype)))

    @pl.when(layer + 1 == layers)
    def _() -> None:
        out_ref[...] = rms_norm(state_ref[...], weights.last_norm[...], epsilon, dtype)
        write.wait(Turn(layer, slots - 1, slots))


# Traced once for all passes of a program.
@functools.partial(jax.jit, static_argnames=("activation", "epsilon", "interpret"))
def decoder_pass_pallas(
    x_BGD: jax.Array,
    weights: DecoderWeights,
    k_LBPTL: jax.Array,
    v_LBPTL: jax.Array,
    cross_k_LBPSL: jax.Array,
    cross_v_LBPSL: jax.Array,
    start_B: jax.Array,
    source_B: jax.Array,
    *,
    activation: Activation,
    epsilon: float,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``decoder_pass``; integers are int32."""
    limit = check_decoder_pass(
        x_BGD, weights, k_LBPTL, cross_k_LBPSL, interpret=interpret
    )
    slots, window, width = x_BGD.shape
    rows = slots * SLOT_ROWS
    x_RD = jnp.pad(x_BGD, ((0, 0), (0, SLOT_ROWS - window), (0, 0))).reshape(rows, width)
    own, source = (k_LBPTL, v_LBPTL), (cross_k_LBPSL, cross_v_LBPSL)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    norm = pl.BlockSpec((1, 1, width), lambda layer, *_: (layer, 0, 0))

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))

    x_RD, (k_LBPTL, v_LBPTL) = pl.pallas_call(
        functools.partial(_kernel, window=window, activation=activation, epsilon=epsilon),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(k_LBPTL.shape[0],),
            in_specs=[
                whole(rows, width),
                DecoderWeights(
                    self_norm=norm, cross_norm=norm, mlp_norm=norm, qkv=in_hbm, self_o=in_hbm,
                    cross_q=in_hbm, cross_o=in_hbm, wi=in_hbm, wo=in_hbm,
                    last_norm=whole(1, width), bias=whole(*weights.bias.shape),
                ),
                (in_hbm, in_hbm),
                (in_hbm, in_hbm),
            ],
            out_specs=(whole(rows, width), (in_hbm, in_hbm)),
            scratch_shapes=[scratch_for(weights, k_LBPTL, cross_k_LBPSL)],
        ),
        out_shape=jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (x_RD, own)
        ),
        input_output_aliases={14: 1, 15: 2},  # of all arguments, one by one: the own caches
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True, vmem_limit_bytes=limit
        ),
        interpret=interpret,
        name="decoder_pass",
    )(start_B, source_B, x_RD, weights, own, source)  # fmt: skip
    return x_RD.reshape(slots, SLOT_ROWS, width)[:, :window], k_LBPTL, v_LBPTL
