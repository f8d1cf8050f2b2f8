"""What two ranks do beside a plain loop: calls of one alone, contrastive losses, meshes in odd order."""

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import torchrun

from twinkle.testing import tiny_model

pytestmark = pytest.mark.full

WORKER = Path(__file__).with_name("calls_worker.py")
NAMES = ("one_alone", "nan_on_one", "nan_in_a_shard", "odd_order", "groups", "buffers")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("calls")
    tiny_model(folder / "model")
    done = torchrun(WORKER, ",".join(NAMES), folder, ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: [json.loads((folder / f"{name}-2-{rank}.json").read_text()) for rank in range(2)] for name in NAMES}


@pytest.mark.parametrize("call", ["get_state_dict", "forward", "backward"])
def test_a_rank_that_is_alone_in_a_call_on_a_sharded_model_is_told(call: str, seen: dict[str, list[Any]]) -> None:
    for rank in seen["one_alone"]:
        assert f"rank 0 at '{call}', rank 1 at 'forward_backward'" in rank[call]


@pytest.mark.parametrize("case", ["both", "the other has none"])
def test_sharded_ranks_stop_together_at_a_loss_that_is_nan_on_one(case: str, seen: dict[str, list[Any]]) -> None:
    first, second = seen["nan_on_one"]
    assert "is nan at step 1" in first[f"{case}: message"]
    assert "is not finite on another rank at step 1" in second[f"{case}: message"]
    assert (first[f"{case}: rows"], second[f"{case}: rows"]) == (2, 0)
    assert first[f"{case}: norm"] == second[f"{case}: norm"] > 0.0


def test_a_norm_that_is_nan_on_one_rank_is_nan_on_all(seen: dict[str, list[Any]]) -> None:
    assert seen["nan_in_a_shard"] == [{"2.0": True, "inf": True}] * 2


def test_ranks_in_descending_order_are_refused_where_shards_would_be_mixed_up(seen: dict[str, list[Any]]) -> None:
    for rank in seen["odd_order"]:
        assert "has ranks [1, 0]; give them in ascending order" in rank["message"]


def test_contrastive_losses_over_ranks_are_those_of_one_process(seen: dict[str, list[Any]]) -> None:
    alone = seen["groups"][0].pop("alone")  # by a rank of two: it must not wait for the other
    for rank in seen["groups"]:
        assert rank["DDP batch"] == pytest.approx(alone, rel=1e-5)
        assert rank["FSDP2 batch"] == pytest.approx(alone, rel=1e-5)
        assert rank["DDP groups"] == pytest.approx(rank["FSDP2 groups"], abs=1e-5)


def test_two_buffers_of_gradients_exist_at_a_time(seen: dict[str, list[Any]]) -> None:
    for rank in seen["buffers"]:
        assert rank == {"most": 2, "sums": [8.0 * number for number in range(9)]}
