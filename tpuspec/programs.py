"""The programs of an engine: what each computes and is compiled of. Holds no arrays."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from tpuspec import mesh as mesh_lib
from tpuspec.config import EngineConfig
from tpuspec.decode_state import DecodeState, Slots
from tpuspec.fused_decoder import FusedT5, Model, parameter_names, stacked_layers
from tpuspec.kernel_choice import KernelChoice
from tpuspec.kernels import WarpOptions
from tpuspec.kernels.sampling_reference import warp
from tpuspec.kv_cache import DecoderCache
from tpuspec.pass_timing import passes
from tpuspec.speculative_step import catch_up, step
from tpuspec.t5 import T5

# Of a program: ("step", γ, bucket), ("look up", γ, bucket), ("insert", bucket), ("copy",),
# ("release",), ("catch up",), ("pass", ...)
Key = tuple
Weights = Sequence[list[jax.Array]]  # of the target and of the draft
_MATRIX_ROWS = 8
_MOST_CATCH_UP = 8  # the widest window that the decoder kernel takes


class Programs:
    """Functions of (weights, state, *more), state donated, and their compilation.

    Weights and state may be arrays or ``jax.ShapeDtypeStruct``s with shardings: an
    engine compiles for the devices that it holds them on, ``tpuspec compile`` for a TPU
    that is not there.
    """

    def __init__(self, target: T5, draft: T5 | None, config: EngineConfig, *,
                 vocabulary_size: int, mesh: Mesh | None, kernels: KernelChoice):
        """The models give their structure only, and may be abstract."""
        self.config = config
        self._vocabulary_size = vocabulary_size
        self._mesh = mesh
        self._kernels = kernels
        models = (target,) if draft is None else (target, draft)
        self._models = [model.config for model in models]
        self._dtypes = [model.embedding.get_value().dtype for model in models]
        self._tiled = all(kernels.tiles(model) for model in self._models)
        self._graphs: list[nnx.GraphDef] = []
        self._structures: list[jax.tree_util.PyTreeDef] = []
        self._names: list[list[str]] = []
        for model in models:
            graph, params = nnx.split(model)
            self._graphs.append(graph)
            self._structures.append(jax.tree.structure(params))
            self._names.append(parameter_names(params))
        self._fused = None  # how the draft's layers are stacked, if one kernel reads them
        if draft is not None and kernels.tiles(draft.config):
            shapes = jax.eval_shape(lambda: self._cache(1, stacked=True))
            window = max(self.draft_width, 2 if config.draft_length is not None
                         else self.catch_up_width)
            self._fused = stacked_layers(draft, shapes, window, kernels)

    # ---- arguments -----------------------------------------------------------

    def weights(self, *models: T5) -> list[list[jax.Array]]:
        """The leaves of target and draft, placed. Flat, for launches: to flatten an
        nnx.State takes a millisecond."""
        leaves = []
        for number, (model, config) in enumerate(zip(models, self._models, strict=True)):
            params = nnx.state(model)
            fused = self._fused if number == 1 else None
            if self._mesh is not None:
                params = mesh_lib.place(params, mesh_lib.param_shardings(
                    params, config, self._mesh, whole=fused is not None))
            leaves.append(jax.tree.leaves(params))
            if fused is not None:
                is_abstract = isinstance(leaves[1][0], jax.ShapeDtypeStruct)
                leaves[1] = (jax.eval_shape(fused.stack, leaves[1]) if is_abstract
                             else fused.stack(leaves[1]))
                if self._mesh is not None:
                    whole = mesh_lib.replicated(self._mesh)
                    leaves[1] = [mesh_lib.place(leaf, whole) for leaf in leaves[1]]
        return leaves

    def weight_names(self) -> list[list[str]]:
        """Of the arrays that ``weights`` returns."""
        names = list(self._names)
        if self._fused is not None:
            names[1] = self._fused.names
        return names

    def empty_state(self) -> DecodeState:
        """Inert slots and empty caches, placed."""
        state = self.new_state()
        return state if self._mesh is None else mesh_lib.place(
            state, self.state_shardings(state))

    def new_state(self) -> DecodeState:
        """The same, wherever JAX puts arrays."""
        caches = [self._cache(i, stacked=i == 1 and self._fused is not None)
                  for i in range(len(self._models))]
        config, history, source = self.config, None, None
        if config.draft_length is None or config.ngram_drafts:
            history = jnp.zeros((config.slots, config.target_positions), jnp.int32)
        if config.ngram_drafts:
            source = jnp.zeros((config.slots, config.max_source_length), jnp.int32)
        return DecodeState(slots=self._empty_slots(config.slots), target_cache=caches[0],
                           draft_cache=caches[1] if len(caches) == 2 else None,
                           history_BT=history, source_BS=source)

    def _empty_slots(self, slots: int) -> Slots:
        return Slots.empty(slots, self._vocabulary_size, self.config.max_target_length)

    def _cache(self, model: int, *, stacked: bool) -> DecoderCache:
        return DecoderCache.zeros(
            self._models[model], slots=self.config.slots,
            positions=self.config.target_positions + self.draft_width - 1,
            source_positions=self.config.max_source_length, dtype=self._dtypes[model],
            tiled=self._kernels.tiles(self._models[model]), stacked=stacked)

    def state_shardings(self, state: DecodeState) -> DecodeState:
        assert self._mesh is not None
        target, *draft = self._models
        return mesh_lib.state_shardings(state, target, draft[0] if draft else None, self._mesh)

    # ---- what there is -------------------------------------------------------

    def requests(self) -> Iterator[Key]:
        """What requests need: steps, inserts, release."""
        yield ("release",)
        if self.copies:
            yield ("copy",)
        if self.config.draft_length is None and self._drafts:
            yield ("catch up",)
        for bucket in self.config.source_buckets:
            yield ("insert", bucket)
        for bucket in {self.read_bucket(b): None for b in self.config.source_buckets}:
            yield from self.steps(bucket)

    def steps(self, bucket: int) -> Iterator[Key]:
        """All kinds: with the draft's drafts, or looked-up ones alone, and plain."""
        for rung in self.config.draft_lengths:
            if not rung or self._drafts:
                yield ("step", rung, bucket)
            if rung and self.config.ngram_drafts:
                yield ("look up", rung, bucket)

    def single_passes(self) -> Iterator[Key]:
        """What is timed for c and the widening."""
        for width in sorted({self.target_width(rung) for rung in self.config.draft_lengths}):
            yield ("pass", "target", width)
        if self._drafts:
            yield ("pass", "draft", self.draft_width)

    @property
    def _drafts(self) -> bool:
        """Whether there is a draft model."""
        return len(self._models) == 2

    @property
    def copies(self) -> bool:
        """Whether a slot can take over what another has of a source. Where devices share the
        slots, it would come by way of all of them, which is no faster than to encode."""
        shared = self._mesh is not None and self._mesh.shape[mesh_lib.DATA] > 1
        return self.config.slots > 1 and not shared

    def read_bucket(self, source_length: int) -> int:
        """Source positions that a step reads at the most. The kernels read no further
        than each slot's length: one program serves all buckets."""
        return self.config.source_bucket(
            self.config.max_source_length if self._tiled else source_length)

    def target_width(self, rung: int) -> int:
        """Positions of a target pass. In bfloat16 passes of different widths round
        differently, so that all have one: plain decoding then computes what a verify
        pass does. A TPU pads few rows to 8 or 16 anyway."""
        if self._dtypes[0] == jnp.bfloat16:
            return self.config.max_draft_length + 1
        return rung + 1

    @property
    def draft_width(self) -> int:
        """Positions of a draft pass. A TPU's matrix unit takes 8 rows in the time of
        one, and XLA multiplies fewer rows on the vector unit: a pass of T5-small over
        one row takes twice the time of one over 8 (static estimate, v4)."""
        if not self._tiled:
            return 1
        parts = 1 if self._mesh is None else self._mesh.shape[mesh_lib.DATA]
        return -(-_MATRIX_ROWS * parts // self.config.slots)

    @property
    def catch_up_width(self) -> int:
        """Positions that the draft reads at once where plain steps left it behind."""
        return min(_MOST_CATCH_UP, self.config.target_positions)

    def lower(self, key: Key, weights: Weights, state: DecodeState) -> jax.stages.Lowered:
        """Traces a program. Compiling it is the slow part, and takes no Python."""
        function, more = self._build(key)
        out_shardings: Any = None
        if self._mesh is not None:
            out_shardings = self.state_shardings(state)
            if key[0] in ("step", "look up", "pass"):
                out_shardings = (out_shardings, mesh_lib.replicated(self._mesh))
        program = jax.jit(function, donate_argnums=1, out_shardings=out_shardings)
        return program.lower(weights, state, *more)

    # ---- what they compute ---------------------------------------------------

    def _build(self, key: Key) -> tuple[Callable, tuple]:
        """A program and the shapes of its arguments after the state."""
        name, *rest = key
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        row = jax.eval_shape(lambda: self._empty_slots(1))
        if name == "insert":
            tokens = jax.ShapeDtypeStruct((1, rest[0]), jnp.int32)
            return self._insert, (scalar, row, tokens)
        if name == "copy":
            return self._copy, (scalar, row, scalar)
        if name in ("release", "catch up"):
            return self._release if name == "release" else self._catch_up, (scalar,)
        if name == "step" and rest[0] and self.config.ngram_drafts:
            looking_up = jax.ShapeDtypeStruct((self.config.slots,), jnp.bool_)
            return functools.partial(self._step, *rest), (looking_up,)
        functions: dict[str, Callable] = {
            "step": self._step, "look up": self._look_up, "pass": self._pass}
        return functools.partial(functions[name], *rest), ()

    def _merge(self, weights: Weights) -> tuple[T5, Model | None]:
        """Target and draft, inside a program, of its arguments."""
        def one(model: int, leaves: list[jax.Array]) -> T5:
            params = jax.tree.unflatten(self._structures[model], leaves)
            return nnx.merge(self._graphs[model], params)

        target, *rest = weights
        if not rest:
            return one(0, target), None
        if self._fused is None:
            return one(0, target), one(1, rest[0])
        leaves, stacks = self._fused.unstack(rest[0])
        return one(0, target), FusedT5(one(1, leaves), stacks)

    def _insert(self, weights: Weights, state: DecodeState, slot: jax.Array, row: Slots,
                tokens: jax.Array) -> DecodeState:
        def fill(model: Model, cache: DecoderCache) -> DecoderCache:
            encoded = model.encode(tokens, row.source_length_B)
            return cache.insert_source(slot, model.cross_keys_values(encoded))

        target, draft = self._merge(weights)
        draft_cache = state.draft_cache
        if draft is not None and draft_cache is not None:
            draft_cache = fill(draft, draft_cache)
        source = state.source_BS
        if source is not None:
            source = lax.dynamic_update_slice(source, tokens, (slot, jnp.int32(0)))
        return self._enter(state, slot, row, fill(target, state.target_cache), draft_cache, source)

    def _copy(self, weights: Weights, state: DecodeState, slot: jax.Array, row: Slots,
              holder: jax.Array) -> DecodeState:
        draft_cache = state.draft_cache
        if draft_cache is not None:
            draft_cache = draft_cache.copy_source(holder, slot)
        source = state.source_BS
        if source is not None:
            held = lax.dynamic_slice_in_dim(source, holder, 1)
            source = lax.dynamic_update_slice_in_dim(source, held, slot, 0)
        return self._enter(state, slot, row, state.target_cache.copy_source(holder, slot),
                           draft_cache, source)

    def _enter(self, state: DecodeState, slot: jax.Array, row: Slots, target_cache: DecoderCache,
               draft_cache: DecoderCache | None, source: jax.Array | None) -> DecodeState:
        history = state.history_BT
        if history is not None:
            history = lax.dynamic_update_slice(
                history, row.last_two_B2[:, :1], (slot, jnp.int32(0)))
        return dataclasses.replace(
            state, slots=state.slots.insert(slot, row), draft_cache=draft_cache,
            target_cache=target_cache, history_BT=history, source_BS=source)

    def _step(self, rung: int, bucket: int, weights: Weights, state: DecodeState,
              looking_up: jax.Array | None = None) -> tuple[DecodeState, jax.Array]:
        return self._advance(*self._merge(weights), state, looking_up, rung, bucket)

    def _look_up(self, rung: int, bucket: int, weights: Weights, state: DecodeState,
                 ) -> tuple[DecodeState, jax.Array]:
        target, _ = self._merge(weights)
        return self._advance(target, None, state, None, rung, bucket)

    def _advance(self, target: T5, draft: Model | None, state: DecodeState,
                 looking_up: jax.Array | None, rung: int, bucket: int,
                 ) -> tuple[DecodeState, jax.Array]:
        state, output = step(target, draft, state, looking_up, draft_length=rung,
                             target_width=self.target_width(rung), source_positions=bucket,
                             vocabulary_size=self._vocabulary_size,
                             draft_width=self.draft_width, sampler=self.config.sampler,
                             kernels=self._kernels)
        return state, output.pack()

    def _release(self, weights: Weights, state: DecodeState, slot: jax.Array) -> DecodeState:
        active = state.slots.active_B & (jnp.arange(self.config.slots) != slot)
        return dataclasses.replace(
            state, slots=dataclasses.replace(state.slots, active_B=active))

    def _catch_up(self, weights: Weights, state: DecodeState, behind: jax.Array) -> DecodeState:
        _, draft = self._merge(weights)
        assert draft is not None
        return catch_up(draft, state, behind, width=self.catch_up_width, kernels=self._kernels,
                        source_positions=self.config.max_source_length)

    def _pass(self, which: str, width: int, weights: Weights, state: DecodeState,
              ) -> tuple[DecodeState, jax.Array]:
        target, draft = self._merge(weights)
        model = target if which == "target" else draft
        assert model is not None
        return passes(model, which, state, width=width,
                      source_positions=self.read_bucket(self.config.source_buckets[0]),
                      vocabulary_size=self._vocabulary_size, kernels=self._kernels)


@functools.partial(jax.jit, static_argnums=0)
def teacher_forced_logits(graph: nnx.GraphDef, params: nnx.State, source_BS: jax.Array,
                          lengths_B: jax.Array, target_BT: jax.Array) -> jax.Array:
    """[B, T, V] float32 of a model split in two; of no engine, for comparing models."""
    model = nnx.merge(graph, params)
    encoded_BSD = model.encode(source_BS, lengths_B)
    return model.decode_teacher_forced(target_BT, encoded_BSD, lengths_B)


class OverlapRows(NamedTuple):
    """Of each position, all [B, T].

    Attributes:
      overlap: Σ min(p, q).
      kept: min(1, q/p) of the position's token; its mean under p is the overlap.
      kept_squared, kept_under_draft: the mean of its square under p, and its own under q.
      possible: whether p of the token is above 0.
      sound: whether the logits were finite.
    """

    overlap: jax.Array
    kept: jax.Array
    kept_squared: jax.Array
    kept_under_draft: jax.Array
    possible: jax.Array
    sound: jax.Array


@functools.partial(jax.jit, static_argnames="vocabulary_size")
def overlap_of_logits(target_BTV: jax.Array, draft_BTV: jax.Array, tokens_BT: jax.Array,
                      options: WarpOptions, *, vocabulary_size: int) -> OverlapRows:
    """Compares two models along texts; of no engine."""
    p, _, p_sound = warp(target_BTV[..., :vocabulary_size], options, vocabulary_size)
    q, _, q_sound = warp(draft_BTV[..., :vocabulary_size], options, vocabulary_size)
    kept = jnp.where(p > 0, jnp.minimum(1.0, q / jnp.where(p > 0, p, 1.0)), 0.0)
    p_token, kept_token = (jnp.take_along_axis(x, tokens_BT[..., None], axis=-1)[..., 0]
                           for x in (p, kept))
    return OverlapRows(
        overlap=jnp.sum(jnp.minimum(p, q), axis=-1), kept=kept_token,
        kept_squared=jnp.sum(p * kept**2, axis=-1), kept_under_draft=jnp.sum(q * kept, axis=-1),
        possible=p_token > 0, sound=p_sound & q_sound)


@functools.partial(jax.jit, static_argnames="vocabulary_size")
def warped_probabilities(logits_BTV: jax.Array, options: WarpOptions, *, vocabulary_size: int,
                         ) -> jax.Array:
    """[B, T, vocabulary_size] as they are sampled from; NaN where logits are not sound."""
    p, _, sound = warp(logits_BTV[..., :vocabulary_size], options, vocabulary_size)
    return jnp.where(sound[..., None], p, jnp.nan)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def copies(block: jax.Array, turns: int) -> jax.Array:
    """Reads and writes the block so many times; of no engine, for the machine's bandwidth."""
    # The barrier: of several additions no compiler may make one.
    return lax.fori_loop(0, turns, lambda _, x: lax.optimization_barrier(x + 1), block)


@functools.partial(jax.jit, static_argnums=1)
def products(matrix: jax.Array, turns: int) -> jax.Array:
    """So many products of a square matrix; of no engine, for the machine's operations."""
    return lax.fori_loop(0, turns, lambda _, x: x @ matrix, matrix)
