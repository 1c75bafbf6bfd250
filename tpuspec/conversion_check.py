"""Whether a converted model computes what its origin does: logits on a fixed input."""

import dataclasses
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpuspec import checkpoint
from tpuspec.config import T5Config
from tpuspec.model_sources import open_source
from tpuspec.programs import teacher_forced_logits
from tpuspec.t5 import T5

# Of the largest logit: float32 leaves rounding in the sums; the others change the weights.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.2}
_ARRAYS = ("input_ids", "attention_mask", "decoder_input_ids", "logits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Attributes:
      against: what was compared with.
      positions: decoder positions compared, each over all ids.
      largest_difference: of two logits, in absolute terms.
      row, position, token: where.
      largest_logit: the scale of it.
      same_argmax: share of positions whose likeliest id is the same.
      tolerance: what ``largest_difference / largest_logit`` may be.
    """

    against: str
    positions: int
    largest_difference: float
    row: int
    position: int
    token: int
    largest_logit: float
    same_argmax: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.largest_difference <= self.tolerance * self.largest_logit

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"passed": self.passed}


def check(directory: str | os.PathLike[str], expected: str | os.PathLike[str], *,
          tolerance: float | None = None) -> CheckReport:
    """Compares a checkpoint with stored logits or with another source, in float32.

    One model is in memory at a time, with four bytes for each parameter.

    Args:
      expected: an .npz file with ``input_ids`` and ``attention_mask`` [B, S],
        ``decoder_input_ids`` [B, T] and ``logits`` [B, T, V]; or a directory that
        ``open_source`` knows, which then gets an input made here.
      tolerance: None means that of the dtype of the checkpoint's weights.

    Raises:
      ValueError: expected is neither, or the two models cannot be compared.
    """
    found = checkpoint.describe(directory)
    stored = Path(expected).expanduser()
    if stored.is_file():
        arrays = _read(stored, found.config)
    else:
        origin = open_source(stored)
        if origin.config.vocab_size != found.config.vocab_size:
            raise ValueError(f"vocab_size must be {found.config.vocab_size} to compare with "
                             f"{stored}, got {origin.config.vocab_size}")
        arrays = _inputs(found.config)
        arrays["logits"] = _logits(origin.load(dtype=jnp.float32).model, arrays)
    ours = _logits(checkpoint.load(directory, dtype=jnp.dtype(jnp.float32)).model, arrays)
    theirs = arrays["logits"]
    if ours.shape != theirs.shape:
        raise ValueError(f"logits in {stored} must be {list(ours.shape)}, got "
                         f"{list(theirs.shape)}")
    difference = np.abs(ours - theirs)
    difference[np.isnan(difference)] = np.inf
    row, position, token = (int(i) for i in np.unravel_index(difference.argmax(), ours.shape))
    kind = found.dtype if found.config.quantization is None else str(found.config.quantization)
    return CheckReport(
        against=str(stored), positions=ours.shape[0] * ours.shape[1],
        largest_difference=float(difference.max()), row=row, position=position, token=token,
        largest_logit=float(np.abs(theirs).max()),
        same_argmax=float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
        tolerance=TOLERANCES[kind] if tolerance is None else tolerance)


def _read(file: Path, config: T5Config) -> dict[str, np.ndarray]:
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in _ARRAYS}
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{file} holds no expectation: {error}") from error
    for name in ("input_ids", "decoder_input_ids"):
        if arrays[name].max() >= config.vocab_size:
            raise ValueError(f"{name} in {file} must be below {config.vocab_size}, got "
                             f"{arrays[name].max()}")
    return arrays


def _inputs(config: T5Config) -> dict[str, np.ndarray]:
    """Two sources of different length and a made-up target for each; the same every time."""
    rng = np.random.default_rng(0)
    lengths, source, target = np.array([24, 9]), 24, 16
    ids = rng.integers(3, config.vocab_size, (2, source))
    mask = np.arange(source)[None] < lengths[:, None]
    ids = np.where(mask, ids, config.pad_token_id)
    ids[np.arange(2), lengths - 1] = config.eos_token_id
    decoder = rng.integers(3, config.vocab_size, (2, target))
    decoder[:, 0] = config.decoder_start_token_id
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder}


def _logits(model: T5, arrays: dict[str, np.ndarray]) -> np.ndarray:
    source, lengths, target = (jnp.asarray(array, jnp.int32) for array in (
        arrays["input_ids"], arrays["attention_mask"].sum(1), arrays["decoder_input_ids"]))
    with jax.default_matmul_precision("highest"):
        return np.asarray(teacher_forced_logits(*nnx.split(model), source, lengths, target))
