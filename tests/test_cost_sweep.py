"""Timed passes: what is timed, and the bytes that are counted for it."""

import jax
import pytest
from programmable import rand

from tpuspec import cost_sweep, engine
from tpuspec.checkpoint import named_parameters

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_figures_of_a_sweep(monkeypatch):
    """Real programs, made-up times."""
    ran = []

    def timed(runs, repeats):
        for name, run in runs.items():
            jax.block_until_ready(run())
            compiled = engine._backend_compiles
            jax.block_until_ready(run())
            assert engine._backend_compiles == compiled, name  # it would count as time
            ran.append(name)
        return {("pass", "target", 1): 16.0, ("pass", "target", 2): 20.0,
                ("pass", "draft", 1): 2.0, ("copy",): 400.0, ("product",): 8.0}

    monkeypatch.setattr(cost_sweep, "time_interleaved", timed)
    monkeypatch.setattr(cost_sweep, "COPY_BYTES", 2**12)
    monkeypatch.setattr(cost_sweep, "PRODUCT_SIZES", {"cpu": 64})
    target, draft = rand(0), rand(1, layers=1)
    done = []
    found = cost_sweep.sweep(target, draft, slots=2, widths=(2,), source_positions=8, positions=16,
                             vocabulary_size=30, progress=done.append)
    assert ran == [("pass", "target", 1), ("pass", "target", 2), ("pass", "draft", 1), ("copy",),
                   ("product",)]
    assert done == [1, 1, 1]
    assert [one.ms for one in found.target] == [2.0, 2.5]  # of 8 passes in a program
    assert found.c == pytest.approx(0.25 / 2.0)
    assert found.copy_bytes_per_s == pytest.approx(2 * 8 * 2**12 / 0.4)
    assert found.product_flops_per_s == pytest.approx(2 * 8 * 64**3 / 8e-3)
    read = sum(array.nbytes for name, array in named_parameters(target).items()
               if "decoder" in name and not ("cross" in name and "kv" in name)
               or "lm_head" in name)
    config = target.config
    positions = 16 + 2 + 2  # the start token, and room for a window more
    caches = 2 * 2 * config.inner_dim * config.num_decoder_layers * (positions + 8) * 4
    assert found.target[1].moved == read + caches
    assert found.target[1].bytes_per_s == pytest.approx((read + caches) / 2.5e-3)


def test_without_a_draft_there_is_no_c(monkeypatch):
    monkeypatch.setattr(cost_sweep, "COPY_BYTES", 2**12)
    monkeypatch.setattr(cost_sweep, "PRODUCT_SIZES", {"cpu": 64})
    found = cost_sweep.sweep(rand(0), None, slots=1, widths=(1,), source_positions=8, positions=16,
                             vocabulary_size=30)
    assert found.draft is None and found.c is None
    assert found.target[0].ms > 0 and found.copy_bytes_per_s > 0
