"""What is set before JAX starts, by what the machine has."""

import os

import pytest

from tpuspec import platform


@pytest.fixture
def machine(monkeypatch):
    """Sets what the machine has, with an environment of its own."""
    def has(*, tpu: bool, gpu: bool = False, libtpu: bool = True) -> None:
        monkeypatch.setattr(platform, "has_tpu", lambda: tpu)
        monkeypatch.setattr(platform, "has_gpu", lambda: gpu)
        monkeypatch.setattr(platform.importlib.util, "find_spec", lambda _: libtpu or None)

    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.setenv(name, "x")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    return has


def test_without_a_tpu_libtpu_is_kept_quiet(machine):
    machine(tpu=False)
    platform.keep_libtpu_quiet()
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"


@pytest.mark.parametrize("has", [dict(tpu=True), dict(tpu=False, libtpu=False)])
def test_nothing_is_set_where_nothing_is_amiss(machine, has):
    machine(**has)
    platform.keep_libtpu_quiet()
    assert "JAX_PLATFORMS" not in os.environ and "TPU_SKIP_MDS_QUERY" not in os.environ


def test_gpu_stays_usable(machine):
    machine(tpu=False, gpu=True)
    platform.keep_libtpu_quiet()
    assert "JAX_PLATFORMS" not in os.environ


def test_what_the_user_has_set_stays(machine, monkeypatch):
    machine(tpu=False)
    monkeypatch.setenv("JAX_PLATFORMS", "rocm")
    platform.keep_libtpu_quiet()
    platform.choose(None)
    assert os.environ["JAX_PLATFORMS"] == "rocm"


def test_present_tpu_is_asked_for_by_name_so_that_jax_never_falls_back(machine):
    machine(tpu=True)
    platform.choose(None)
    assert os.environ["JAX_PLATFORMS"] == "tpu,cpu"
    platform.choose("cpu")
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    platform.choose("tpu")
    assert os.environ["JAX_PLATFORMS"] == "tpu,cpu"


def test_absent_tpu_is_refused(machine):
    machine(tpu=False)
    with pytest.raises(ValueError, match="platform must be cpu on this machine, got tpu"):
        platform.choose("tpu")


def test_compiled_programs_are_kept_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert platform.compilation_cache().relative_to(tmp_path).parts[:2] == ("tpuspec", "compiled")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert platform.compilation_cache().is_relative_to(tmp_path / ".cache")
