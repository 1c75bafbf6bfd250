"""Single passes as programs of their own: what c and the widening compare."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from tpuspec.decode_state import DecodeState
from tpuspec.fused_decoder import Model
from tpuspec.kernel_choice import KernelChoice
from tpuspec.kv_cache import DecoderCache
from tpuspec.measurement import CostReport, time_interleaved
from tpuspec.speculative_step import read

PASSES = 8  # in one timed program
_REPEATS = 15


def passes(model: Model, which: str, state: DecodeState, *, width: int, source_positions: int,
           vocabulary_size: int, kernels: KernelChoice) -> tuple[DecodeState, jax.Array]:
    """Passes over ``width`` tokens, each with a greedy choice of the next, one after the
    other, so that launching does not count.

    Args:
      which: "target" or "draft", whose cache is used.
    """
    def body(_: int, carry: tuple[jax.Array, DecoderCache]) -> tuple[jax.Array, DecoderCache]:
        tokens, cache = carry
        logits, cache = read(model, tokens, state.slots.length_B - 1, state.slots, cache,
                             source_positions, kernels=kernels)
        return jnp.argmax(logits[..., :vocabulary_size], axis=-1).astype(jnp.int32), cache

    slots = state.slots.length_B.shape[0]
    tokens, cache = jax.lax.fori_loop(
        0, PASSES, body, (jnp.zeros((slots, width), jnp.int32), getattr(state, f"{which}_cache")))
    return dataclasses.replace(state, **{f"{which}_cache": cache}), tokens


def time_passes(target: Mapping[int, Callable[[], object]],
                draft: Callable[[], object] | None,
                steps: Mapping[tuple[str, int], Callable[[], object]], *, where: str,
                ) -> CostReport:
    """Args:
      target: by γ, a run of the program of target passes in a step of γ drafts.
      draft: a run of the program of draft passes.
      steps: by name ("step" or "look up") and γ, a run of the whole step.
      where: the shapes that were timed, for the report.
    """
    runs: dict[tuple[str, int], Callable[[], object]] = {}
    runs |= {("verify", rung): run for rung, run in target.items()}
    runs |= steps
    if draft is not None:
        runs["draft", 1] = draft
    times = time_interleaved(runs, _REPEATS)
    return CostReport(
        target_ms=times["verify", 0] / PASSES,
        draft_ms=None if draft is None else times["draft", 1] / PASSES,
        verify_ms={rung: times["verify", rung] / PASSES for rung in target},
        step_ms={rung: times[name, rung] for name, rung in steps if name == "step"},
        look_up_ms={rung: times[name, rung] for name, rung in steps if name == "look up"},
        method=f"at warm-up, median over {_REPEATS} turns of the wall time of {PASSES} passes "
               f"in one program, divided by {PASSES}; {where}")
