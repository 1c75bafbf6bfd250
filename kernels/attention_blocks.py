"""What the attention kernels share outside the kernel: cache layout, block sizes, limits.

Layout. Keys and values of all slots are kept as [B, P, T, 128]: lane tiles of 128
numbers that hold 128 / H heads side by side, in the order in which a projection leaves
[B, G, N * H]; P = N * H / 128. For H = 64, T5's usual head width, a tile is a pair of
heads. So no lane is padding, new positions are written without a transpose, and the
positions of one tile are contiguous in HBM.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

LANES = 128
POSITION_TILE = 128  # the number of positions of a cache is a multiple of this
MAX_WINDOW = 16  # G: one tile of rows in bfloat16
MASKED = -1e30  # in place of a masked attention logit; finite, so empty rows stay finite

# A block should take this long to arrive: longer than it takes to use one, most of which
# is latency, and short beside the whole call, which begins with waiting for the first.
_SECONDS_PER_BLOCK = 1.25e-6
_MOST_POSITIONS = 512  # at once, so that the cost follows the length
_FEWEST_BLOCKS = 4  # of a core's call, which ends with using the last


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionBlocks:
    """How the work of one call is cut.

    Attributes:
      cores: cores of a chip that share the lane tiles.
      tiles: lane tiles that are read at once; divides those of a core.
      positions: cached positions that are read at once, a multiple of 128 that divides
        those of the cache.
    """

    cores: int
    tiles: int
    positions: int

    def groups(self, tiles: int, positions: int) -> int:
        """Groups of lane tiles that each core works through.

        Raises:
          ValueError: these blocks do not cut this many tiles and positions.
        """
        if tiles % (self.cores * self.tiles):
            raise ValueError(
                f"cores * tiles must divide {tiles} lane tiles, got {self.cores} * {self.tiles}"
            )
        if self.positions % POSITION_TILE or positions % self.positions:
            raise ValueError(
                f"positions must be a multiple of {POSITION_TILE} that divides {positions}, "
                f"got {self.positions}"
            )
        return tiles // (self.cores * self.tiles)


def blocks_for(
    info: pltpu.TpuInfo, *, slots: int, tiles: int, positions: int, itemsize: int
) -> AttentionBlocks:
    """The rule of block sizes, from what a TPU generation can do.

    Args:
      info: of the generation: cores of a chip, bandwidth of a core.
      slots: B.
      tiles: P.
      positions: T or S.
      itemsize: bytes of a cached number.
    """
    cores = info.num_cores if tiles % info.num_cores == 0 else 1
    most = 1 << int(info.mem_bw_bytes_per_second * _SECONDS_PER_BLOCK - 1).bit_length()
    per_tile = most // (2 * LANES * itemsize)  # positions, if one tile were read at once
    at_once = 256 if positions % 256 == 0 else POSITION_TILE
    of_core = tiles // cores
    chosen = max(n for n in range(1, of_core + 1) if of_core % n == 0 and n * at_once <= per_tile)
    while at_once < _MOST_POSITIONS and positions % (2 * at_once) == 0:
        if chosen * 2 * at_once > per_tile:
            break
        at_once *= 2
    if slots * (of_core // chosen) * (positions // at_once) < _FEWEST_BLOCKS:
        at_once = POSITION_TILE
    return AttentionBlocks(cores=cores, tiles=chosen, positions=at_once)


def default_blocks(
    *, slots: int, tiles: int, positions: int, itemsize: int, interpreted: bool
) -> AttentionBlocks:
    """``blocks_for`` the TPU that is compiled for; interpreted, as if for a v5e."""
    if interpreted:
        info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1)
    else:
        info = pltpu.get_tpu_info()
    return blocks_for(info, slots=slots, tiles=tiles, positions=positions, itemsize=itemsize)


def padded_positions(positions: int) -> int:
    """The number of positions to allocate: the next multiple of 128."""
    return -(-positions // POSITION_TILE) * POSITION_TILE


def tiled_cache_shape(
    *, slots: int, positions: int, num_heads: int, head_width: int
) -> tuple[int, int, int, int]:
    """[B, P, T, 128], the shape of one layer's keys, or values.

    Raises:
      NotImplementedError: whole heads do not fill whole tiles of 128 lanes.
    """
    if LANES % head_width or num_heads * head_width % LANES:
        raise NotImplementedError(
            f"heads must fill tiles of {LANES} lanes, got {num_heads} heads of {head_width}"
        )
    return slots, num_heads * head_width // LANES, padded_positions(positions), LANES


def tile_heads(x_BTE: Float[Array, "B T E"]) -> Float[Array, "B P T 128"]:
    """Keys or values as a projection leaves them (E = N * H), in the layout of a cache."""
    slots, positions, width = x_BTE.shape
    return x_BTE.reshape(slots, positions, width // LANES, LANES).swapaxes(1, 2)


def untile_heads(x_BPTL: Float[Array, "B P T 128"]) -> Float[Array, "B T E"]:
    """The inverse of ``tile_heads``."""
    slots, tiles, positions, lanes = x_BPTL.shape
    return x_BPTL.swapaxes(1, 2).reshape(slots, positions, tiles * lanes)


def check_supported(q_BGE: jax.Array, k_BPTL: jax.Array, head_width: int) -> None:
    """Raises NotImplementedError for shapes that the kernels do not take."""
    window, width, positions = q_BGE.shape[1], q_BGE.shape[2], k_BPTL.shape[2]
    tiled_cache_shape(
        slots=1, positions=positions, num_heads=width // head_width, head_width=head_width
    )
    if not 1 <= window <= MAX_WINDOW:
        raise NotImplementedError(
            f"positions in one pass must be in [1, {MAX_WINDOW}], got {window}"
        )
    if positions % POSITION_TILE:
        raise NotImplementedError(
            f"positions of the cache must be a multiple of {POSITION_TILE}, got {positions}"
        )
    if q_BGE.dtype != k_BPTL.dtype or k_BPTL.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(
            "queries and cache must both be float32 or bfloat16, "
            f"got {q_BGE.dtype} and {k_BPTL.dtype}"
        )
