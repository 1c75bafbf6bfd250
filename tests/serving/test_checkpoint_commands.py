"""``tpuspec convert`` and ``inspect``, from outside."""

import json
import pathlib

import jax.numpy as jnp
import pytest
from harness import run_cli

from tpuspec import checkpoint

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
