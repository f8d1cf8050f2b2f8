"""A base model that was changed is noticed before adapters of the old one are served with it."""

from pathlib import Path

import pytest

from twinkle.hub.fingerprint import fingerprint
from twinkle_server.errors import StoreError
from twinkle_server.store import Store
from twinkle_server.store.base import check_base
from twinkle_server.store.records import Checkpoint

from .conftest import Run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


def change(model: Path) -> str:
    (model / "model.safetensors").write_bytes(bytes(999) + b"x")
    return fingerprint(model)


def test_a_changed_model_is_refused_with_both_fingerprints(store: Store, run: Run, model: Path) -> None:
    run(check_base(store.database, "m", model))
    run(store.checkpoints.create(Checkpoint("ada", "s:train:0", "weights", "a", "checkpoints/a", 1, "d", "m", 8, 1.0)))
    run(check_base(store.database, "m", model))
    before, now = fingerprint(model), change(model)
    with pytest.raises(
        StoreError, match=rf"the 1 adapters .* fingerprint {before}, but this model has {now}.*--accept-base"
    ):
        run(check_base(store.database, "m", model))
    run(check_base(store.database, "other", model))
    run(check_base(store.database, "m", model, accept=True))
    run(check_base(store.database, "m", model))


def test_a_directory_without_adapters_takes_the_new_model(store: Store, run: Run, model: Path) -> None:
    run(check_base(store.database, "m", model))
    change(model)
    run(check_base(store.database, "m", model))
    run(store.checkpoints.create(Checkpoint("ada", "s:train:0", "weights", "a", "checkpoints/a", 1, "d", "m", 8, 1.0)))
    run(check_base(store.database, "m", model))
