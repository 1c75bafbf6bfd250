"""What an engine's programs take on a TPU: memory, and estimated time, before it is rented.

Everything here is static: the programs are those that the engine would run, compiled by
the TPU's compiler, but never run.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from tpuspec import mesh as mesh_lib
from tpuspec import theory
from tpuspec.config import EngineConfig, T5Config
from tpuspec.hlo_schedule import Schedule
from tpuspec.kernel_choice import KernelChoice
from tpuspec.memory import abstract_model, abstract_state, bytes_on_device, passes_that_read
from tpuspec.paper import TABLE_4
from tpuspec.pass_timing import PASSES
from tpuspec.programs import Key, Programs
from tpuspec.schedule_estimate import Estimate, estimate
from tpuspec.t5 import T5
from tpuspec.tpu_compiler import Topology, lowering_for

Progress = Callable[[str, int, int], None]
_LENGTHS = (128, 256, 512, 1024)  # that a table of slots is made for
_PLACES = 12  # of a program, in the report
_SMALL = ("release", "copy", "catch up")  # compiled, not told of
PAPER = [row for row in TABLE_4 if row.draft == "small"]  # what Eq. (5) is told beside


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramRow:
    """One program on one device.

    Attributes:
      hbm_bytes: arguments, results that are not written over them, temporaries, code.
      floor_bytes: that must be read: weights and full caches once.
      floor_ms: these over the bandwidth; for an insert, whose encoder reads a whole source,
        the operations of its weights over the peak, where that is more.
      estimate_ms: of the schedule; for passes of a single one.
      by_scope: milliseconds of the cores in the costliest places, for passes of all.
    """

    name: str
    hbm_bytes: int
    temporary_bytes: int
    floor_bytes: int
    floor_ms: float
    estimate_ms: float
    collectives: int
    compile_seconds: float
    by_scope: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """Memory and estimated times of one engine on one topology, per device.

    Attributes:
      slots_that_fit: by length of source and output alike, with the largest program's own
        memory as it is with the slots and lengths compiled: an estimate.
    """

    topology: str
    mesh: tuple[int, int]
    slots: int
    weight_bytes: int
    cache_bytes: int
    total_bytes: int
    hbm_bytes: int
    slots_that_fit: dict[int, int]
    programs: tuple[ProgramRow, ...]
    c: float | None
    widening: dict[int, float]
    predicted_speedup: tuple[dict[str, Any], ...]

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.hbm_bytes

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"fits": self.fits}


class AbstractEngine:
    """The programs and arguments of an engine on devices that are not there."""

    def __init__(self, models: Sequence[T5], config: EngineConfig, topology: Topology, *,
                 mesh_shape: tuple[int, int], vocabulary_size: int):
        devices = topology.devices()
        data, model = mesh_shape
        if data * model != len(devices):
            raise ValueError(f"mesh must share the topology's {len(devices)} chips, got "
                             f"{data},{model}")
        self._device = devices[0]
        mesh = None if len(devices) == 1 else Mesh(
            np.asarray(devices).reshape(mesh_shape), (mesh_lib.DATA, mesh_lib.MODEL))
        target, draft = (*models, None)[:2]
        assert target is not None
        self._mesh = mesh
        with lowering_for(self._device):
            self.programs = Programs(
                target, draft, config, vocabulary_size=vocabulary_size, mesh=mesh,
                kernels=KernelChoice(implementation="pallas", mesh=mesh))
        self.weights = self._placed(self.programs.weights(*models))
        self.names = self.programs.weight_names()
        self.state = self._placed(abstract_state(self.programs, mesh))

    def _placed(self, tree: Any) -> Any:
        if self._mesh is not None:
            return tree
        sharding = SingleDeviceSharding(self._device)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                            tree)

    def _compiling(self) -> contextlib.AbstractContextManager[Any]:
        """For the device. On a mesh, the devices of the kernels are known from it."""
        return lowering_for(self._device) if self._mesh is None else contextlib.nullcontext()

    def lower(self, key: Key) -> jax.stages.Lowered:
        with self._compiling():
            return self.programs.lower(key, self.weights, self.state)

    def weight_bytes(self, model: int, *, of: str) -> int:
        """Of "decode", "encode" or "all" of a model, on one device."""
        return sum(map(bytes_on_device, self._weights(model, of)))

    def num_weights(self, model: int, *, of: str) -> int:
        """The same, counted."""
        return sum(bytes_on_device(w) // w.dtype.itemsize for w in self._weights(model, of))

    def _weights(self, model: int, of: str) -> list[jax.ShapeDtypeStruct | jax.Array]:
        tied = not any("lm_head" in name for name in self.names[model])
        return [leaf for name, leaf in zip(self.names[model], self.weights[model], strict=True)
                if of == "all" or of in passes_that_read(name, tied)]

    def cache_bytes(self, model: int) -> int:
        return bytes_on_device((self.state.target_cache, self.state.draft_cache)[model])


def report(topology: Topology, target: T5Config, draft: T5Config | None, config: EngineConfig, *,
           dtype: Any, mesh_shape: tuple[int, int], vocabulary_size: int | None = None,
           progress: Progress | None = None) -> ProgramReport:
    """Compiles all programs of an engine. Takes minutes for the largest models.

    Args:
      topology: what to compile for.
      target: of the pair.
      draft: None is plain decoding.
      config: shapes.
      dtype: of weights, activations and caches.
      mesh_shape: chips along data and model.
      vocabulary_size: ids that exist; None takes all that the smaller embedding has.
      progress: called with the program's name, how many are done, and of how many.

    Raises:
      ValueError: the mesh does not share the topology, or a program does not compile.
    """
    models = [abstract_model(c, dtype) for c in (target, draft) if c is not None]
    smallest = min(model.config.vocab_size for model in models)
    engine = AbstractEngine(models, config, topology, mesh_shape=mesh_shape,
                            vocabulary_size=vocabulary_size or smallest)
    keys = [*engine.programs.requests(), *engine.programs.single_passes()]
    rows: dict[Key, ProgramRow] = {}
    extra = 0
    for done, key in enumerate(keys):
        if progress is not None:
            progress(_name(key, config), done, len(keys))
        if key[0] in _SMALL:
            engine.lower(key).compile()
            continue
        rows[key], more = _row(engine, key, topology)
        extra = max(extra, more)
    if progress is not None:
        progress("", len(keys), len(keys))

    target_ms = {rung: rows["pass", "target", engine.programs.target_width(rung)].estimate_ms
                 for rung in config.draft_lengths}
    c = None if draft is None else (
        rows["pass", "draft", engine.programs.draft_width].estimate_ms / target_ms[0])
    widening = {rung: ms / target_ms[0] for rung, ms in target_ms.items()}
    weights = sum(engine.weight_bytes(i, of="all") for i in range(len(models)))
    caches = sum(engine.cache_bytes(i) for i in range(len(models)))
    return ProgramReport(
        topology=f"{topology.generation}:{'x'.join(map(str, topology.bounds))}",
        mesh=mesh_shape, slots=config.slots, weight_bytes=weights, cache_bytes=caches,
        total_bytes=weights + caches + extra, hbm_bytes=topology.chip.hbm_bytes,
        slots_that_fit={length: _slots_that_fit(
            models, config, topology, mesh_shape, length,
            topology.chip.hbm_bytes - weights - extra) for length in _LENGTHS},
        programs=tuple(rows.values()), c=c, widening=widening,
        predicted_speedup=tuple(_predictions(c, widening)) if c is not None else ())


def _slots_that_fit(models: Sequence[T5], config: EngineConfig, topology: Topology,
                    mesh_shape: tuple[int, int], length: int, room: int) -> int:
    """Whose caches take at most ``room`` bytes of a device, for texts of ``length``."""
    positions = length - config.max_draft_length - 2
    if positions < 1:
        return 0
    few = 8 * mesh_shape[0]  # fewer would have draft passes, and with them caches, of other widths

    def taken(slots: int) -> int:
        shapes = dataclasses.replace(config, slots=slots, source_buckets=(length,),
                                     max_target_length=positions)
        return bytes_on_device(AbstractEngine(
            models, shapes, topology, mesh_shape=mesh_shape,
            vocabulary_size=min(model.config.vocab_size for model in models)).state)

    least = taken(few)
    more = (taken(2 * few) - least) / few  # for each slot
    slots = few + math.floor((room - least) / more)
    return max(0, slots // mesh_shape[0] * mesh_shape[0])


def _row(engine: AbstractEngine, key: Key, topology: Topology) -> tuple[ProgramRow, int]:
    """The program's row, and the bytes that it takes beside weights and state."""
    config, chip = engine.programs.config, topology.chip
    began = time.monotonic()
    try:
        compiled = engine.lower(key).compile()
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"{_name(key, config)} does not compile: {error}") from error
    seconds = time.monotonic() - began
    memory = compiled.memory_analysis()
    extra = (memory.temp_size_in_bytes + memory.output_size_in_bytes
             - memory.alias_size_in_bytes + memory.generated_code_size_in_bytes)
    found: Estimate = estimate(Schedule.parse(compiled.as_text()), chip)
    floor = _floor_bytes(engine, key)
    return ProgramRow(
        name=_name(key, config), hbm_bytes=memory.argument_size_in_bytes + extra,
        temporary_bytes=memory.temp_size_in_bytes, floor_bytes=floor,
        floor_ms=1e3 * max(floor / chip.bandwidth, _floor_operations(engine, key) / chip.flops),
        estimate_ms=1e3 * found.seconds / (PASSES if key[0] == "pass" else 1),
        collectives=found.collectives // (PASSES if key[0] == "pass" else 1),
        compile_seconds=seconds,
        by_scope={name: 1e3 * seconds for name, seconds in sorted(
            found.by_scope.items(), key=lambda item: -item[1])[:_PLACES]},
    ), extra


def _floor_bytes(engine: AbstractEngine, key: Key) -> int:
    def one_pass(model: int) -> int:
        return engine.weight_bytes(model, of="decode") + engine.cache_bytes(model)

    if key[0] == "insert":  # the caches of one slot are written
        models = range(len(engine.weights))
        return sum(engine.weight_bytes(i, of="encode")
                   + engine.cache_bytes(i) // engine.programs.config.slots for i in models)
    if key[0] == "pass":
        return one_pass(("target", "draft").index(key[1]))
    drafts = key[1] if key[0] == "step" else 0  # of a look-up there is nothing to read
    return one_pass(0) + (drafts * one_pass(1) if drafts else 0)


def _floor_operations(engine: AbstractEngine, key: Key) -> int:
    """Of an insert: a multiply-add of every weight for every source position, padding too."""
    if key[0] != "insert":
        return 0
    return 2 * key[1] * sum(engine.num_weights(i, of="encode")
                            for i in range(len(engine.weights)))


def _name(key: Key, config: EngineConfig) -> str:
    match key:
        case ("insert", bucket):
            return f"encode and insert {bucket}"
        case ("step", rung, _):
            return f"step, gamma {rung}"
        case ("look up", rung, _):
            return f"step, gamma {rung}, looked up"
        case ("pass", "draft", _):
            return "draft pass"
        case (small,):
            return str(small)
        case (_, which, width):
            return f"{which} pass, {width} positions"
    raise ValueError(f"unknown program {key}")


def _predictions(c: float, widening: dict[int, float]) -> list[dict[str, Any]]:
    rows = []
    for paper in PAPER:
        gains = {gamma: theory.speedup(paper.alpha, gamma, c, widening[gamma])
                 for gamma in widening}
        gamma = max(gains, key=lambda g: gains[g])
        rows.append({"task": paper.task, "temperature": paper.temperature, "alpha": paper.alpha,
                     "gamma": gamma, "speedup": gains[gamma], "paper_gamma": paper.gamma,
                     "paper_expected": paper.expected, "paper_measured": paper.measured})
    return rows
