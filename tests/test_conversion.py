"""Conversion tensor by tensor: little memory, resumable, whole or not there at all."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from foreign_checkpoints import t5x_arrays, write_t5x
from programmable import rand, tensors_of, write_huggingface
from test_checkpoint import assert_same, weights
from tiny_vocabularies import uni_vocabulary

from tpuspec import checkpoint, checkpoint_writer, conversion
from tpuspec.config import Quantization
from tpuspec.model_sources import open_source
from tpuspec.quantization import quantize
from tpuspec.t5 import T5

TINY = dict(d_model=16, layers=1, num_decoder_layers=2)


@pytest.fixture(scope="module")
def model() -> T5:
    return rand(**TINY)


@pytest.fixture
def hf(model, tmp_path) -> Path:
    return write_huggingface(tmp_path / "hf", model)


def unfinished(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if ".unfinished-" in path.name]


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """As if these arrays were large: several chunks and transactions for each."""
    monkeypatch.setattr(checkpoint_writer, "_CHUNK", 8)
    monkeypatch.setattr(checkpoint_writer, "_BLOCK_BYTES", 600)


def test_a_converted_checkpoint_is_the_model_in_blocks_too(model, hf, tmp_path, small_blocks):
    seen: list[tuple[int, int]] = []
    conversion.convert(open_source(hf), tmp_path / "made",
                       progress=lambda done, total: seen.append((done, total)))
    loaded = checkpoint.load(tmp_path / "made", verify=True)
    assert_same(loaded.model, model)
    assert loaded.provenance == {"imported_from": "hf", "layout": "huggingface"}
    total = sum(array.nbytes for array in weights(model).values())
    assert seen[0] == (0, total) and seen[-1] == (total, total) and seen == sorted(seen)
    assert not unfinished(tmp_path)


def test_orbax_restores_what_is_written(model, hf, tmp_path):
    """With its own means alone: the layout is Orbax's, not one that only we read."""
    conversion.convert(open_source(hf), tmp_path / "made")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.restore(tmp_path / "made" / "weights")
    np.testing.assert_array_equal(tree["embedding"], weights(model)["embedding"])
    np.testing.assert_array_equal(tree["decoder_layers"]["1"]["cross_attention"]["kv"]["weight"],
                                  weights(model)["decoder_layers.1.cross_attention.kv.weight"])


def test_scanned_tensors_are_read_once_for_all_layers(tmp_path):
    model = rand(d_model=16, layers=3, per_layer_relative_bias=True)
    source = open_source(write_t5x(tmp_path / "t5x", t5x_arrays(model, "scanned")))
    names = [name for name, _ in source.pieces()]
    assert len(names) == len(set(names)) == len(source.tensors)
    conversion.convert(source, tmp_path / "made")
    assert_same(checkpoint.load(tmp_path / "made").model, model)


def test_int8_is_what_quantizing_the_loaded_model_gives(model, hf, tmp_path, small_blocks):
    conversion.convert(open_source(hf), tmp_path / "made", dtype="bfloat16",
                       quantization=Quantization.INT8)
    whole = open_source(hf).load(dtype=jnp.bfloat16).model
    assert_same(checkpoint.load(tmp_path / "made").model, quantize(whole))
    source = open_source(tmp_path / "made")
    conversion.convert(source, tmp_path / "copy")
    assert_same(checkpoint.load(tmp_path / "copy").model, quantize(whole))
    with pytest.raises(ValueError, match="the weights are int8 already"):
        conversion.convert(source, tmp_path / "again", quantization=Quantization.INT8)


def test_a_killed_conversion_goes_on_where_it_was(model, hf, tmp_path):
    script = f"""
import os, signal
from tpuspec import checkpoint_writer, conversion
from tpuspec.model_sources import open_source
checkpoint_writer._CHUNK, checkpoint_writer._BLOCK_BYTES = 8, 600
def progress(done, total):
    if done > total / 2: os.kill(os.getpid(), signal.SIGKILL)
conversion.convert(open_source({str(hf)!r}), {str(tmp_path / "made")!r}, progress=progress)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "made").exists()
    rest, = unfinished(tmp_path)
    with pytest.raises(ValueError, match="interrupted save"):
        checkpoint.load(rest)
    with pytest.raises(ValueError, match="does not exist"):
        checkpoint.load(tmp_path / "made")
    journal = rest / "progress.jsonl"
    journal.write_text(journal.read_text() + '["embedding", 0, 0')  # half a line
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, "_CHUNK", 8)
        patch.setattr(checkpoint_writer, "_BLOCK_BYTES", 600)
        conversion.convert(open_source(hf), tmp_path / "made",
                           progress=lambda done, _: seen.append(done))
    assert seen[0] > seen[-1] / 2
    assert_same(checkpoint.load(tmp_path / "made", verify=True).model, model)
    assert not unfinished(tmp_path)


def interrupted(source: Path, out: Path) -> None:
    class Interrupted(Exception):
        pass

    def progress(done: int, total: int) -> None:
        if done > total / 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        conversion.convert(open_source(source), out, progress=progress)


def test_what_another_source_left_behind_is_not_gone_on_with(model, hf, tmp_path, small_blocks):
    interrupted(hf, tmp_path / "made")
    assert unfinished(tmp_path)
    other = rand(1, **TINY)
    (hf / "model.safetensors").unlink()
    (hf / "config.json").unlink()
    hf.rmdir()
    write_huggingface(hf, other)
    seen: list[int] = []
    conversion.convert(open_source(hf), tmp_path / "made",
                       progress=lambda done, _: seen.append(done))
    assert seen[0] == 0
    assert_same(checkpoint.load(tmp_path / "made").model, other)


def test_two_conversions_to_one_name_do_not_meet(hf, tmp_path, small_blocks):
    interrupted(hf, tmp_path / "made")
    rest, = unfinished(tmp_path)
    with (rest / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is writing"):
            conversion.convert(open_source(hf), tmp_path / "made")
    assert (rest / "progress.jsonl").is_file()
    conversion.convert(open_source(hf), tmp_path / "made")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_that_are_not_finite_are_named(model, tmp_path, bad, dtype):
    tensors, name = tensors_of(model), "decoder.block.1.layer.2.DenseReluDense.wo.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = bad
    source = open_source(write_huggingface(tmp_path / "hf", model, tensors))
    with pytest.raises(ValueError, match=f"{name} holds numbers that are not finite"):
        conversion.convert(source, tmp_path / "made", dtype=dtype)
    assert os.listdir(tmp_path) == ["hf"]


def test_a_number_that_overflows_in_the_cast_is_not_finite(model, tmp_path):
    tensors = tensors_of(model)
    tensors["shared.weight"] = tensors["shared.weight"].copy()
    tensors["shared.weight"][0, 0] = np.finfo(np.float32).max  # rounds up in bfloat16
    source = open_source(write_huggingface(tmp_path / "hf", model, tensors))
    with pytest.raises(ValueError, match="shared.weight holds numbers that are not finite"):
        conversion.convert(source, tmp_path / "made", dtype="bfloat16")
    conversion.convert(source, tmp_path / "made")


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(hf, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(checkpoint_writer.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="the weights need .* GiB more and 0.0 GiB are free") as error:
        conversion.convert(open_source(hf), tmp_path / "made")
    assert error.value.errno == errno.ENOSPC
    assert not (tmp_path / "made").exists()


def test_a_changed_array_is_found_by_its_checksum(model, hf, tmp_path):
    conversion.convert(open_source(hf), tmp_path / "made")
    name = "encoder_layers.0.mlp.wo.weight"
    checkpoint.save(tmp_path / "other", rand(1, **TINY), None)
    sums = (tmp_path / "made" / "checksums.json").read_text()
    checkpoint.check_sums(tmp_path / "made")
    changed = json.loads(sums)
    changed["blocks"][name][0][-1] = "0" * 64
    (tmp_path / "made" / "checksums.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=f"{name} in .* is not what was written"):
        checkpoint.load(tmp_path / "made", verify=True)
    assert_same(checkpoint.load(tmp_path / "made").model, model)
    # The weights of another model under these sums.
    (tmp_path / "other" / "checksums.json").write_text(sums)
    with pytest.raises(ValueError, match="is not what was written"):
        checkpoint.check_sums(tmp_path / "other")
    (tmp_path / "made" / "checksums.json").unlink()
    with pytest.raises(ValueError, match="has no checksums.json to compare with"):
        checkpoint.load(tmp_path / "made", verify=True)


def test_the_vocabulary_goes_along(model, hf, tmp_path):
    (hf / "spiece.model").write_bytes(uni_vocabulary()._proto)
    (hf / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 9}))
    conversion.convert(open_source(hf), tmp_path / "made")
    loaded = checkpoint.load(tmp_path / "made")
    assert loaded.vocabulary is not None and loaded.vocabulary.extra_ids == 9
