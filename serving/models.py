"""Engines from checkpoint directories; by default from the pair that comes with the package."""

import contextlib
import dataclasses
import functools
import importlib.resources
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import tqdm
from absl import logging
from jax.sharding import Mesh

from tpuspec import checkpoint, memory, platform
from tpuspec import mesh as mesh_lib
from tpuspec.checkpoint import LoadedModel
from tpuspec.checkpoint_location import path_of
from tpuspec.config import EngineConfig, Quantization
from tpuspec.engine import Engine
from tpuspec.quantization import load_int8
from tpuspec.serving.service import ModelInfo
from tpuspec.vocabulary import Vocabulary
from tpuspec.vocabulary_files import find_vocabulary

_LOG_SECONDS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Where the two models lie; ``draft`` None is plain decoding."""

    target: pathlib.Path
    draft: pathlib.Path | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """An engine that is not warm yet, and what serving has to know beside it."""

    engine: Engine
    vocabulary: Vocabulary | None
    info: ModelInfo


@contextlib.contextmanager
def pair(target: str | None, draft: str | None) -> Iterator[Pair]:
    """The directories given, or those of the bundled pair.

    Raises:
      ValueError: a draft without a target.
    """
    if target is not None:
        yield Pair(target=path_of(target),
                   draft=None if draft is None else path_of(draft))
        return
    if draft is not None:
        raise ValueError("draft needs a target: the bundled target has its own draft")
    bundled = importlib.resources.files("tpuspec") / "demo_pair"
    if not bundled.is_dir():
        raise ValueError("this installation has no bundled pair: name a target")
    with importlib.resources.as_file(bundled) as directory:
        yield Pair(target=directory / "target", draft=directory / "draft")


def source_bucket(models: Pair, texts: Iterable[str], id_lengths: Iterable[int] = ()) -> int:
    """The power of two, at least 16, that holds the longest source.

    Args:
      models: the target has the vocabulary.
      texts: sources.
      id_lengths: lengths of sources given as ids.
    """
    vocabulary = find_vocabulary(models.target)
    encode = list if vocabulary is None else vocabulary.encode
    longest = max([16, *(len(encode(text)) for text in texts), *id_lengths])
    return 1 << (longest - 1).bit_length()


def load(models: Pair, config: EngineConfig, *, dtype: str | None = None,
         mesh_shape: tuple[int, int] = (1, 1)) -> Served:
    """Reads both models and checks that they fit together.

    Args:
      models: directories.
      config: shapes; without a draft its ladder must be (0,).
      dtype: of weights and activations; None is bfloat16 on TPU and float32 elsewhere.
        "int8" quantizes the target's weights, if they are not yet, and leaves the rest as
        with None: a draft is bound by its operations, not by its bytes.
      mesh_shape: devices along data (slots) and model (heads, widths).

    Raises:
      ValueError: a checkpoint is broken, target and draft differ in vocabulary, or the
        engine does not fit on its devices.
    """
    _keep_compiled_programs()
    devices = jax.devices()
    read_target, dtype, mesh = _how(dtype, mesh_shape)
    configs = [checkpoint.describe(path).config for path in (models.target, models.draft)
               if path is not None]
    if read_target is load_int8:
        configs[0] = dataclasses.replace(configs[0], quantization=Quantization.INT8)
    memory.check_fits(configs, config, dtype=jnp.dtype(dtype), mesh=mesh,
                      available=memory.device_memory(devices[0]))
    options = _options(dtype, mesh)
    target = read_target(models.target, **options)
    draft = None if models.draft is None else checkpoint.load(models.draft, **options)
    vocabulary = _common_vocabulary(target, draft)
    engine = Engine(
        target.model, None if draft is None else draft.model, config, mesh=mesh,
        vocabulary_size=vocabulary_size(target, [] if draft is None else [draft]))
    eos_id = target.config.eos_token_id
    if vocabulary is not None and vocabulary.eos_id != eos_id:
        raise ValueError(f"eos_token_id of the target must be the vocabulary's "
                         f"{vocabulary.eos_id}, got {eos_id}")
    used = devices if mesh is None else list(mesh.devices.flat)
    info = ModelInfo(
        name=models.target.resolve().name, platform=devices[0].platform,
        devices=tuple(str(device) for device in used[:1 if mesh is None else None]),
        target_config_json=json.dumps(target.config.to_json()),
        draft_config_json="" if draft is None else json.dumps(draft.config.to_json()),
        eos_id=eos_id)
    return Served(engine=engine, vocabulary=vocabulary, info=info)


def load_models(target: pathlib.Path, drafts: Iterable[pathlib.Path], *, dtype: str | None = None,
                mesh_shape: tuple[int, int] = (1, 1)) -> tuple[LoadedModel, list[LoadedModel]]:
    """The same models without an engine; drafts are compared with the target as in ``load``."""
    _keep_compiled_programs()
    read_target, dtype, mesh = _how(dtype, mesh_shape)
    options = _options(dtype, mesh)
    loaded = read_target(target, **options)
    others = [checkpoint.load(path, **options) for path in drafts]
    for other in others:
        _common_vocabulary(loaded, other)
    return loaded, others


def _how(dtype: str | None, mesh_shape: tuple[int, int],
         ) -> tuple[Callable[..., LoadedModel], str, Mesh | None]:
    """What reads the target, the dtype in memory, and the mesh."""
    read_target = load_int8 if dtype == "int8" else checkpoint.load
    if dtype is None or dtype == "int8":
        dtype = default_dtype()
    return read_target, dtype, mesh_of(mesh_shape)


def mesh_of(shape: tuple[int, int]) -> Mesh | None:
    return None if shape == (1, 1) else mesh_lib.make_mesh(*shape)


def vocabulary_size(target: LoadedModel, drafts: Iterable[LoadedModel]) -> int:
    """Ids that exist."""
    if target.vocabulary is not None:
        return target.vocabulary.size
    return min(model.config.vocab_size for model in (target, *drafts))


def platform_name() -> str:
    return str(jax.devices()[0].platform)


def _options(dtype: str, mesh: Mesh | None) -> dict[str, Any]:
    return dict(dtype=jnp.dtype(dtype), shardings=None if mesh is None
                else functools.partial(mesh_lib.param_shardings, mesh=mesh))


def default_dtype() -> str:
    """Of weights and activations where none is named."""
    return "bfloat16" if jax.devices()[0].platform == "tpu" else "float32"


def _keep_compiled_programs() -> None:
    """Unless JAX_COMPILATION_CACHE_DIR names another folder for them."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(platform.compilation_cache()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def warm_up(engine: Engine, *, measure: bool = True) -> None:
    """Compiles all programs and, unless told not to, times them. Progress on a terminal, and
    in the log now and then, for whoever starts a server elsewhere."""
    with tqdm.tqdm(desc="warming up", unit="program", file=sys.stderr, leave=False,
                   disable=not sys.stderr.isatty()) as bar:

        def progress(what: str, done: int, total: int) -> None:
            bar.set_description_str(f"warming up: {what}")
            bar.total, bar.n = total, done
            bar.refresh()
            logging.log_every_n_seconds(logging.INFO, "%s: %d of %d programs", _LOG_SECONDS,
                                        what, done, total)

        engine.compile(progress)
        if measure:
            engine.measure(progress)


def _common_vocabulary(target: LoadedModel, draft: LoadedModel | None) -> Vocabulary | None:
    if draft is None:
        return target.vocabulary
    if (target.vocabulary is None) != (draft.vocabulary is None):
        has, lacks = ("draft", "target") if target.vocabulary is None else ("target", "draft")
        raise ValueError(f"{has} has a vocabulary and {lacks} has none: they cannot be compared")
    if target.vocabulary is not None and draft.vocabulary is not None:
        difference = target.vocabulary.differences(draft.vocabulary)
        if difference is not None:
            raise ValueError("draft must have the target's vocabulary: " + difference)
    return target.vocabulary
