"""Models for commands: a pair of tiny random ones on disk, or a fake engine in their place."""

import contextlib
import pathlib

import pytest
from fake_engine import FakeEngine, FakeVocabulary
from flax import nnx
from tiny_vocabularies import uni_vocabulary

from tpuspec import checkpoint
from tpuspec.config import EngineConfig, T5Config
from tpuspec.serving import models
from tpuspec.serving.service import ModelInfo
from tpuspec.t5 import T5


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory) -> pathlib.Path:
    """A directory with ``target`` and ``draft``."""
    directory = tmp_path_factory.mktemp("pair")
    vocabulary = uni_vocabulary()
    for seed, (name, d_model) in enumerate((("target", 32), ("draft", 16))):
        config = T5Config(vocab_size=-(-vocabulary.size // 64) * 64, d_model=d_model, d_kv=8,
                          d_ff=2 * d_model, num_heads=2, num_layers=1, num_decoder_layers=1)
        checkpoint.save(directory / name, T5(config, rngs=nnx.Rngs(seed)), vocabulary)
    return directory


@pytest.fixture
def fake_models(monkeypatch, tiny_pair) -> None:
    """Commands load the fake engine, with the configuration that they ask for."""
    def load(_: models.Pair, config: EngineConfig, **__: object) -> models.Served:
        return models.Served(engine=FakeEngine(config), vocabulary=FakeVocabulary(),
                             info=ModelInfo(name="count"))

    monkeypatch.setattr(models, "load", load)
    monkeypatch.setattr(models, "warm_up", lambda engine, **_: None)
    monkeypatch.setattr(models, "pair", lambda target, draft: contextlib.nullcontext(
        models.Pair(target=tiny_pair / "target", draft=tiny_pair / "draft")))
