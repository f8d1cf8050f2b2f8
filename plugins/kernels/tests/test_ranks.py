"""Kernels in a model that is sharded over two ranks (FSDP2), with recomputation."""

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import torchrun

from twinkle.testing import tiny_model

pytestmark = pytest.mark.full

WORKER = Path(__file__).with_name("kernels_worker.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model(folder / "model", "qwen3")
    done = torchrun(WORKER, folder, ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_sharded_training_with_kernels_makes_the_steps_of_training_without(ranks: Any, kind: str, when: str) -> None:
    for rank in ranks:
        found, expected = rank[f"{kind}-{when}"], rank[f"{kind}-never"]
        assert (found["replaced"], found["left"], expected["replaced"]) == (11, 0, 0)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert found["saved"].keys() == expected["saved"].keys()
        assert found["saved"] == pytest.approx(expected["saved"], rel=1e-3)
