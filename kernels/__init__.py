"""Array kernels for TPU with their plain references; they know arrays, not models."""

from tpuspec.kernels.attention_blocks import (
    AttentionBlocks,
    padded_positions,
    tile_heads,
    tiled_cache_shape,
    untile_heads,
)
from tpuspec.kernels.cross_attention import cross_attention, sharded_cross_attention
from tpuspec.kernels.decoder_pass import decoder_pass, sharded_decoder_pass
from tpuspec.kernels.decoder_scratch import check_decoder_pass
from tpuspec.kernels.decoder_weights import DecoderWeights, bias_table
from tpuspec.kernels.rejection_sampling import (
    RejectionSample,
    rejection_sample,
    sharded_rejection_sample,
)
from tpuspec.kernels.sampling_blocks import SamplingBlocks
from tpuspec.kernels.sampling_reference import WarpedRows, WarpOptions
from tpuspec.kernels.token_sampling import SampledTokens, sample_tokens, sharded_sample_tokens
from tpuspec.kernels.verify_attention import sharded_verify_attention, verify_attention

__all__ = [
    "AttentionBlocks",
    "DecoderWeights",
    "RejectionSample",
    "SampledTokens",
    "SamplingBlocks",
    "WarpOptions",
    "WarpedRows",
    "bias_table",
    "check_decoder_pass",
    "cross_attention",
    "decoder_pass",
    "padded_positions",
    "rejection_sample",
    "sample_tokens",
    "sharded_cross_attention",
    "sharded_decoder_pass",
    "sharded_rejection_sample",
    "sharded_sample_tokens",
    "sharded_verify_attention",
    "tile_heads",
    "tiled_cache_shape",
    "untile_heads",
    "verify_attention",
]
