"""Every layout that people have, told apart by looking, gives the same model; what is
damaged or ambiguous is refused by name."""

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest
from foreign_checkpoints import (
    nested,
    packed,
    pickled,
    t5x_arrays,
    write_shards,
    write_t5x,
    write_t5x_orbax,
    write_torch_old,
    write_torch_zip,
)
from programmable import rand, tensors_of, write_huggingface
from safetensors.numpy import save_file
from test_checkpoint import assert_same

from tpuspec import checkpoint
from tpuspec.config import Activation
from tpuspec.model_sources import open_source
from tpuspec.presets import preset
from tpuspec.t5 import T5

TINY = dict(d_model=16, layers=1, num_decoder_layers=2)
WO = "encoder.block.0.layer.1.DenseReluDense.wo.weight"


@pytest.fixture(scope="module")
def model() -> T5:
    return rand(**TINY)


@pytest.fixture(scope="module")
def per_layer() -> T5:
    return rand(per_layer_relative_bias=True, **TINY)


def torch_directory(path: Path, model: T5, write: Callable[[Path, Mapping], None],
                    tensors: Mapping[str, np.ndarray] | None = None) -> Path:
    write_huggingface(path, model)
    (path / "model.safetensors").unlink()
    write(path / "pytorch_model.bin", tensors or tensors_of(model))
    return path


@pytest.mark.parametrize("write", [write_torch_zip, write_torch_old])
def test_pytorch_files_load_without_pytorch(model, tmp_path, write):
    tensors = tensors_of(model)
    tensors[WO] = np.asfortranarray(tensors[WO])  # a transposed view of its storage
    # PyTorch saves the embedding under each of its names, and stores it once.
    tensors |= {f"{stack}.embed_tokens.weight": tensors["shared.weight"]
                for stack in ("encoder", "decoder")}
    path = torch_directory(tmp_path / "hf", model, write, tensors)
    assert_same(open_source(path).load().model, model)
    halves = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
    write(path / "pytorch_model.bin", halves)
    loaded = open_source(path).load().model
    for name, array in tensors_of(loaded).items():
        np.testing.assert_array_equal(array, halves[name])


def test_pytorch_shards_load(model, tmp_path):
    path = torch_directory(tmp_path / "hf", model, lambda file, tensors: write_shards(
        file.parent, tensors, write_torch_zip, file.name))
    assert_same(open_source(path).load().model, model)
    shard = next(path.glob("*-00002-of-00002.bin"))
    shard.write_bytes(shard.read_bytes()[:-400])
    with pytest.raises(ValueError, match="pytorch_model-00002-of-00002.bin cannot be read"):
        open_source(path)


def test_a_pickle_that_would_run_a_program_is_refused_and_does_not_run(model, tmp_path):
    path = torch_directory(tmp_path / "hf", model, write_torch_zip)
    for module, name in (("os", "system"), ("builtins", "eval"), ("torch", "load"),
                         ("torch._utils", "_rebuild_from_type")):
        program = f"c{module}\n{name}\n(V{tmp_path / 'ran'}\ntR.".encode()
        for write in (write_torch_zip, lambda file, *_, program: file.write_bytes(program)):
            write(path / "pytorch_model.bin", {"a": np.ones(3, np.float32)}, program=program)
            with pytest.raises(ValueError, match=rf"it wants to call {module}\.{name}"):
                open_source(path)
    assert not (tmp_path / "ran").exists()


def test_pickles_of_other_things_and_impossible_tensors_are_refused(model, tmp_path):
    path = torch_directory(tmp_path / "hf", model, write_torch_zip)
    file, one = path / "pytorch_model.bin", {"a": np.ones((3, 2), np.float32)}
    for program, told in ((pickle.dumps([1]), "holds a list, not a dictionary"),
                          (pickle.dumps({"a": 5}), "a is a int, not a tensor")):
        write_torch_zip(file, one, program=program)
        with pytest.raises(ValueError, match=told):
            open_source(path)
    content, _ = pickled(one)
    beyond = content.replace(b"K\x03K\x02\x86", b"K\x04K\x02\x86", 1)  # the shape (4, 2)
    assert beyond != content
    write_torch_zip(file, one, program=beyond)
    with pytest.raises(ValueError, match="a reaches beyond its storage"):
        open_source(path)
    write_torch_zip(file, {"a": np.ones(3, np.int64)})
    with pytest.raises(ValueError, match="a is stored as int64"):
        open_source(path)


@pytest.mark.parametrize("form", ["joined", "split", "scanned", "scanned_joined"])
def test_every_form_of_t5x_gives_the_same_weights(model, per_layer, tmp_path, form):
    made = per_layer if form.startswith("scanned") else model
    source = open_source(write_t5x(tmp_path / "checkpoint_1000", t5x_arrays(made, form)))
    assert source.layout == "t5x"
    loaded = source.load()
    assert loaded.config == made.config
    assert_same(loaded.model, made)


@pytest.mark.parametrize("ocdbt", [False, True])
def test_t5x_saved_by_orbax_gives_the_same_weights(per_layer, tmp_path, ocdbt):
    arrays = t5x_arrays(per_layer, "scanned")
    write_t5x_orbax(tmp_path / "checkpoint_1000" / "state", arrays, ocdbt=ocdbt)
    source = open_source(tmp_path / "checkpoint_1000")
    assert source.layout == "t5x-orbax"
    assert_same(source.load().model, per_layer)


def test_t5x_of_before_2021_and_in_bfloat16_is_read(tmp_path):
    model = rand(activation=Activation.RELU, tie_word_embeddings=True, **TINY)
    arrays = {name: array.astype(ml_dtypes.bfloat16)
              for name, array in t5x_arrays(model, "joined").items()}
    loaded = open_source(write_t5x(tmp_path / "old", arrays, old_specs=True)).load()
    assert loaded.config == model.config
    for name, array in tensors_of(loaded.model).items():
        assert array.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(array, tensors_of(model)[name].astype(ml_dtypes.bfloat16))


def test_what_older_orbax_and_plain_flax_put_into_their_file_is_read(model, tmp_path):
    arrays = t5x_arrays(model, "joined")
    path = write_t5x(tmp_path / "orbax", arrays, inline=0)
    placeholders = {name: f"PLACEHOLDER://target.{name}" for name in arrays}
    (path / "checkpoint").write_bytes(msgpack.packb({"target": nested(placeholders), "step": 7}))
    assert_same(open_source(path).load().model, model)
    inline = {name: packed(array) for name, array in arrays.items()}
    name = "token_embedder.embedding"  # as flax takes apart what is larger than 1 GiB
    halves = np.array_split(arrays[name].ravel(), 2)
    inline[name] = {"__msgpack_chunked_array__": True,
                    "shape": {str(i): n for i, n in enumerate(arrays[name].shape)},
                    "chunks": {str(i): packed(half) for i, half in enumerate(halves)}}
    path = tmp_path / "flax"
    path.mkdir()
    (path / "checkpoint").write_bytes(msgpack.packb({"params": nested(inline)}))
    assert_same(open_source(path).load().model, model)
    inline[name] = msgpack.ExtType(1, msgpack.packb(((3,), "float32", b"")))
    (path / "checkpoint").write_bytes(msgpack.packb({"params": nested(inline)}))
    with pytest.raises(ValueError, match=r"an array \[3\] of float32 has 0 bytes"):
        open_source(path)
    inline[name] = 5
    (path / "checkpoint").write_bytes(msgpack.packb({"params": nested(inline)}))
    with pytest.raises(ValueError, match="token_embedder.embedding is a int, not an array"):
        open_source(path)


def test_what_shapes_do_not_tell_comes_from_the_public_model_of_these_shapes(model, tmp_path):
    from tpuspec.presets import same_shapes

    for name in ("ul2", "madlad400-3b", "t5-v1_1-small", "umt5-small"):
        public = preset(name)
        found = same_shapes(public)
        assert name in found
        assert {(p.activation, p.eos_token_id) for p in found.values()} == {
            (public.activation, public.eos_token_id)}
    path = write_t5x(tmp_path / "t5x", t5x_arrays(model, "joined"))
    assert "the gate is taken to be gated-gelu" in open_source(path).guesses
    told = open_source(path, activation=Activation.GATED_SILU)
    assert told.config.activation == Activation.GATED_SILU
    assert "gate" not in str(told.guesses)
    with pytest.raises(ValueError, match="activation must be gated for the tensors"):
        open_source(path, activation=Activation.RELU)


def test_a_layer_that_t5x_lacks_is_named(model, tmp_path):
    arrays = t5x_arrays(model, "joined")
    lost = {n: a for n, a in arrays.items() if n != "decoder.layers_0.mlp.wi_1.kernel"}
    with pytest.raises(ValueError, match=r"missing decoder.layers_0.mlp.wi_1.kernel \[16, 32\]"):
        open_source(write_t5x(tmp_path / "lost", lost))
    more = arrays | {"decoder.layers_2.mlp.wo.kernel": np.zeros((32, 16), np.float32)}
    with pytest.raises(ValueError, match="missing decoder.layers_2.encoder_decoder_attention"):
        open_source(write_t5x(tmp_path / "more", more))
    turned = arrays | {"encoder.layers_0.mlp.wi_0.kernel": np.zeros((32, 16), np.float32),
                       "encoder.stray": np.zeros(3, np.float32)}
    with pytest.raises(ValueError) as error:
        open_source(write_t5x(tmp_path / "turned", turned))
    assert "misshaped encoder.layers_0.mlp.wi_0.kernel: [32, 16], wanted [16, 32]" in str(
        error.value)
    assert "unexpected encoder.stray [3]" in str(error.value)
    with pytest.raises(ValueError, match="missing token_embedder.embedding, from which"):
        open_source(write_t5x(tmp_path / "bare", {"encoder.encoder_norm.scale": np.ones(4)}))


def test_a_t5x_download_that_lacks_a_file_does_not_read_as_zeros(model, tmp_path):
    path = write_t5x(tmp_path / "t5x", t5x_arrays(model, "joined"))
    (path / "target.token_embedder.embedding" / "1.1").unlink()
    source = open_source(path)
    with pytest.raises(ValueError, match="token_embedder.embedding cannot be read: .*is missing"):
        source.load()
    shutil.rmtree(path / "target.decoder.layers_1.mlp.wo.kernel")
    with pytest.raises(ValueError, match="decoder.layers_1.mlp.wo.kernel cannot be read"):
        open_source(path)
    content = (path / "checkpoint").read_bytes()
    (path / "checkpoint").write_bytes(content[:-100])
    with pytest.raises(ValueError, match="checkpoint cannot be read"):
        open_source(path)


def test_other_checkpoints_of_google_are_refused_by_name(model, tmp_path):
    arrays = t5x_arrays(model, "joined")
    mesh = tmp_path / "mesh"
    mesh.mkdir()
    (mesh / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1000000"\n')
    with pytest.raises(ValueError, match=r"is a TensorFlow \(Mesh\) checkpoint"):
        open_source(mesh)
    with pytest.raises(ValueError, match="T5X's version 1; supported are 2 and 3"):
        open_source(write_t5x(tmp_path / "first", arrays, version=1))
    norm = "encoder.encoder_norm.scale"
    halves = arrays | {"encoder.encoder_norm.scale": np.ones(16, np.uint16)}
    with pytest.raises(ValueError, match=f"{norm} is stored as uint16 .T5X before 2022"):
        open_source(write_t5x(tmp_path / "halves", halves, inline=0))
    outside = write_t5x(tmp_path / "outside", {})
    (outside / "checkpoint").write_bytes(msgpack.packb({"version": 3, "optimizer": {"target": {
        "a": {"driver": "zarr", "metadata": {}, "kvstore": {"path": "../first/target.x"}}}}}))
    with pytest.raises(ValueError, match="a is said to lie at ../first/target.x, outside of"):
        open_source(outside)
    other = tmp_path / "other"
    other.mkdir()
    (other / "checkpoint").write_bytes(msgpack.packb({"weights": {}}))
    with pytest.raises(ValueError, match=r"holds no model: its keys are \['weights'\]"):
        open_source(other)


def test_two_candidates_for_one_role_are_refused(model, tmp_path):
    path = write_huggingface(tmp_path / "hf", model)
    write_shards(path, tensors_of(model), lambda file, tensors: save_file(
        {n: np.ascontiguousarray(a) for n, a in tensors.items()}, file), "model.safetensors")
    with pytest.raises(ValueError, match="two candidates for its weights: model.safetensors and"):
        open_source(path)
    (path / "model.safetensors").unlink()
    assert_same(open_source(path).load().model, model)
    write_t5x_orbax(tmp_path / "t5x", t5x_arrays(model, "joined"), ocdbt=False)
    shutil.copy(path / "config.json", tmp_path / "t5x")
    with pytest.raises(ValueError, match="looks like several things: Hugging Face's layout"):
        open_source(tmp_path / "t5x")


def test_the_wrong_level_gets_a_hint(model, tmp_path):
    (tmp_path / "models").mkdir()
    write_huggingface(tmp_path / "models" / "hf", model)
    write_t5x(tmp_path / "models" / "checkpoint_7", t5x_arrays(model, "joined"))
    with pytest.raises(ValueError, match="did you mean .*checkpoint_7 or .*hf"):
        open_source(tmp_path / "models")
    checkpoint.save(tmp_path / "made", model, None)
    with pytest.raises(ValueError, match="tpuspec convert makes a checkpoint of it"):
        checkpoint.load(tmp_path / "models" / "checkpoint_7")
    for path, told in ((tmp_path / "gone", "does not exist"),
                       (tmp_path / "made" / "weights", f"did you mean {tmp_path / 'made'}"),
                       (tmp_path / "models" / "hf" / "config.json", "it is a file")):
        with pytest.raises(ValueError, match=told):
            open_source(path)


def test_float16_needs_a_cast_whatever_holds_it(model, tmp_path):
    halves = {name: array.astype(np.float16) for name, array in tensors_of(model).items()}
    source = open_source(torch_directory(tmp_path / "hf", model, write_torch_zip, halves))
    with pytest.raises(ValueError, match="ask for dtype float32 or bfloat16"):
        source.load()
    assert source.load(dtype=jnp.float32).model.embedding.dtype == jnp.float32


def test_safetensors_headers_that_lie_are_refused(model, tmp_path):
    path = write_huggingface(tmp_path / "hf", model)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:8 + length])
    for change, told in (({"data_offsets": [0, 7]}, "cannot lie in bytes 0 to 7"),
                         ({"data_offsets": [0]}, "cannot be read"),
                         ({"shape": [1 << 40]}, "cannot lie in bytes")):
        changed = json.dumps(header | {WO: header[WO] | change}).encode()
        file.write_bytes(len(changed).to_bytes(8, "little") + changed + whole[8 + length:])
        with pytest.raises(ValueError, match=told):
            open_source(path)
    for content in (b"", b"\xff" * 20, whole[:50]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="model.safetensors cannot be read"):
            open_source(path)
