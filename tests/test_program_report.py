"""The engine's programs, compiled for TPUs that are not there."""

import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tiny_programs import CONFIG, DRAFT, TARGET

from tpuspec.chips import CHIPS
from tpuspec.memory import check_fits
from tpuspec.program_report import PAPER, _floor_operations
from tpuspec.theory import speedup
from tpuspec.tpu_compiler import Topology

SCRIPT = pathlib.Path(__file__).with_name("tiny_programs.py")


def compiled(topology: str, slots: int, **variables: str) -> dict:
    pytest.importorskip("libtpu")
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")} | variables
    done = subprocess.run([sys.executable, SCRIPT, topology, str(slots)], text=True,
                          capture_output=True, env=environment, timeout=800)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # nothing of libtpu's search for a TPU
    return json.loads(done.stdout)


def decoder_parameters(config):
    inner = config.num_heads * config.d_kv
    layer = (4 * inner + 2 * inner + 3 * config.d_ff) * config.d_model + 3 * config.d_model
    bias = config.relative_attention_num_buckets * config.num_heads
    return (config.num_decoder_layers * layer + bias + config.d_model
            + config.vocab_size * config.d_model)


def cache_bytes(config, positions):
    inner = config.num_heads * config.d_kv
    return 2 * 2 * config.num_decoder_layers * inner * (positions + 128)


def check(found: dict, topology: str, slots: int) -> None:
    rows = {row["name"]: row for row in found["programs"]}
    assert list(rows) == ["encode and insert 128", "step, gamma 0", "step, gamma 3",
                          "target pass, 4 positions", "draft pass"]
    for row in rows.values():
        assert row["estimate_ms"] > row["floor_ms"] > 0, row
        assert row["hbm_bytes"] > 0 and row["compile_seconds"] > 0
    assert found["fits"] and found["slots"] == slots
    assert found["hbm_bytes"] == CHIPS[topology.partition(":")[0]].hbm_bytes
    fit = found["slots_that_fit"]
    assert list(fit) == ["128", "256", "512", "1024"]
    assert list(fit.values()) == sorted(fit.values(), reverse=True) and fit["1024"] > slots
    target, draft = rows["target pass, 4 positions"], rows["draft pass"]
    assert found["c"] == pytest.approx(draft["estimate_ms"] / target["estimate_ms"])
    assert found["widening"] == {"0": 1.0, "3": 1.0}  # one width in bfloat16
    assert rows["step, gamma 3"]["estimate_ms"] > rows["step, gamma 0"]["estimate_ms"] + (
        2.5 * draft["estimate_ms"])
    for row, paper in zip(found["predicted_speedup"], PAPER, strict=True):
        assert row["task"] == paper.task and row["gamma"] in (0, 3)
        assert row["speedup"] == pytest.approx(max(
            speedup(paper.alpha, gamma, found["c"]) for gamma in (0, 3)))


def test_programs_of_one_v4_chip(tmp_path):
    found = compiled("v4", 1, JAX_COMPILATION_CACHE_DIR=str(tmp_path),
                     JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    check(found, "v4", 1)
    # Steps and inserts of a server are there for it, under the names that JAX will look for.
    kept = sorted(path.name.partition("-")[0] for path in tmp_path.glob("*-cache"))
    assert kept == ["jit__insert", "jit__pass", "jit__pass", "jit__release", "jit__step",
                    "jit__step"]
    rows = {row["name"]: row for row in found["programs"]}
    # 8 rows a draft pass, which its cache has room for; both round up to whole blocks.
    target = 2 * decoder_parameters(TARGET) + cache_bytes(TARGET, 128)
    assert rows["target pass, 4 positions"]["floor_bytes"] == target
    draft = 2 * decoder_parameters(DRAFT) + cache_bytes(DRAFT, 128)
    # Its kernel has a table of biases by distance and the last norm in a form of its own.
    draft += 4 * 128 * DRAFT.num_heads + 2 * DRAFT.d_model
    assert rows["draft pass"]["floor_bytes"] == draft
    assert rows["step, gamma 3"]["floor_bytes"] == target + 3 * draft
    # Room for slots: K and V of 1024 source positions and as many of the output, a window of
    # drafts beside them in whole blocks, for the three layers of both; a few bytes for the rest.
    inner = 2 * (TARGET.num_heads * TARGET.d_kv) + DRAFT.num_heads * DRAFT.d_kv
    slot = 2 * 2 * inner * (1024 + 1024) + 8 * TARGET.vocab_size
    room = CHIPS["v4"].hbm_bytes - found["weight_bytes"]
    assert found["slots_that_fit"]["1024"] == pytest.approx(room / slot, rel=0.1)
    assert found["total_bytes"] > found["weight_bytes"] + found["cache_bytes"]
    assert not any(row["collectives"] for row in rows.values())


def test_the_floor_of_an_encoder_counts_its_operations():
    engine = SimpleNamespace(weights=[[], []], num_weights=lambda model, of: 1000 * (model + 1))
    assert _floor_operations(engine, ("insert", 512)) == 2 * 512 * 3000
    assert _floor_operations(engine, ("step", 7, 512)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("topology, slots", [
    ("v5e", 1), ("v5p", 8), ("v6e", 3), ("v4:2x2x1", 2), ("v5e:2x2", 1), ("v6e:2x2", 4)])
def test_programs_of_other_topologies(topology, slots):
    found = compiled(topology, slots)
    check(found, topology, slots)
    if ":" in topology:
        row = next(row for row in found["programs"] if row["name"].startswith("target"))
        # After each product that contracts over what is split: o twice, and wo.
        assert row["collectives"] >= 3 * TARGET.num_decoder_layers


@pytest.mark.parametrize("text, bounds, chips", [
    ("v4", (1, 1, 1), 1), ("v5e:2x2", (2, 2, 1), 4), ("v4:2x2x1", (2, 2, 1), 4)])
def test_topologies(text, bounds, chips):
    topology = Topology.parse(text)
    assert topology.bounds == bounds and topology.num_chips == chips
    assert topology.chip is CHIPS[text.partition(":")[0]]


@pytest.mark.parametrize("text", ["v9", "v4:2x", "v4:0x2", "v4:2x2x1x1", "v4:axb", ""])
def test_topologies_that_are_none(text):
    with pytest.raises(ValueError, match="topology must be one of v4, v4:2x2x1, v5e, .* got"):
        Topology.parse(text)


def test_an_engine_that_cannot_fit_is_refused_with_the_sum():
    fit = dict(dtype="float32", mesh=None)
    check_fits([TARGET, DRAFT], CONFIG, available=None, **fit)
    check_fits([TARGET, DRAFT], CONFIG, available=2**30, **fit)
    with pytest.raises(ValueError, match=r"weights of 0\.02 GiB and caches of 0\.00 GiB \(1 "
                       r"slots, 128 source and 105 target positions\) are 0\.02 GiB on each "
                       r"device, which has 0\.00 GiB: fewer slots"):
        check_fits([TARGET, DRAFT], CONFIG, available=2**20, **fit)
