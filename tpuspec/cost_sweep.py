"""c and T(G)/T(1) on this machine: passes of every width timed, and the bytes they move."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpuspec.config import EngineConfig, check_range
from tpuspec.kernel_choice import KernelChoice
from tpuspec.measurement import time_interleaved
from tpuspec.memory import bytes_on_device, passes_that_read
from tpuspec.pass_timing import PASSES
from tpuspec.programs import Key, Programs, copies, products
from tpuspec.t5 import T5

COPY_BYTES = 2**28  # read, and written
PRODUCT_SIZES = {"cpu": 1024}  # of square matrices, by platform; others get _LARGE
_LARGE = 4096
_TURNS = 8  # copies, or products, in one timed program
_REPEATS = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassCost:
    """One pass of one model.

    Attributes:
      width: positions, G.
      ms: time of it, in a program of several so that launching does not count.
      moved: bytes of the weights that it reads and of the caches, on one device.
    """

    width: int
    ms: float
    moved: int

    @property
    def bytes_per_s(self) -> float:
        return self.moved / (1e-3 * self.ms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostSweep:
    """Of one batch size.

    Attributes:
      target: of each width, ascending.
      draft: a pass of its own width; None without a draft.
      copy_bytes_per_s: read and written by a copy within the memory of one device, timed
        in turns with the passes. Weights that stay in a CPU's caches may come faster.
      product_flops_per_s: of a product of large matrices in the target's dtype, likewise.
    """

    slots: int
    target: tuple[PassCost, ...]
    draft: PassCost | None
    copy_bytes_per_s: float
    product_flops_per_s: float

    @property
    def c(self) -> float | None:
        return None if self.draft is None else self.draft.ms / self.target[0].ms


def sweep(target: T5, draft: T5 | None, *, slots: int, widths: Sequence[int],
          source_positions: int, positions: int, vocabulary_size: int, mesh: Mesh | None = None,
          progress: Callable[[int], object] = lambda programs: None) -> CostSweep:
    """Compiles and times; seconds for each width.

    Args:
      slots: batch size.
      widths: G to time; 1 is among them whether or not it is named.
      source_positions, positions: lengths of the caches; short texts take as long as full
        ones without the TPU's kernels.
      progress: called after each compilation.
    """
    widths = sorted({1, *widths})
    check_range("width", widths[0], 1, None)
    config = EngineConfig(slots=slots, source_buckets=(source_positions,),
                          max_target_length=positions, draft_lengths=(0, max(widths)),
                          draft_length=max(widths))
    programs = Programs(target, draft, config, vocabulary_size=vocabulary_size, mesh=mesh,
                        kernels=KernelChoice.default(mesh))
    weights = programs.weights(*(model for model in (target, draft) if model is not None))
    state = programs.empty_state()
    keys: list[Key] = [("pass", "target", width) for width in widths]
    if draft is not None:
        keys.append(("pass", "draft", programs.draft_width))
    compiled = {}
    for key in keys:
        compiled[key] = programs.lower(key, weights, state).compile()
        progress(1)

    def timed(key: Key) -> Callable[[], object]:
        def run() -> object:
            nonlocal state
            state, tokens = compiled[key](weights, state)
            return tokens
        return run

    block = jnp.zeros(COPY_BYTES // 4, jnp.float32)

    def copy() -> object:
        nonlocal block
        block = copies(block, _TURNS)
        return block

    size = PRODUCT_SIZES.get(jax.default_backend(), _LARGE)
    matrix = jnp.full((size, size), 1 / size, target.embedding[...].dtype)

    def product() -> object:
        return products(matrix, _TURNS)

    times = time_interleaved({**{key: timed(key) for key in keys}, ("copy",): copy,
                              ("product",): product}, _REPEATS)
    caches = (state.target_cache, state.draft_cache)

    def cost(key: Key, model: int) -> PassCost:
        names = programs.weight_names()[model]
        tied = not any("lm_head" in name for name in names)
        read = [leaf for name, leaf in zip(names, weights[model], strict=True)
                if "decode" in passes_that_read(name, tied)]
        return PassCost(width=key[2], ms=times[key] / PASSES,
                        moved=bytes_on_device(read) + bytes_on_device(caches[model]))

    return CostSweep(
        slots=slots, target=tuple(cost(key, 0) for key in keys if key[1] == "target"),
        draft=cost(keys[-1], 1) if draft is not None else None,
        copy_bytes_per_s=2 * COPY_BYTES * _TURNS / (1e-3 * times["copy",]),
        product_flops_per_s=2 * size**3 * _TURNS / (1e-3 * times["product",]))
