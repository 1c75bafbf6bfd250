"""``tpuspec compile``: what it refuses, and what it prints. Programs are compiled in
``tests/test_program_report.py``."""

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
from harness import run_cli

import tpuspec
from tpuspec import checkpoint, platform, program_report
from tpuspec.config import T5Config
from tpuspec.presets import preset
from tpuspec.program_report import ProgramReport, ProgramRow
from tpuspec.serving import compile as compile_command
from tpuspec.serving.cli import make_parser


@pytest.mark.parametrize("flags, code, complaint", [
    (["--topology", "v9"], 1, "topology must be one of v4, v4:2x2x1"),
    (["--target", "t5-huge"], 1, "model must be one of t5-small"),
    (["--length", "8"], 1, "length must be at least 10 for draft lengths up to 7, got 8"),
    (["--slots", "0"], 2, "must be at least 1, got 0"),
    (["--draft_lengths", "1,2"], 1, "draft_lengths must begin with 0, got (1, 2)")])
def test_wrong_flags(flags, code, complaint):
    done = run_cli("compile", *flags)
    assert done.returncode == code and complaint in done.stderr and not done.stdout


ROW = ProgramRow(name="draft pass", hbm_bytes=2**30, temporary_bytes=2**20, floor_bytes=10,
                 floor_ms=0.5, estimate_ms=1.0, collectives=3, compile_seconds=2.0, by_scope={})


def fake_report(fits: bool, models: list[T5Config | None]):
    def report(topology, target, draft, config, *, dtype, mesh_shape, vocabulary_size, progress):
        models[:] = target, draft
        progress("draft pass", 0, 1)
        return ProgramReport(
            topology=f"{topology.generation}", mesh=mesh_shape, slots=config.slots,
            weight_bytes=2**31, cache_bytes=2**30, total_bytes=2**32, programs=(ROW,),
            hbm_bytes=2**33 if fits else 2**31, slots_that_fit={128: 40, 512: 9},
            c=0.02, widening={0: 1.0, 7: 1.05},
            predicted_speedup=({"task": "translation", "temperature": 0, "alpha": 0.75,
                                "gamma": 7, "speedup": 3.1, "paper_gamma": 7,
                                "paper_expected": 3.2, "paper_measured": 3.4},))
    return report


@pytest.fixture
def run(monkeypatch, capsys):
    """Flags -> (exit code, standard output) with a report that is made up."""
    monkeypatch.setattr(platform, "prepare_compiler", lambda: None)

    def run(*flags: str, fits: bool = True, models=None):
        monkeypatch.setattr(program_report, "report", fake_report(
            fits, [] if models is None else models))
        args = make_parser().parse_args(["compile", *flags])
        return compile_command.run(args), capsys.readouterr().out
    return run


def test_the_table(run):
    code, out = run("--slots", "2")
    assert code == 0
    assert "t5-v1_1-xxl with t5-v1_1-small on v4, bfloat16, 2 slots, mesh 1,1" in out
    assert "draft pass" in out and " 1.000   2.00            3" in out
    assert ("weights 2.00 GiB + caches 1.00 GiB + the largest program's own 1.00 GiB = "
            "4.00 of 8.00 GiB: fits.") in out
    assert "(the program's own memory taken as here): 128: 40, 512: 9." in out
    assert "c = 0.0200; T(8)/T(1) = 1.050" in out and "3.10x   (3.2x; 3.4x)" in out
    assert "Static estimates, not measurements" in out


def test_json_and_the_exit_code_of_what_does_not_fit(run):
    code, out = run("--json", fits=False)
    document = json.loads(out)
    assert code == 1 and not document["fits"]
    assert set(document["programs"][0]) >= {"name", "hbm_bytes", "floor_ms", "estimate_ms"}
    assert document["c"] == 0.02 and document["predicted_speedup"][0]["speedup"] == 3.1
    code, out = run("--json", "--all")
    assert [d["topology"] for d in json.loads(out)] == ["v4", "v4", "v5e", "v5e", "v5p", "v5p",
                                                        "v6e", "v6e"]


def test_models_are_public_sizes_or_directories(run, tmp_path):
    directory = Path(tpuspec.__file__).parent / "demo_pair" / "target"
    models: list[T5Config | None] = []
    code, out = run("--target", str(directory), "--draft", "t5-v1_1-small", models=models)
    assert code == 0 and f"{directory} with t5-v1_1-small on v4" in out
    assert models == [checkpoint.describe(directory).config, preset("t5-v1_1-small")]
    with pytest.raises(ValueError, match=f"no checkpoint at {tmp_path}"):
        run("--target", str(tmp_path))


def test_programs_are_kept_for_a_server_whose_command_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "prepare_compiler", lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    kept, sizes = [], []

    def report(*positional, vocabulary_size, **named):
        kept.append(os.environ.get("JAX_COMPILATION_CACHE_DIR"))
        sizes.append(vocabulary_size)
        return fake_report(True, [])(*positional, vocabulary_size=vocabulary_size, **named)

    monkeypatch.setattr(program_report, "report", report)
    pair = Path(tpuspec.__file__).parent / "demo_pair"
    flags = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--slots", "2",
             "--source", "64", "--length", "72", "--draft_lengths", "0,3", "--json"]
    for more in ([], ["--cache_dir", str(tmp_path)]):
        with contextlib.redirect_stderr(io.StringIO()) as told:
            assert compile_command.run(make_parser().parse_args(["compile", *flags, *more])) == 0
    assert kept == [None, str(tmp_path)]  # a cache of the user's is not filled unasked
    assert sizes == 2 * [checkpoint.describe(pair / "target").vocabulary.size]
    command = told.getvalue().strip().splitlines()[-1].strip()
    variable, program, *words = command.split()
    assert (variable, program) == (f"JAX_COMPILATION_CACHE_DIR={tmp_path}", "tpuspec")
    served = make_parser().parse_args(words)
    assert (served.slots, served.source_buckets, served.max_target_length) == (2, (64,), 67)
    assert (served.draft_lengths, served.draft_length) == ((0, 3), 3)
    with pytest.raises(ValueError, match="target must be a checkpoint with its vocabulary for "
                                         "cache_dir, got t5-v1_1-xxl"):
        compile_command.run(make_parser().parse_args(["compile", "--cache_dir", str(tmp_path)]))
