"""``tpuspec convert`` and ``inspect``, from outside."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import run_cli

from tpuspec import checkpoint
from tpuspec.config import EngineConfig
from tpuspec.huggingface import import_huggingface
from tpuspec.quantization import quantize
from tpuspec.serving import convert, inspect, models
from tpuspec.serving.cli import make_parser

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def test_a_converted_checkpoint_is_inspected_and_loads(tmp_path):
    source = next(path for path in sorted(GOLDEN.iterdir()) if (path / "config.json").is_file())
    made = run_cli("convert", str(source), str(tmp_path / "made"), "--dtype", "bfloat16")
    assert made.returncode == 0, made.stderr
    assert "no spiece.model" in made.stderr
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
