"""Checkpoints that users bring: ours and those in the Hugging Face layout."""

import functools
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from programmable import count, rand, tensors_of
from programmable import write_huggingface as write
from safetensors.numpy import save_file
from tiny_vocabularies import uni_vocabulary

from tpuspec import checkpoint
from tpuspec.checkpoint import named_parameters
from tpuspec.config import Activation
from tpuspec.huggingface import import_huggingface
from tpuspec.mesh import make_mesh, param_shardings
from tpuspec.t5 import T5

TINY = dict(d_model=16, layers=1, num_decoder_layers=2)


def weights(model: T5) -> dict[str, np.ndarray]:
    return {name: np.asarray(w) for name, w in named_parameters(model).items()}


def assert_same(one: T5, other: T5) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


@pytest.fixture(scope="module")
def model() -> T5:
    return rand(**TINY)


@pytest.fixture
def saved(model, tmp_path) -> Path:
    checkpoint.save(tmp_path / "ckpt", model, uni_vocabulary(7), provenance={"made": "here"})
    return tmp_path / "ckpt"


def test_everything_comes_back_bitwise(model, saved):
    loaded = checkpoint.load(saved)
    assert_same(loaded.model, model)
    assert loaded.config == model.config
    assert loaded.provenance == {"made": "here"}
    assert loaded.vocabulary is not None and loaded.vocabulary.size == 307
    assert loaded.model.lm_head.weight.get_metadata("logical") == ("vocab", "embed")


def test_files_are_few_and_name_no_path_of_this_machine(model, saved, tmp_path):
    files = [f for f in saved.rglob("*") if f.is_file()]
    # Not one for each leaf; how many exactly depends on the timing of the writes.
    assert len(files) < len(weights(model)), files
    for file in files:
        assert str(tmp_path).encode() not in file.read_bytes(), file
    assert os.listdir(tmp_path) == ["ckpt"]


def test_weights_are_cast_on_the_way_to_disk_and_back(model, tmp_path):
    checkpoint.save(tmp_path / "half", model, None, dtype=jnp.bfloat16)
    loaded = checkpoint.load(tmp_path / "half", dtype=jnp.float32).model
    for name, array in weights(model).items():
        np.testing.assert_array_equal(
            weights(loaded)[name], array.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert checkpoint.load(tmp_path / "half").model.embedding.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="overflow in float16"):
        checkpoint.load(tmp_path / "half", dtype=jnp.float16)
    with pytest.raises(ValueError, match="overflow in float16"):
        checkpoint.save(tmp_path / "fp16", model, None, dtype=jnp.float16)


def test_saved_on_one_device_layout_loads_on_another(model, tmp_path):
    def on(data: int, parts: int):
        return functools.partial(param_shardings, mesh=make_mesh(data, parts))

    graph, params = nnx.split(model)
    one, two, four = (None, 1), (on(1, 2), 2), (on(1, 4), 4)
    for name, layout, others in (("four", on(1, 4), (one, two)),
                                 ("two_by_two", on(2, 2), (four,))):
        split = nnx.merge(graph, jax.device_put(params, layout(params, model.config)))
        assert len(split.embedding[...].addressable_shards) == 4
        checkpoint.save(tmp_path / name, split, None)
        for shardings, devices in others:
            loaded = checkpoint.load(tmp_path / name, shardings=shardings).model
            assert len(loaded.embedding[...].sharding.device_set) == devices
            assert_same(loaded, model)


def test_depth_of_another_model_is_refused_by_name(saved):
    stored = json.loads((saved / "model.json").read_text())
    for layers, told in ((1, "unexpected decoder_layers.1.mlp.wo.weight"),
                         (3, r"missing decoder_layers.2.cross_attention.kv.weight \[2, 16, 16\]")):
        stored["model"]["num_decoder_layers"] = layers
        (saved / "model.json").write_text(json.dumps(stored))
        with pytest.raises(ValueError, match=told):
            checkpoint.load(saved)


def test_missing_unexpected_and_misshaped_leaves_are_all_named(model, tmp_path):
    import orbax.checkpoint as ocp

    leaves = weights(model)
    leaves["decoder_layers.0.mlp.wo.weight"] = leaves["decoder_layers.0.mlp.wo.weight"].T
    leaves["decoder_layers.0.mlp.wi_9.weight"] = leaves.pop("decoder_layers.0.mlp.wi.weight")
    checkpoint.save(tmp_path / "bad", model, None)
    shutil.rmtree(tmp_path / "bad" / "weights")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(tmp_path / "bad" / "weights",
                    args=ocp.args.PyTreeSave(checkpoint._nest(leaves)))
    with pytest.raises(ValueError) as error:
        checkpoint.load(tmp_path / "bad")
    for told in ("missing decoder_layers.0.mlp.wi.weight [2, 32, 16]",
                 "unexpected decoder_layers.0.mlp.wi_9.weight [2, 32, 16]",
                 "misshaped decoder_layers.0.mlp.wo.weight: [32, 16], wanted [16, 32]"):
        assert told in str(error.value)


def test_relative_home_and_trailing_slash_paths_load(model, saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    monkeypatch.setenv("HOME", str(saved.parent))
    for path in ("./ckpt", "ckpt/", "~/ckpt"):
        assert checkpoint.find(path) == saved
    checkpoint.save("other/deep/", model, None)
    assert_same(checkpoint.load("other/deep").model, model)


def test_wrong_level_gets_a_hint(saved):
    (saved.parent / "empty").mkdir()
    for path, told in ((saved.parent, f"did you mean {saved}"),
                       (saved / "weights", f"did you mean {saved}"),
                       (saved / "model.json", f"is a file.*did you mean {saved}"),
                       (saved.parent / "empty", "it holds nothing, not model.json"),
                       (saved.parent / "gone", "does not exist")):
        with pytest.raises(ValueError, match=told) as error:
            checkpoint.load(path)
        assert "\n" not in str(error.value)


def test_interrupted_save_leaves_no_checkpoint(model, saved):
    """Killed in the middle: no final name; the rest is refused; the earlier one loads."""
    script = f"""
import os, signal
from programmable import count, rand, tensors_of
from programmable import write_huggingface as write
from tpuspec import checkpoint
class Killed:
    def save(self, directory): os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save({str(saved.parent / "next")!r}, rand(**{TINY!r}), Killed())
"""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path},
                          capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    rest = [p for p in saved.parent.iterdir() if p != saved]
    assert len(rest) == 1 and rest[0].name != "next"
    with pytest.raises(ValueError, match="interrupted save"):
        checkpoint.load(rest[0])
    with pytest.raises(ValueError, match="does not exist"):
        checkpoint.load(saved.parent / "next")
    assert_same(checkpoint.load(saved).model, model)


def test_failed_save_is_an_error_and_leaves_nothing(model, saved):
    class FullDisk:
        def save(self, directory):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(saved.parent / "next", model, FullDisk())
    (saved.parent / "file").write_text("")
    with pytest.raises(OSError):
        checkpoint.save(saved.parent / "file" / "next", model, None)
    with pytest.raises(ValueError, match="exists already"):
        checkpoint.save(saved, model, None)
    assert sorted(os.listdir(saved.parent)) == ["ckpt", "file"]


def test_weights_cut_short_are_refused(saved):
    (saved / "weights" / "_METADATA").unlink()
    with pytest.raises(ValueError, match="missing or unfinished"):
        checkpoint.load(saved)


# The Hugging Face layout.


@pytest.mark.parametrize("changes", [
    {}, {"activation": Activation.RELU, "tie_word_embeddings": True},
    {"activation": Activation.GATED_SILU, "per_layer_relative_bias": True}])
def test_imported_weights_are_bitwise_the_same(tmp_path, changes):
    model = rand(**TINY, **changes)
    loaded = import_huggingface(write(tmp_path / "hf", model, tensors_of(model)))
    assert loaded.config == model.config
    assert_same(loaded.model, model)


def test_programmable_models_load_the_normal_way(tmp_path):
    model = count({5: 1})
    assert_same(import_huggingface(write(tmp_path / "hf", model)).model, model)


def test_the_embedding_is_found_under_each_of_its_names(model, tmp_path):
    tensors = tensors_of(model)
    shared = tensors.pop("shared.weight")
    both = {f"{stack}.embed_tokens.weight": shared for stack in ("encoder", "decoder")}
    for name, extra in (("shared", {"shared.weight": shared}), ("both", both),
                        ("all", both | {"shared.weight": shared})):
        assert_same(import_huggingface(write(tmp_path / name, model, tensors | extra)).model,
                    model)
    with pytest.raises(ValueError, match="the embedding is missing: there is none of shared"):
        import_huggingface(write(tmp_path / "none", model, tensors))
    with pytest.raises(ValueError, match="shared.weight and decoder.embed_tokens.weight differ"):
        import_huggingface(write(tmp_path / "two", model, tensors | {
            "shared.weight": shared, "decoder.embed_tokens.weight": 2 * shared}))


def test_a_missing_head_is_not_filled_from_the_embedding(model, tmp_path):
    tensors = tensors_of(model)
    head = tensors.pop("lm_head.weight")
    with pytest.raises(ValueError, match="lm_head.weight is missing"):
        import_huggingface(write(tmp_path / "untied", model, tensors))
    with pytest.raises(ValueError, match="lm_head.weight and shared.weight differ"):
        import_huggingface(write(tmp_path / "tied", model, tensors | {"lm_head.weight": head},
                                 tie_word_embeddings=True))
    # transformers 5 writes true for every T5; there the file decides.
    five = write(tmp_path / "five", model, tensors | {"lm_head.weight": head},
                 tie_word_embeddings=True, transformers_version="5.1.0",
                 scale_decoder_outputs=False)
    assert_same(import_huggingface(five).model, model)


def test_missing_unexpected_and_misshaped_tensors_are_named(model, tmp_path):
    tensors = tensors_of(model)
    wo = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    tensors["surprise"] = np.zeros((2, 3), np.float32)
    tensors[wo] = tensors[wo].T
    del tensors["decoder.final_layer_norm.weight"]
    with pytest.raises(ValueError) as error:
        import_huggingface(write(tmp_path / "hf", model, tensors))
    for told in ("unexpected surprise [2, 3]", f"misshaped {wo}: [32, 16], wanted [16, 32]",
                 "missing decoder.final_layer_norm.weight [16]"):
        assert told in str(error.value)


def test_bfloat16_and_float16_files_load_without_torch(model, tmp_path):
    bf16 = {k: v.astype(ml_dtypes.bfloat16) for k, v in tensors_of(model).items()}
    loaded = import_huggingface(write(tmp_path / "bf16", model, bf16)).model
    for name, array in tensors_of(loaded).items():
        np.testing.assert_array_equal(array, bf16[name])
    f16 = {k: v.astype(np.float16) for k, v in tensors_of(model).items()}
    path = write(tmp_path / "f16", model, f16)
    with pytest.raises(ValueError, match="ask for dtype float32 or bfloat16"):
        import_huggingface(path)
    loaded = import_huggingface(path, dtype=jnp.float32).model
    for name, array in tensors_of(loaded).items():
        np.testing.assert_array_equal(array, f16[name].astype(np.float32))
    assert "torch" not in sys.modules


def test_eight_bit_tensors_are_refused_by_name(model, tmp_path):
    wo = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    for dtype, told in ((ml_dtypes.float8_e4m3fn, "F8_E4M3"), (np.int8, "I8")):
        tensors = tensors_of(model)
        tensors[wo] = tensors[wo].astype(dtype)
        with pytest.raises(ValueError, match=f"{wo} is stored as {told}"):
            import_huggingface(write(tmp_path / told, model, tensors))


def test_shards_with_an_index_load(model, tmp_path):
    tensors = tensors_of(model)
    path = write(tmp_path / "hf", model, tensors)
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, inside in parts.items():
        save_file({n: np.ascontiguousarray(tensors[n]) for n in inside}, path / file)
    index = {n: file for file, inside in parts.items() for n in inside}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same(import_huggingface(path).model, model)
    (path / "b.safetensors").write_bytes((path / "b.safetensors").read_bytes()[:-5])
    with pytest.raises(ValueError, match="b.safetensors cannot be read"):
        import_huggingface(path)
    (path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match="b.safetensors cannot be read"):
        import_huggingface(path)


def test_contradicting_activation_fields_are_warned_about(model, tmp_path):
    """Every gated GELU is the tanh form, whatever a redundant field calls it."""
    tensors = tensors_of(model)

    def activation(name: str, **changes) -> Activation:
        return import_huggingface(write(tmp_path / name, model, tensors, **changes)
                                  ).config.activation

    plain = {"dense_act_fn": "gelu_new", "is_gated_act": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert activation("plain", **plain) == Activation.GATED_GELU
        assert activation("absent", feed_forward_proj=None, **plain) == Activation.GATED_GELU
        assert activation("silu", feed_forward_proj="gated-silu") == Activation.GATED_SILU
    for i, changes in enumerate(({"dense_act_fn": "gelu"}, {"is_gated_act": False},
                                 {"feed_forward_proj": "gelu", "is_gated_act": True})):
        with pytest.warns(UserWarning, match="contradict"):
            assert activation(f"contradiction{i}", **changes) == Activation.GATED_GELU
    for bad in ("foo", "gelu"):
        with pytest.raises(ValueError, match=f"feed_forward_proj must be one of .*got {bad}"):
            activation(bad, feed_forward_proj=bad)


def test_other_model_types_and_layouts_are_refused(model, saved, tmp_path):
    hf = write(tmp_path / "hf", model, tensors_of(model), model_type="bart")
    with pytest.raises(ValueError, match="model_type must be one of t5, mt5, umt5, got bart"):
        import_huggingface(hf)
    with pytest.raises(ValueError, match="tpuspec convert makes a checkpoint of it"):
        checkpoint.load(hf)
    with pytest.raises(ValueError, match="no config.json"):
        import_huggingface(saved)
