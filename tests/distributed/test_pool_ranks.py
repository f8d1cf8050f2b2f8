"""Two ranks with one pool each: what they train is what one process trains on all rows."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import distance, flat_of
from ranks import torchrun

from twinkle.testing import tiny_model

pytestmark = pytest.mark.full

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model(folder / "model")
    path = os.pathsep.join([str(HERE.parent / "support"), os.environ.get("PYTHONPATH", "")])
    done = torchrun(HERE / "pool_worker.py", folder, ranks=2, environment={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_two_ranks_train_adapters_as_one_process_does(
    folder: Path, seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    from pool_worker import NAMES, build, train

    model = build(folder, None)
    norms = train(model, slice(None))
    for mine, alone in zip(seen[0]["norms"], norms, strict=True):
        assert mine == pytest.approx(alone, rel=1e-5)
    for name in NAMES:
        assert torch.equal(seen[0]["weights"][name], seen[1]["weights"][name])
        assert distance(seen[0]["weights"][name], flat_of(model, name)) < 1e-6


def test_adapters_without_a_seed_begin_alike_on_all_ranks(seen: list[dict[str, Any]]) -> None:
    for name, first in seen[0]["first"].items():
        assert torch.equal(first, seen[1]["first"][name])


def test_a_mesh_that_shards_the_base_is_refused(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert "a mesh with fsdp shards the base model; use dp alone" in rank["refusal"]
