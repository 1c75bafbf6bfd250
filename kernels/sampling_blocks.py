"""How the sampling kernels cut the vocabulary, so that their rows fit in VMEM."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuspec.kernels.vocabulary_tiles import (
    LANES,
    SUBLANES,
    TILES_PER_TURN,
    rows_above,
    tiles_of,
)

# The rest is for spilled registers and what the compiler adds.
_VMEM_SHARE = 0.85
_UNASKED_BYTES = 16 * 2**20  # that the compiler gives a kernel of any generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingBlocks:
    """How the work of one call is cut.

    Attributes:
      tiles: of 128 ids, that are read at once: all of the vocabulary, or a multiple of 8.
    """

    tiles: int

    def count(self, vocabulary_size: int) -> int:
        """Blocks in the vocabulary.

        Raises:
          ValueError: these blocks do not cut it.
        """
        all_tiles = tiles_of(vocabulary_size)
        if not 1 <= self.tiles <= all_tiles or (self.tiles < all_tiles and self.tiles % SUBLANES):
            raise ValueError(f"tiles must be all {all_tiles} of the vocabulary or fewer, a "
                             f"multiple of {SUBLANES}, got {self.tiles}")
        return -(-all_tiles // self.tiles)

    def each(self, at: Any, vocabulary_size: int, body: Callable[[Any, int], None]) -> None:
        """Calls ``body(first tile, number of tiles)`` for block ``at``, if there is one.

        The last block is a program of its own: it may be shorter.
        """
        last = self.count(vocabulary_size) - 1
        if last:
            pl.when((at >= 0) & (at < last))(lambda: body(at * self.tiles, self.tiles))
        first = last * self.tiles
        pl.when(at == last)(lambda: body(first, tiles_of(vocabulary_size) - first))

    def ids(self, first: Any, tiles: int, vocabulary_size: int) -> int:
        """How many ids of the vocabulary there are in a block as ``each`` gives it."""
        if isinstance(first, int):
            return min(tiles * LANES, vocabulary_size - first * LANES)
        return tiles * LANES


def row_bytes(rows: int) -> int:
    """VMEM that one tile of float32 rows takes."""
    return 4 * rows_above(rows) * LANES


class VmemUse(NamedTuple):
    """Bytes of VMEM that a kernel takes.

    Attributes:
      kept: whatever its blocks are.
      per_tile: for each tile of a block.
    """

    kept: int
    per_tile: int

    def blocks(self, info: pltpu.TpuInfo, vocabulary_size: int) -> SamplingBlocks:
        """The rule of block sizes: as many tiles at once as fit beside what is kept.

        Raises:
          NotImplementedError: not even the smallest blocks fit.
        """
        tiles, room = tiles_of(vocabulary_size), int(_VMEM_SHARE * info.vmem_capacity_bytes)
        at_once = (room - self.kept) // self.per_tile
        if at_once < tiles:
            at_once = at_once // TILES_PER_TURN * TILES_PER_TURN
        if at_once < 1:
            need = self.of(SamplingBlocks(tiles=min(TILES_PER_TURN, tiles)))
            raise NotImplementedError(
                f"the kernel needs {need} bytes of VMEM for rows of {vocabulary_size} ids, "
                f"{room} are there")
        return SamplingBlocks(tiles=min(at_once, tiles))

    def of(self, blocks: SamplingBlocks) -> int:
        return self.kept + blocks.tiles * self.per_tile

    def limit(self, blocks: SamplingBlocks) -> int | None:
        """``vmem_limit_bytes`` of the kernel; None is what the compiler gives unasked. What
        it does not give, it uses to fetch operands ahead of kernels."""
        need = int(self.of(blocks) / _VMEM_SHARE)
        return need if need > _UNASKED_BYTES else None


def tpu_info(interpret: Any) -> pltpu.TpuInfo:
    """The TPU that is compiled for; interpreted, as if a v5e."""
    if interpret:
        return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1)
    return pltpu.get_tpu_info()


def check_logits(logits: jax.Array, vocabulary_size: int) -> None:
    """Refuses what no sampling kernel takes."""
    if logits.dtype != "float32":
        raise NotImplementedError(f"the kernel takes float32 logits, got {logits.dtype}")
    if logits.shape[-1] < vocabulary_size:
        raise NotImplementedError("the kernel takes logits of the whole vocabulary of "
                                  f"{vocabulary_size} ids, got {logits.shape[-1]}")
