"""Checkpoints in an object store, up to the network."""

import pytest
from etils.epath import backend
from fake_gcs import fake_gcs
from programmable import rand
from test_checkpoint import assert_same
from tiny_vocabularies import uni_vocabulary

from tpuspec import checkpoint
from tpuspec.model_sources import open_source


def test_a_checkpoint_is_restored_from_gs(tmp_path, monkeypatch):
    model = rand(d_model=16, layers=1)
    checkpoint.save(tmp_path / "bucket" / "models" / "tiny", model, uni_vocabulary())
    with fake_gcs(tmp_path, monkeypatch) as asked:
        place = "gs://bucket/models/tiny"
        assert checkpoint.describe(place).parameters > 0
        assert not asked
        loaded = checkpoint.load(place, verify=True)
        assert_same(loaded.model, model)
        assert loaded.vocabulary is not None and loaded.vocabulary.size == 300
        assert "bucket/models/tiny/weights/manifest.ocdbt" in asked
        with pytest.raises(ValueError, match="no checkpoint at gs://bucket/models: .*did you mean"):
            checkpoint.load("gs://bucket/models")
        with pytest.raises(ValueError, match="is not on this machine: copy it here first"):
            open_source(place)


def test_without_the_package_for_it_gs_is_refused_clearly(monkeypatch):
    def lacking(*_: object) -> None:
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(type(backend.fsspec_backend), "_get_filesystem", lacking)
    with pytest.raises(ValueError, match="gs://bucket/tiny cannot be read: .*gcsfs"):
        checkpoint.load("gs://bucket/tiny")
