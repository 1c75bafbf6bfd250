"""The sampling kernels at the shapes that the kernel report judges them by.

Searches for thresholds end early, by data. Their trip counts below were counted on
logits as language models have them: in each row the id of rank r has the logit -s ln r
(Zipf's law), and the rows' s run from 1 (7.8 nats of entropy at temperature 1 in 32128
ids) to 3 (0.6 nats). To count them again: python tools/kernel_cases_sampling.py
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_case import KernelCase

from tpuspec.kernels import WarpedRows, WarpOptions, rejection_sample, row_weights, sample_tokens
from tpuspec.kernels.rejection_scalars import prefetched_scalars
from tpuspec.kernels.token_sampling import row_options
from tpuspec.kernels.vocabulary_tiles import LANES, TileIndex, row_sum

B, G, V = 8, 8, 32128
MT5_V = 250112  # too many for v4's VMEM but in blocks
ZIPF_EXPONENTS = np.linspace(1.0, 3.0, 8)


@dataclasses.dataclass(frozen=True)
class Warp:
    """One request's options, and how often each of the four searches' loops runs:
    top-k among the kept, among all, top-p likewise."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    trips: tuple[int, int, int, int] = (1, 1, 1, 1)

    def options(self, slots: int) -> WarpOptions:
        return WarpOptions(
            temperature_B=np.full(slots, self.temperature, np.float32),
            top_k_B=np.full(slots, self.top_k, np.int32),
            top_p_B=np.full(slots, self.top_p, np.float32),
            min_p_B=np.full(slots, self.min_p, np.float32))


WARPS = (
    Warp("greedy", temperature=0.0),
    Warp("temperature", temperature=0.8),
    Warp("min_p", temperature=0.8, min_p=0.05),
    Warp("top_k,top_p", temperature=0.8, top_k=40, top_p=0.95, trips=(8, 3, 7, 1)),
    Warp("top_p", temperature=0.8, top_p=0.95, trips=(1, 1, 9, 15)),
)


def shape_of(x: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def floats(*shape: int) -> np.ndarray:
    """Only its shape matters."""
    return np.broadcast_to(np.float32(0.5), shape)


@functools.cache  # cases with the same program have the same builder
def builder(sample, tree, shapes, V):
    """The report passes arrays only, so named tuples are taken apart for it."""

    def function(*leaves):
        return sample(*jax.tree.unflatten(tree, leaves), vocabulary_size=V,
                      implementation="pallas")

    return lambda generation: (function, list(shapes))


def case_of(name, kernel, sample, arguments, V, hbm_bytes, scalars, trips) -> KernelCase:
    leaves, tree = jax.tree.flatten(arguments)
    return KernelCase(name=name, kernel=kernel,
                      build=builder(sample, tree, tuple(map(shape_of, leaves)), V),
                      hbm_bytes=hbm_bytes, flops=0,
                      scalars={i: np.asarray(x) for i, x in enumerate(scalars)},
                      loop_trips=trips)


def rejection_case(warp: Warp, V: int = V) -> KernelCase:
    γ = G - 1
    drafts, rows = np.zeros((B, γ), np.int32), WarpedRows(*[floats(B, γ)] * 3)
    rest = (warp.options(B), np.full(B, γ, np.int32), np.ones(B, bool), floats(B, γ), floats(B, G))
    # A greedy slot's draft logits are not needed.
    needed = B * V * 4 * (G + (γ if warp.temperature else 0))
    return case_of(f"rejection_sample_B={B}_G={G}_V={V}_{warp.name}", "rejection_sample",
                   rejection_sample, (drafts, floats(B, γ, V), rows, floats(B, G, V), *rest),
                   V, needed, prefetched_scalars(drafts, rows, *rest), warp.trips)


def token_case(warp: Warp) -> KernelCase:
    options, uniform = warp.options(B), floats(B)
    flags, _ = row_options(options, uniform, B)
    return case_of(f"sample_tokens_B={B}_V={V}_{warp.name}", "sample_tokens", sample_tokens,
                   (floats(B, V), options, uniform), V, B * V * 4, [flags], warp.trips)


CASES = (*map(rejection_case, WARPS), rejection_case(WARPS[1], MT5_V), *map(token_case, WARPS))


class _CountedWeights(row_weights.Weights):
    """The kernel's weights as an array [tiles, R, 128], outside of a kernel."""

    def __init__(self, logits_RV: np.ndarray, temperature: float):
        rows, size = logits_RV.shape
        super().__init__(None, rows, size)
        e = np.exp((logits_RV - logits_RV.max(axis=1, keepdims=True)) / temperature)
        self.e = jnp.asarray(e.reshape(rows, -1, LANES).swapaxes(0, 1), jnp.float32)

    def __getitem__(self, tile: TileIndex) -> jax.Array:
        return self.e[tile.number]

    def total(self, value: Any) -> jax.Array:
        return row_sum(jnp.sum(value(self.e), axis=0))


def count_trips(warp: Warp, logits_RV: np.ndarray) -> list[int]:
    """How often the loop of each search runs in the kernel, rows together."""
    counts = []
    search = row_weights.largest

    def counted(measure, *arguments):
        counts.append(0)

        def count(t):
            counts[-1] += 1
            return measure(t)

        with jax.disable_jit():
            return search(count, *arguments)

    weights = _CountedWeights(logits_RV, warp.temperature)
    options = row_weights.RowOptions(*(
        jnp.full(weights.shape, x, jnp.float32)
        for x in (warp.temperature, warp.top_k, warp.top_p, warp.min_p)))
    row_weights.largest = counted
    try:
        weights.threshold(options)
    finally:
        row_weights.largest = search
    return counts


def main() -> None:
    rng = np.random.default_rng(0)
    rank = np.arange(1, V + 1)
    for warp in WARPS:
        if warp.temperature and (warp.top_k or warp.top_p < 1):
            counts = []
            for _ in range(5):
                logits = np.stack([-s * np.log(rng.permutation(rank)) for s in ZIPF_EXPONENTS])
                counts.append(count_trips(warp, logits.astype(np.float32)))
            print(warp.name, "trips", counts, "mean", np.mean(counts, axis=0))


if __name__ == "__main__":
    main()
