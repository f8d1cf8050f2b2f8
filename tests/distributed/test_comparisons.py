"""A contrastive loss and metrics over two ranks are those of one process with all rows."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import torchrun

WORKER = Path(__file__).with_name("comparison_worker.py")
HERE = runpy.run_path(str(WORKER))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("comparison")
    done = torchrun(WORKER, folder, ranks=2, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_loss_and_gradients_are_those_of_one_process(two: list[Any]) -> None:
    whole = HERE["contrast"](slice(0, len(HERE["LABELS"])))
    ours = [rank["contrast"] for rank in two]
    assert sum(rank["loss"] for rank in ours) == pytest.approx(whole["loss"], rel=1e-12)
    assert [rank["anchors"] for rank in ours] == [1, 2]
    grad = torch.tensor(ours[0]["grad"] + ours[1]["grad"], dtype=torch.float64)
    torch.testing.assert_close(grad, torch.tensor(whole["grad"], dtype=torch.float64))


def test_numbers_are_sums_over_sums_on_every_rank(two: list[Any]) -> None:
    whole = HERE["measure"](list(HERE["SHARES"]))
    assert whole["loss"] == (3 + 9) / (3 + 6)
    assert whole["accuracy"] == 5 / 7
    for rank in two:
        assert rank["metrics"] == pytest.approx(whole)


def test_a_rank_that_saw_nothing_gets_the_others_numbers(two: list[Any]) -> None:
    alone = HERE["measure"]([HERE["SHARES"][1]])
    for rank in two:
        assert rank["one rank saw rows"] == pytest.approx(alone)
