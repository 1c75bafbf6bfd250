"""Slots on devices: insert a source, step all slots, release. Owns every program."""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tpuspec import mesh as mesh_lib
from tpuspec.config import EngineConfig, check_range
from tpuspec.decode_state import MAX_EOS_IDS, Slots, StepOutput
from tpuspec.draft_lengths import Drafting, DraftLengths, Step
from tpuspec.kernel_choice import KernelChoice
from tpuspec.logit_adjustment import NO_ID, SlotAdjustments
from tpuspec.measurement import CostReport
from tpuspec.pass_timing import time_passes
from tpuspec.programs import Key, Programs
from tpuspec.sampling import SamplingParams, SlotSampling, check_min_new_tokens, seed_words
from tpuspec.t5 import T5

Progress = Callable[[str, int, int], None]

_backend_compiles = 0


def _count_compile(event: str, *_: object, **__: object) -> None:
    global _backend_compiles  # JAX offers process-wide listeners only
    if event == "/jax/core/compile/backend_compile_duration":
        _backend_compiles += 1


jax.monitoring.register_event_duration_secs_listener(_count_compile)


@dataclasses.dataclass(eq=False)
class _Tenant:
    """What the host must know of a slot's request; compared by identity.

    Attributes:
      source_length: tokens.
      draft_length: as it was asked for; None is chosen step by step.
      label, drafting: what the choice goes by; None without a choice.
      prompted: whether its output begins with a decoder prompt.
      behind: tokens, at the most, that came since the draft read the last ones.
    """

    source_length: int
    draft_length: int | None
    label: str
    drafting: Drafting | None
    prompted: bool
    behind: int = 0


class StepHandle:
    """A launched step. ``read`` waits for it: one host copy.

    Attributes:
      kind: γ of the step, and what its drafts come of.
      tenants: whom it advances, by slot.
      looking_up: slots that take looked-up drafts beside the draft model's.
      without: the stretch of steps without the draft model that it is one of, or None.
      launched: when, by ``time.perf_counter``; None if other work was launched since the
        step before, so that its time says nothing.
    """

    def __init__(self, packed: jax.Array, kind: Step, tenants: Mapping[int, _Tenant],
                 looking_up: Container[int], without: int | None, launched: float | None,
                 done: Callable[["StepHandle", StepOutput], None]):
        self.kind = kind
        self.tenants = tenants
        self.looking_up = looking_up
        self.without = without
        self.launched = launched
        self._packed = packed
        self._done = done

    def read(self) -> StepOutput:
        output = StepOutput.unpack(np.asarray(self._packed), self.kind.length + 1)
        self._done(self, output)
        return output


class Engine:
    """Speculative decoding of up to ``config.slots`` requests at once.

    Programs are compiled ahead by ``warm_up``: one step per draft length and source
    bucket (per draft length alone with the kernels), one insert per bucket. The decode
    state is donated from program to program; weights are arguments, never constants.
    One thread may use an engine.

    Memory beside the weights: both models' caches, 2 L slots (T + S) N H elements
    each, with T = config.target_positions and S = config.max_source_length; 8 bytes for
    each slot and id of the vocabulary.
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
        if draft is None and config.draft_lengths != (0,) and not config.ngram_drafts:
            raise ValueError("draft_lengths must be (0,) without a draft model and ngram_drafts, "
                             f"got {config.draft_lengths}")
        if config.ngram_drafts and draft is not None and config.draft_length is not None:
            raise ValueError("draft_length must be chosen (None) for ngram_drafts beside a draft "
                             f"model, got {config.draft_length}")
        self.config = config
        self.vocabulary_size = vocabulary_size
        self.cost: CostReport | None = None
        self.start_id = target.config.decoder_start_token_id
        self._definitions = Programs(
            target, draft, config, vocabulary_size=vocabulary_size, mesh=mesh,
            kernels=kernels or KernelChoice.default(mesh))
        self._programs: dict[Key, jax.stages.Compiled] = {}
        self._weights = self._definitions.weights(*filter(None, (target, draft)))
        self._state = self._definitions.empty_state()
        self._tenants: dict[int, _Tenant] = {}
        self._sources: dict[int, tuple[int, ...]] = {}  # whose cross K/V a slot holds
        self._lengths: DraftLengths | None = None
        self._without = 0  # number of the stretch of steps without the draft model
        self._disturbed = True  # other programs were launched since the last step
        self._read_at = 0.0  # when the last step was read

    @property
    def compilations(self) -> int:
        """XLA compilations of this process so far; constant once warm."""
        return _backend_compiles

    @property
    def active_slots(self) -> tuple[int, ...]:
        """Slots with a request that is not known to have ended."""
        return tuple(self._tenants)

    @property
    def _drafts(self) -> bool:
        """Whether there is a draft model."""
        return len(self._weights) == 2

    # ---- verbs ---------------------------------------------------------------

    def warm_up(self, progress: Progress | None = None) -> CostReport:
        """Compiles every program and times the passes; seconds to minutes."""
        self.compile(progress)
        return self.measure(progress)

    def compile(self, progress: Progress | None = None) -> None:
        """Compiles what requests need: steps, inserts, release."""
        self._compile(self._definitions.requests(), progress)

    def measure(self, progress: Progress | None = None) -> CostReport:
        """Compiles single passes and times them and the steps on idle slots, whose
        work is the same as that of live ones."""
        self._compile(self._definitions.single_passes(), progress)
        self.cost = self._time()
        if self.config.draft_length is None:
            self._lengths = DraftLengths(self.cost.step_ms, self.cost.look_up_ms)
        return self.cost

    def _compile(self, keys: Iterable[Key], progress: Progress | None) -> None:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            pending = {}
            for key in keys:
                if key in self._programs:
                    continue
                lowered = self._definitions.lower(key, self._weights, self._state)
                pending[pool.submit(lowered.compile)] = key
            for done, future in enumerate(concurrent.futures.as_completed(pending), 1):
                self._programs[pending[future]] = future.result()
                if progress is not None:
                    progress("compile", done, len(pending))

    def insert(self, slot: int, source: Sequence[int], *, sampling: SamplingParams, seed: int,
               max_new_tokens: int, eos_ids: Sequence[int], draft_length: int | None,
               label: str = "", min_new_tokens: int = 0, decoder_prompt: Sequence[int] = (),
               logprobs: bool = False) -> None:
        """Gives a request a slot. Its source is encoded once per model, but not if a slot still
        holds what the same source gave before: that is copied.

        Args:
          source: ids, final EOS included; 1 to config.max_source_length of them.
          seed: in [0, 2**64).
          max_new_tokens: 1 to config.max_target_length.
          eos_ids: ids that end the output; at most 8, or none.
          draft_length: drafts examined per step; 0 is plain decoding, None chooses before
            every step (with ``config.draft_length`` None alone). A choice goes by what was
            accepted and by the clock, so that outputs at a temperature above 0 are then
            exact samples, but not the same ones every time.
          label: the request's kind: what was accepted of others tells where to begin.
          min_new_tokens: no end id comes before as many others; at most max_new_tokens.
          decoder_prompt: ids that the output begins with after the start token. They are not
            new tokens; with these at most config.max_target_length.
          logprobs: whether to compute the tokens' log-probabilities.

        Raises:
          ValueError: names the field, the value and the bound.
          RuntimeError: a draft length is to be chosen and ``measure`` did not run.
        """
        config = self.config
        check_range("slot", slot, 0, config.slots - 1)
        check_range("length of source", len(source), 1, config.max_source_length)
        check_range("max_new_tokens", max_new_tokens, 1, config.max_target_length)
        limit = config.max_draft_length if draft_length is None else draft_length
        check_range("draft_length", limit, 0, config.max_draft_length)
        if draft_length is None and config.draft_length is not None:
            raise ValueError("draft_length must be a number: this engine does not choose, got None")
        if draft_length is None and self._lengths is None:
            raise RuntimeError("measure must run before a draft length can be chosen")
        check_range("length of decoder_prompt", len(decoder_prompt), 0,
                    config.max_target_length - max_new_tokens)
        check_range("number of eos_ids", len(eos_ids), 0, MAX_EOS_IDS)
        for name, ids in (("source id", source), ("eos_ids", eos_ids),
                          ("decoder_prompt id", decoder_prompt)):
            for value in ids:
                check_range(name, value, 0, self.vocabulary_size - 1)
        sampling.check_ids(self.vocabulary_size)
        sampling.check_sampler(config.sampler)
        check_min_new_tokens(min_new_tokens, max_new_tokens=max_new_tokens, eos_ids=eos_ids,
                             sampling=sampling, vocabulary_size=self.vocabulary_size)
        words = seed_words(seed)
        eos = np.full((1, MAX_EOS_IDS), NO_ID, np.int32)
        eos[0, :len(eos_ids)] = eos_ids

        def one(value, dtype):
            return np.asarray([value], dtype)

        row = Slots(
            active_B=one(True, np.bool_), length_B=one(1, np.int32),
            last_two_B2=one((self.start_id, 0), np.int32),
            max_length_B=one(1 + len(decoder_prompt) + max_new_tokens, np.int32),
            source_length_B=one(len(source), np.int32), eos_ids_BE=eos,
            draft_limit_B=one(limit, np.int32), seed_B2=one(words, np.uint32),
            sampling=SlotSampling.of([sampling]),
            adjustments=SlotAdjustments.of(
                [sampling], self.vocabulary_size, config.max_target_length,
                min_new_tokens=min_new_tokens, prompt=decoder_prompt),
            logprobs_B=one(logprobs, np.bool_))
        self._enter(slot, tuple(source), row)
        self._disturbed = True
        self._tenants[slot] = _Tenant(
            len(source), draft_length, label, None if self._lengths is None else
            self._lengths.newcomer(label, limit, chosen=draft_length is None),
            prompted=bool(decoder_prompt))

    def _enter(self, slot: int, source: tuple[int, ...], row: Slots) -> None:
        if self._definitions.copies:
            for holder, held in self._sources.items():
                if held == source:
                    self._state = self._run(("copy",), self._state, np.int32(slot), row,
                                            np.int32(holder))
                    self._sources[slot] = source
                    return
        bucket = self.config.source_bucket(len(source))
        tokens = np.zeros((1, bucket), np.int32)
        tokens[0, :len(source)] = source
        self._state = self._run(("insert", bucket), self._state, np.int32(slot), row, tokens)
        self._sources[slot] = source

    def step(self) -> StepHandle:
        """Launches one step of all slots and returns at once.

        The draft length is the smallest rung that covers every active request's, or a
        larger one that pays for those that leave it to the engine.
        """
        if not self._tenants:
            raise RuntimeError("step needs an active slot")
        kind = self._choose()
        bucket = self._definitions.read_bucket(
            max(tenant.source_length for tenant in self._tenants.values()))
        looking_up = self._looking_up(kind)
        self._catch_up(kind)
        launched = None if self._disturbed else time.perf_counter()
        packed = self._launch(kind, bucket, looking_up)
        self._disturbed = False
        return StepHandle(packed, kind, dict(self._tenants), looking_up,
                          None if kind.by_model else self._without, launched, self._was_read)

    def _launch(self, kind: Step, bucket: int, looking_up: Sequence[int] = ()) -> jax.Array:
        more: tuple = ()
        if kind.by_model and self.config.ngram_drafts:
            more = (np.isin(np.arange(self.config.slots), looking_up),)
        name = "look up" if kind.looks_up else "step"
        self._state, packed = self._run((name, kind.length, bucket), self._state, *more)
        return packed

    def _choose(self) -> Step:
        tenants = self._tenants.values()
        rung = self.config.rung(max(t.draft_length or 0 for t in tenants))
        if self._lengths is None or all(t.draft_length is not None for t in tenants):
            return Step(rung, looks_up=rung > 0 and not self._drafts)
        return self._lengths.choose([t.drafting for t in tenants if t.drafting], rung)

    def _looking_up(self, kind: Step) -> list[int]:
        """Slots that look up drafts in a step of the draft model."""
        if not self.config.ngram_drafts or self._lengths is None or not kind.by_model:
            return []
        slots = {slot: t.drafting for slot, t in self._tenants.items() if t.drafting}
        chosen = self._lengths.looking_up(list(slots.values()), kind)
        return [slot for slot, looks_up in zip(slots, chosen, strict=True) if looks_up]

    def release(self, slot: int) -> None:
        """Ends a slot's request; the slot is inert from the next step on. Idempotent."""
        if self._tenants.pop(slot, None) is not None:
            self._state = self._run(("release",), self._state, np.int32(slot))

    def _catch_up(self, kind: Step) -> None:
        """Shows the draft what was decoded without it, before it drafts again."""
        tenants = self._tenants.values()
        if not kind.by_model:
            for tenant in tenants:
                tenant.behind += kind.length + 1  # at the most; see _was_read
            return
        behind = max(t.behind if t.draft_length != 0 else 0 for t in tenants)
        for missing in range(min(behind, self.config.max_target_length), 0,
                             -self._definitions.catch_up_width):
            self._state = self._run(("catch up",), self._state, np.int32(missing))
            self._disturbed = True
        self._without += 1
        for tenant in tenants:
            tenant.behind = 0

    def _was_read(self, step: StepHandle, output: StepOutput) -> None:
        now = time.perf_counter()
        if self._lengths is not None:
            if step.launched is not None:
                began = max(step.launched, self._read_at)  # it waited for the one before
                self._lengths.timed(step.kind, 1e3 * (now - began))
            for slot, tenant in step.tenants.items():
                if tenant.drafting is not None:
                    self._learn(self._lengths, tenant.drafting, step, slot, output)
        self._read_at = now
        for slot, tenant in step.tenants.items():
            new = int(output.num_tokens[slot])
            if new and not tenant.prompted and step.without == self._without:
                tenant.behind -= step.kind.length + 1 - new
            # A newer tenant is not its predecessor.
            if output.finish[slot] and self._tenants.get(slot) is tenant:
                del self._tenants[slot]

    def _learn(self, lengths: DraftLengths, drafting: Drafting, step: StepHandle, slot: int,
               output: StepOutput) -> None:
        """What a step says of one request, for the choice of later ones."""
        label, new = step.tenants[slot].label, int(output.num_tokens[slot])
        accepted, found, agreed = (int(x[slot]) for x in (
            output.accepted, output.found, output.agreed))
        ended = bool(output.finish[slot])
        if not (step.kind.looks_up or (slot in step.looking_up and found > 0)):
            lengths.record(label, drafting, accepted=accepted, examined=int(output.examined[slot]),
                           ended=ended and accepted == new)
        if self.config.ngram_drafts and new and found >= 0:
            lengths.record_look_up(label, drafting, found=found, agreed=agreed, new=new,
                                   ended=ended and agreed == new)

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

        definitions, rungs = self._definitions, self.config.draft_lengths
        bucket = definitions.read_bucket(self.config.source_buckets[0])
        draft = run("pass", "draft", definitions.draft_width)
        return time_passes(
            {rung: run("pass", "target", definitions.target_width(rung)) for rung in rungs},
            draft if self._drafts else None,
            {(name, rung): functools.partial(self._launch, Step(rung, name == "look up"), bucket)
             for name, rung, _ in definitions.steps(bucket)},
            where=f"{self.config.slots} slots, source bucket {bucket}")
