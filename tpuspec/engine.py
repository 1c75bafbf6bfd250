"""Slots on devices: insert a source, step all slots, release. Owns every program."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tpuspec import mesh as mesh_lib
from tpuspec.config import EngineConfig, check_range
from tpuspec.decode_state import MAX_EOS_IDS, NO_ID, DecodeState, Slots, StepOutput
from tpuspec.kernel_choice import KernelChoice
from tpuspec.kv_cache import DecoderCache
from tpuspec.measurement import CostReport
from tpuspec.pass_timing import passes, time_passes
from tpuspec.sampling import SamplingParams, SlotSampling, seed_words
from tpuspec.speculative_step import step
from tpuspec.t5 import T5

Progress = Callable[[str, int, int], None]

_backend_compiles = 0


def _count_compile(event: str, *_: object, **__: object) -> None:
    global _backend_compiles  # JAX offers process-wide listeners only
    if event == "/jax/core/compile/backend_compile_duration":
        _backend_compiles += 1


jax.monitoring.register_event_duration_secs_listener(_count_compile)


@dataclasses.dataclass(frozen=True, eq=False)
class _Tenant:
    """What the host must know of a slot's request; compared by identity."""

    source_length: int
    draft_length: int


class StepHandle:
    """A launched step. ``read`` waits for it: one host copy."""

    def __init__(self, packed: jax.Array, draft_length: int, tenants: Mapping[int, _Tenant],
                 finished: Callable[[int, _Tenant], None]):
        self.draft_length = draft_length
        self._packed = packed
        self._tenants = tenants
        self._finished = finished

    def read(self) -> StepOutput:
        output = StepOutput.unpack(np.asarray(self._packed))
        for slot, tenant in self._tenants.items():
            if output.finish[slot]:
                self._finished(slot, tenant)
        return output


class Engine:
    """Speculative decoding of up to ``config.slots`` requests at once.

    Programs are compiled ahead by ``warm_up``: one step per draft length and source
    bucket (per draft length alone with the kernels), one insert per bucket. The decode
    state is donated from program to program; weights are arguments, never constants.
    One thread may use an engine.

    Memory beside the weights: both models' caches, 2 L slots (T + S) N H elements
    each, with T = config.target_positions and S = config.max_source_length.
    """

    def __init__(self, target: T5, draft: T5 | None, config: EngineConfig, *,
                 vocabulary_size: int, mesh: Mesh | None = None,
                 kernels: KernelChoice | None = None):
        """Raises ValueError on a vocabulary larger than a model's or an undraftable ladder."""
        for name, model in (("target", target), ("draft", draft)):
            if model is not None:
                check_range(f"vocabulary_size (by the {name}'s embedding)",
                            vocabulary_size, 1, model.config.vocab_size)
        if mesh is not None and config.slots % mesh.shape[mesh_lib.DATA]:
            raise ValueError(f"slots must be a multiple of {mesh.shape[mesh_lib.DATA]} (the "
                             f"mesh's data axis), got {config.slots}")
        if draft is None and config.draft_lengths != (0,):
            raise ValueError("draft_lengths must be (0,) without a draft model, "
                             f"got {config.draft_lengths}")
        self.config = config
        self.vocabulary_size = vocabulary_size
        self.cost: CostReport | None = None
        self.start_id = target.config.decoder_start_token_id
        self._mesh = mesh
        self._kernels = kernels or KernelChoice.default(mesh)
        self._tiled = all(self._kernels.tiles(model.config)
                          for model in (target, draft) if model is not None)
        self._tenants: dict[int, _Tenant] = {}
        self._programs: dict[tuple, jax.stages.Compiled] = {}
        self._graphs: list[nnx.GraphDef] = []
        self._structures: list[jax.tree_util.PyTreeDef] = []
        # Flat, for launches: to flatten an nnx.State takes a millisecond.
        self._weights: list[list[jax.Array]] = []
        for model in (target,) if draft is None else (target, draft):
            graph, params = self._place(model)
            leaves, structure = jax.tree.flatten(params)
            self._graphs.append(graph)
            self._structures.append(structure)
            self._weights.append(leaves)
        self._state = self._empty_state(target, draft)

    @property
    def compilations(self) -> int:
        """XLA compilations of this process so far; constant once warm."""
        return _backend_compiles

    @property
    def active_slots(self) -> tuple[int, ...]:
        """Slots with a request that is not known to have ended."""
        return tuple(self._tenants)

    # ---- verbs ---------------------------------------------------------------

    def warm_up(self, progress: Progress | None = None) -> CostReport:
        """Compiles every program and times the passes; seconds to minutes."""
        self.compile(progress)
        return self.measure(progress)

    def compile(self, progress: Progress | None = None) -> None:
        """Compiles what requests need: steps, inserts, release."""
        self._compile(self._plan(), progress)

    def measure(self, progress: Progress | None = None) -> CostReport:
        """Compiles single passes and times them and the steps on idle slots, whose
        work is the same as that of live ones."""
        self._compile(self._pass_plan(), progress)
        self.cost = self._time()
        return self.cost

    def _compile(self, plan: Mapping[tuple, tuple[Callable, tuple]],
                 progress: Progress | None) -> None:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            pending = {pool.submit(self._lower(key, build).compile): key
                       for key, build in plan.items()}
            for done, future in enumerate(concurrent.futures.as_completed(pending), 1):
                self._programs[pending[future]] = future.result()
                if progress is not None:
                    progress("compile", done, len(plan))

    def insert(self, slot: int, source: Sequence[int], *, sampling: SamplingParams, seed: int,
               max_new_tokens: int, eos_ids: Sequence[int], draft_length: int) -> None:
        """Encodes a source once per model and gives it a slot.

        Args:
          source: ids, final EOS included; 1 to config.max_source_length of them.
          seed: in [0, 2**64).
          max_new_tokens: 1 to config.max_target_length.
          eos_ids: ids that end the output; at most 8, or none.
          draft_length: drafts examined per step; 0 is plain decoding.

        Raises:
          ValueError: names the field, the value and the bound.
        """
        config = self.config
        check_range("slot", slot, 0, config.slots - 1)
        check_range("length of source", len(source), 1, config.max_source_length)
        check_range("max_new_tokens", max_new_tokens, 1, config.max_target_length)
        check_range("draft_length", draft_length, 0, config.max_draft_length)
        check_range("number of eos_ids", len(eos_ids), 0, MAX_EOS_IDS)
        for name, ids in (("source id", source), ("eos_ids", eos_ids)):
            for value in ids:
                check_range(name, value, 0, self.vocabulary_size - 1)
        words = seed_words(seed)
        bucket = config.source_bucket(len(source))
        tokens = np.zeros((1, bucket), np.int32)
        tokens[0, :len(source)] = source
        eos = np.full((1, MAX_EOS_IDS), NO_ID, np.int32)
        eos[0, :len(eos_ids)] = eos_ids

        def one(value, dtype):
            return np.asarray([value], dtype)

        row = Slots(
            active_B=one(True, np.bool_), length_B=one(1, np.int32),
            last_two_B2=one((self.start_id, 0), np.int32),
            max_length_B=one(1 + max_new_tokens, np.int32),
            source_length_B=one(len(source), np.int32), eos_ids_BE=eos,
            draft_limit_B=one(draft_length, np.int32), seed_B2=one(words, np.uint32),
            sampling=SlotSampling(temperature_B=one(sampling.temperature, np.float32),
                                  top_k_B=one(sampling.top_k, np.int32),
                                  top_p_B=one(sampling.top_p, np.float32)))
        self._state = self._run(("insert", bucket), self._state, np.int32(slot), tokens, row)
        self._tenants[slot] = _Tenant(len(source), draft_length)

    def step(self) -> StepHandle:
        """Launches one step of all slots and returns at once.

        The draft length is the smallest rung that covers every active request's.
        """
        if not self._tenants:
            raise RuntimeError("step needs an active slot")
        tenants = self._tenants.values()
        rung = self.config.rung(max(t.draft_length for t in tenants))
        bucket = self._read_bucket(max(t.source_length for t in tenants))
        self._state, packed = self._run(("step", rung, bucket), self._state)
        return StepHandle(packed, rung, dict(self._tenants), self._forget)

    def release(self, slot: int) -> None:
        """Ends a slot's request; the slot is inert from the next step on. Idempotent."""
        if self._tenants.pop(slot, None) is not None:
            self._state = self._run(("release",), self._state, np.int32(slot))

    def _forget(self, slot: int, tenant: _Tenant) -> None:
        if self._tenants.get(slot) is tenant:  # a newer tenant is not its predecessor
            del self._tenants[slot]

    # ---- programs ------------------------------------------------------------

    def _read_bucket(self, source_length: int) -> int:
        """Source positions that a step reads at the most. The kernels read no further
        than each slot's length: one program serves all buckets."""
        return self.config.source_bucket(
            self.config.max_source_length if self._tiled else source_length)

    def _target_width(self, rung: int) -> int:
        """Positions of a target pass. In bfloat16 passes of different widths round
        differently, so that all have one: plain decoding then computes what a verify
        pass does. A TPU pads few rows to 8 or 16 anyway."""
        if self._state.target_cache.self_k[0].dtype == jnp.bfloat16:
            return self.config.max_draft_length + 1
        return rung + 1

    def _place(self, model: T5) -> tuple[nnx.GraphDef, nnx.State]:
        graphdef, params = nnx.split(model)
        if self._mesh is not None:
            params = jax.device_put(params, mesh_lib.param_shardings(
                params, model.config, self._mesh))
        return graphdef, params

    def _empty_state(self, target: T5, draft: T5 | None) -> DecodeState:
        def cache(model: T5) -> DecoderCache:
            return DecoderCache.zeros(
                model.config, slots=self.config.slots, positions=self.config.target_positions,
                source_positions=self.config.max_source_length,
                dtype=model.embedding[...].dtype, tiled=self._kernels.tiles(model.config))

        state = DecodeState(slots=Slots.empty(self.config.slots), target_cache=cache(target),
                            draft_cache=None if draft is None else cache(draft))
        if self._mesh is not None:
            state = jax.device_put(state, mesh_lib.state_shardings(
                state, target.config, draft.config if draft is not None else None, self._mesh))
        return state

    def _models(self, weights: Sequence[list[jax.Array]]) -> tuple[T5, T5 | None]:
        """Target and draft, inside a program, of its arguments."""
        target, *draft = [
            nnx.merge(graph, jax.tree.unflatten(structure, leaves))
            for graph, structure, leaves in zip(
                self._graphs, self._structures, weights, strict=True)]
        return target, draft[0] if draft else None

    def _insert_program(self, weights, state, slot, tokens, row):
        def fill(model: T5, cache: DecoderCache) -> DecoderCache:
            encoded = model.encode(tokens, row.source_length_B)
            return cache.insert_source(slot, model.cross_keys_values(encoded))

        target, draft = self._models(weights)
        return dataclasses.replace(
            state, slots=state.slots.insert(slot, row),
            target_cache=fill(target, state.target_cache),
            draft_cache=None if draft is None else fill(draft, state.draft_cache))

    def _step_program(self, rung, bucket, weights, state):
        target, draft = self._models(weights)
        state, output = step(target, draft, state, draft_length=rung,
                             target_width=self._target_width(rung), source_positions=bucket,
                             vocabulary_size=self.vocabulary_size, kernels=self._kernels)
        return state, output.pack()

    def _release_program(self, weights, state, slot):
        active = state.slots.active_B & (jnp.arange(self.config.slots) != slot)
        return dataclasses.replace(
            state, slots=dataclasses.replace(state.slots, active_B=active))

    def _pass_program(self, which, width, weights, state):
        target, draft = self._models(weights)
        model = target if which == "target" else draft
        assert model is not None
        return passes(model, which, state, width=width,
                      source_positions=self._read_bucket(self.config.source_buckets[0]),
                      vocabulary_size=self.vocabulary_size, kernels=self._kernels)

    def _plan(self) -> dict[tuple, tuple[Callable, tuple]]:
        """Key -> (function, arguments after state) of every program."""
        config, scalar = self.config, jax.ShapeDtypeStruct((), jnp.int32)
        row = jax.eval_shape(lambda: Slots.empty(1))
        plan: dict[tuple, tuple[Callable, tuple]] = {
            ("release",): (self._release_program, (scalar,))}
        for bucket in config.source_buckets:
            tokens = jax.ShapeDtypeStruct((1, bucket), jnp.int32)
            plan["insert", bucket] = (self._insert_program, (scalar, tokens, row))
            read = self._read_bucket(bucket)
            for rung in config.draft_lengths:
                plan["step", rung, read] = (functools.partial(self._step_program, rung, read), ())
        return plan

    def _pass_plan(self) -> dict[tuple, tuple[Callable, tuple]]:
        keys = {("pass", "target", self._target_width(rung))
                for rung in self.config.draft_lengths}
        if len(self._weights) == 2:
            keys.add(("pass", "draft", 1))
        return {key: (functools.partial(self._pass_program, *key[1:]), ())
                for key in sorted(keys)}

    def _lower(self, key: tuple, build: tuple[Callable, tuple]) -> jax.stages.Lowered:
        function, extra = build
        out_shardings = None
        if self._mesh is not None:
            state = jax.tree.map(lambda x: x.sharding, self._state)
            rest = mesh_lib.replicated(self._mesh)
            out_shardings = state if key[0] in ("insert", "release") else (state, rest)
        program = jax.jit(function, donate_argnums=1, out_shardings=out_shardings)
        return program.lower(self._weights, self._state, *extra)

    def _run(self, key: tuple, *args: Any) -> Any:
        if key not in self._programs:
            raise RuntimeError("warm_up must run before the first request")
        return self._programs[key](self._weights, *args)

    def _time(self) -> CostReport:
        def run(*key: object) -> Callable[[], object]:
            def timed() -> object:
                self._state, result = self._run(key, self._state)
                return result
            return timed

        rungs = self.config.draft_lengths
        bucket = self._read_bucket(self.config.source_buckets[0])
        return time_passes(
            {rung: run("pass", "target", self._target_width(rung)) for rung in rungs},
            run("pass", "draft", 1) if len(self._weights) == 2 else None,
            {rung: run("step", rung, bucket) for rung in rungs},
            where=f"{self.config.slots} slots, source bucket {bucket}")
