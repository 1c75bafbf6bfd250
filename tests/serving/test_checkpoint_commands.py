"""``tpuspec convert`` and ``inspect``, from outside."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foreign_checkpoints import t5x_arrays, write_t5x
from harness import run_cli
from programmable import rand
from tiny_vocabularies import uni

from tpuspec import checkpoint
from tpuspec.config import EngineConfig
from tpuspec.conversion_check import check
from tpuspec.huggingface import import_huggingface
from tpuspec.quantization import quantize
from tpuspec.serving import convert, inspect, models
from tpuspec.serving.cli import make_parser

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def test_a_converted_checkpoint_is_inspected_and_loads(tmp_path):
    source = next(path for path in sorted(GOLDEN.iterdir()) if (path / "config.json").is_file())
    made = run_cli("convert", str(source), str(tmp_path / "made"), "--dtype", "bfloat16")
    assert made.returncode == 0, made.stderr
    assert "has no vocabulary" in made.stderr
    loaded = checkpoint.load(tmp_path / "made")
    assert loaded.model.embedding[...].dtype == jnp.bfloat16
    facts = json.loads(run_cli("inspect", str(tmp_path / "made"), "--json").stdout)
    count = sum(w.size for w in checkpoint.named_parameters(loaded.model).values())
    assert (facts["parameters"], facts["bytes_on_device"]) == (count, 2 * count)
    assert facts["model"] == loaded.config.to_json()
    assert facts["provenance"]["imported_from"] == source.name
    again = run_cli("convert", str(source), str(tmp_path / "made"))
    assert again.returncode == 1 and "exists already" in again.stderr


def converted(source: pathlib.Path, out: pathlib.Path, *flags: str) -> pathlib.Path:
    assert convert.run(make_parser().parse_args(["convert", str(source), str(out), *flags])) == 0
    return out


def assert_same(found: list[jax.Array], wanted: list[jax.Array]) -> None:
    assert [(a.shape, a.dtype) for a in found] == [(a.shape, a.dtype) for a in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_convert_quantizes_what_it_reads_from_either_layout(tiny_pair, tmp_path, capsys):
    for read, source in ((checkpoint.load, tiny_pair / "target"),
                         (import_huggingface, GOLDEN / "t5_v1_1")):
        whole = read(source, dtype=jnp.bfloat16)
        made = converted(source, tmp_path / source.name, "--dtype", "bfloat16",
                         "--quantize", "int8")
        small = checkpoint.load(made)
        assert_same(jax.tree.leaves(checkpoint.named_parameters(small.model)),
                    jax.tree.leaves(checkpoint.named_parameters(quantize(whole.model))))
        assert (small.vocabulary is None) == (whole.vocabulary is None)
        capsys.readouterr()
        args = make_parser().parse_args(["inspect", str(made), "--json"])
        assert inspect.run(args) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["quantization"], facts["dtype"]) == ("int8", "bfloat16")
        weights = checkpoint.named_parameters(small.model).values()
        assert facts["bytes_on_device"] == sum(w.nbytes for w in weights)
        assert facts["parameters"] == sum(
            w.size for w in checkpoint.named_parameters(whole.model).values())
        assert facts["provenance"] == {"quantized_from": whole.provenance}
    with pytest.raises(ValueError, match="the weights are int8 already"):
        converted(made, tmp_path / "again", "--quantize", "int8")
    assert not (tmp_path / "again").exists()


def test_int8_checkpoints_are_served_and_others_quantized_while_loading(tiny_pair, tmp_path):
    config = EngineConfig(slots=1, source_buckets=(8,), max_target_length=4, draft_lengths=(0, 1),
                          draft_length=1)
    made = converted(tiny_pair / "target", tmp_path / "made", "--quantize", "int8")
    whole = models.Pair(target=tiny_pair / "target", draft=tiny_pair / "draft")
    stored = models.load(models.Pair(target=made, draft=whole.draft), config)
    loading = models.load(whole, config, dtype="int8")
    for served in (stored, loading):
        assert json.loads(served.info.target_config_json)["quantization"] == "int8"
        assert json.loads(served.info.draft_config_json)["quantization"] is None
    assert_same(stored.engine._weights[0], loading.engine._weights[0])
    assert {w.dtype.name for w in stored.engine._weights[0]} == {"int8", "float32"}
    sharded = models.load(models.Pair(target=made, draft=whole.draft), config, dtype="int8",
                          mesh_shape=(1, 2))
    assert_same(sharded.engine._weights[0], loading.engine._weights[0])
    assert_same(sharded.engine._weights[1], loading.engine._weights[1])


@pytest.mark.parametrize("family", ["t5_v1_0", "umt5"])
def test_a_conversion_is_checked_against_stored_logits(tmp_path, capsys, family):
    source = GOLDEN / family
    converted(source, tmp_path / "made", "--check", str(source / "expected.npz"), "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and report["positions"] == 120 and report["same_argmax"] > 0.99
    assert 0 < report["largest_difference"] < 1e-4 * report["largest_logit"]


def test_a_conversion_is_checked_against_another_source(tiny_pair, tmp_path, capsys):
    source = tiny_pair / "target"
    converted(source, tmp_path / "same", "--check", str(source))
    told = capsys.readouterr().out
    assert told.startswith("agrees with") and "difference of two logits is 0 (" in told
    converted(source, tmp_path / "int8", "--quantize", "int8", "--check", str(source), "--json")
    report = json.loads(capsys.readouterr().out)
    assert 0 < report["largest_difference"] < 0.2 * report["largest_logit"]
    other = tmp_path / "other"
    model = checkpoint.load(source).model
    model.encoder_norm.weight[...] = 2 * model.encoder_norm.weight[...]
    checkpoint.save(other, model, None)
    args = ["convert", str(source), str(tmp_path / "bad"), "--check", str(other)]
    assert convert.run(make_parser().parse_args(args)) == 1
    assert capsys.readouterr().out.startswith("DOES NOT AGREE with")
    assert not check(tmp_path / "int8", source, tolerance=1e-6).passed


def test_an_expectation_that_cannot_be_compared_is_refused(tiny_pair, tmp_path):
    made = tiny_pair / "target"
    np.savez(tmp_path / "half.npz", input_ids=np.zeros((1, 3), np.int32))
    (tmp_path / "text.npz").write_text("no arrays")
    with np.load(GOLDEN / "t5_v1_1" / "expected.npz") as stored:
        arrays = dict(stored)
    np.savez(tmp_path / "ids.npz", **arrays | {"input_ids": arrays["input_ids"] + 10_000})
    small = {name: arrays[name] % 320 for name in ("input_ids", "decoder_input_ids")}
    np.savez(tmp_path / "width.npz", **arrays | small | {"logits": arrays["logits"][..., :5]})
    for name, told in (("half", "holds no expectation: .*attention_mask"),
                       ("text", "holds no expectation"),
                       ("ids", "input_ids in .* must be below 320, got 1"),
                       ("width", r"must be \[3, 40, 320\], got \[3, 40, 5\]")):
        with pytest.raises(ValueError, match=told):
            check(made, tmp_path / f"{name}.npz")
    with pytest.raises(ValueError, match="vocab_size must be 320 to compare with"):
        check(made, GOLDEN / "mt5")


def test_t5x_is_converted_with_the_vocabulary_that_is_named(tmp_path, capsys):
    model = rand(d_model=16, layers=1, vocab=320)
    source = write_t5x(tmp_path / "t5x", t5x_arrays(model, "joined"))
    (tmp_path / "sp.model").write_bytes(uni())
    made = converted(source, tmp_path / "made", "--vocabulary", str(tmp_path / "sp.model"),
                     "--activation", "gated-silu")
    err = capsys.readouterr().err
    assert "no public model has these shapes" in err and "gate" not in err
    loaded = checkpoint.load(made)
    assert loaded.config.activation == "gated-silu"
    assert loaded.vocabulary is not None and loaded.vocabulary.size == 400
    assert loaded.provenance == {"imported_from": "t5x", "layout": "t5x"}


def test_inspect_describes_what_is_not_converted_yet_and_verifies_what_is(tmp_path, capsys):
    def facts(*flags: str) -> dict[str, object]:
        assert inspect.run(make_parser().parse_args(["inspect", *flags, "--json"])) == 0
        return json.loads(capsys.readouterr().out)

    for family, name in (("t5_v1_0", "T5 1.0"), ("umt5", "umT5")):
        source, made = GOLDEN / family, tmp_path / family
        before = facts(str(source))
        assert (before["layout"], before["family"]) == ("huggingface", name)
        converted(source, made)
        said = capsys.readouterr().out
        after = facts(str(made), "--verify")
        assert said == f"{made}: {name}, {after['parameters']:,} parameters, float32\n"
        assert after["verified"] and after["layout"] == "tpuspec"
        for same in ("family", "parameters", "dtype", "bytes_on_device", "tied", "model"):
            assert before[same] == after[same]
    sums = (made / "checksums.json").read_text()
    for damaged, told in ((dict.fromkeys(json.loads(sums)["blocks"], []), "has no sums of all of "),
                          ([1], "checksums.json is damaged: AttributeError"),
                          (json.loads(sums)["blocks"] | {"embedding": [[0, 1, 2, "a"]]},
                           "has no sums of all of embedding"),
                          (None, "checksums.json is damaged: AttributeError")):
        (made / "checksums.json").write_text(json.dumps({"blocks": damaged}))
        with pytest.raises(ValueError, match=told):
            facts(str(made), "--verify")
    (made / "checksums.json").unlink()
    with pytest.raises(ValueError, match="no checksums.json"):
        facts(str(made), "--verify")


def test_inspect_says_whether_two_can_be_a_pair(tiny_pair, tmp_path):
    target, draft = str(tiny_pair / "target"), str(tiny_pair / "draft")
    good = run_cli("inspect", target, "--against", draft)
    assert good.returncode == 0 and "parameters" in good.stdout, good.stderr
    bare = tmp_path / "bare"
    checkpoint.save(bare, checkpoint.load(draft).model, None)
    bad = run_cli("inspect", target, "--against", str(bare), "--json")
    assert bad.returncode == 1
    assert "has no vocabulary" in json.loads(bad.stdout)["pair_problems"][0]


@pytest.mark.parametrize("text, told", [
    ("{", "is damaged: "), ("{}", "is damaged: it lacks 'model'"),
    ('{"model": {"d_model": "wide"}}', "is damaged: missing model configuration fields"),
    ("[1]", "is damaged: ")])
def test_a_damaged_configuration_is_named(tiny_pair, tmp_path, text, told):
    broken = tmp_path / "broken"
    checkpoint.save(broken, checkpoint.load(tiny_pair / "draft").model, None)
    (broken / "model.json").write_text(text)
    with pytest.raises(ValueError, match="model.json " + told):
        checkpoint.load(broken)


@pytest.mark.parametrize("change, told", [
    (dict(d_model="64"), "d_model must be a whole number, got '64'"),
    (dict(num_layers=2.0), "num_layers must be a whole number, got 2.0"),
    (dict(num_layers=100_000), r"num_layers must be in \[1, 1000\], got 100000"),
    (dict(eos_token_id=[1, 2]), r"eos_token_id must be a whole number, got \[1, 2\]"),
    (dict(layer_norm_epsilon="x"), "layer_norm_epsilon must be a number, got 'x'"),
    (dict(layer_norm_epsilon=-1.0), r"layer_norm_epsilon must be in \[0.0, 1.0\], got -1.0"),
    (dict(scale_decoder_outputs="no"), "scale_decoder_outputs must be true or false, got 'no'"),
    (dict(feed_forward_proj=5), "is damaged: AttributeError"),
    (None, "config.json is damaged: "), ("[" * 200_000, "is damaged: RecursionError")])
def test_damaged_files_of_others_are_one_clear_line(tmp_path, change, told):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "t5_v1_0", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | change if isinstance(change, dict) else change)
        if not isinstance(change, str) else change)
    with pytest.raises(ValueError, match=told):
        inspect.run(make_parser().parse_args(["inspect", str(source)]))


@pytest.mark.parametrize("header", [b'"abc"', b"5", b"null", b"[" * 100_000, b'{"a": 1}'])
def test_damaged_weights_of_others_are_one_clear_line(tmp_path, header):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "t5_v1_0", source)
    (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="is damaged: |cannot be read: "):
        inspect.run(make_parser().parse_args(["inspect", str(source)]))
