"""Preference training: the reference by a switched-off adapter is a separate reference model; margins grow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.errors import ArgumentError
from twinkle.model import MultiLoraTransformersModel
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel

LENGTHS = ((5, 9), (12, 7), (4, 4), (8, 11))
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear"}
LOSSES = ["DPOLoss", "SimPOLoss", "CPOLoss", "ORPOLoss"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pairs() -> list[dict[str, Any]]:
    """Return pairs of rows of uneven lengths, which begin alike."""
    draw = torch.Generator().manual_seed(3)
    made = []
    for lengths in LENGTHS:
        prompt = torch.randint(0, 256, (3,), generator=draw).tolist()
        for length in lengths:
            ids = prompt + torch.randint(0, 256, (length,), generator=draw).tolist()
            made.append({"input_ids": ids, "labels": [-100, -100, *ids[3:], -100]})
    return made


def opened(folder: Path, loss: str = "DPOLoss") -> TransformersModel:
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    torch.manual_seed(0)
    model.add_adapter_to_model("default", LORA)
    model.set_loss(loss)
    model.set_optimizer("AdamW", lr=5e-3)
    return model


def step(model: Any, pairs: Any, size: int | None = None, **given: Any) -> dict[str, float]:
    reference = model.forward_only(inputs=pairs, disable_lora=True, micro_batch_size=2)
    model.forward_backward(inputs=pairs, micro_batch_size=size, **{"ref_outputs": reference, **given})
    model.clip_grad_and_step()
    return dict(model.calculate_metric(is_training=True))


def test_the_reference_by_a_switched_off_adapter_is_a_separate_model_and_margins_grow(folder: Path, pairs: Any) -> None:
    model = opened(folder)
    separate = TransformersModel(model_id=str(folder), mixed_precision="no")
    margins = []
    for _ in range(6):
        numbers = step(model, pairs)
        margins.append(numbers["rewards/margins"])
        wanted = separate.forward_only(inputs=pairs)["logps"]
        found = model.forward_only(inputs=pairs, disable_lora=True)["logps"]
        assert float((found - wanted).abs().max()) < 1e-6
    assert margins[0] == pytest.approx(0, abs=1e-6)  # the adapter begins at 0: the policy is its reference
    assert margins == sorted(margins)
    assert margins[-1] > 0.1
    assert numbers["rewards/accuracies"] == 1.0
    moved = model.forward_only(inputs=pairs)["logps"]
    assert float((moved - wanted).abs().max()) > 1e-2


@pytest.mark.full
def test_every_way_to_give_the_reference_makes_the_same_update(folder: Path, pairs: Any) -> None:
    separate = TransformersModel(model_id=str(folder), mixed_precision="no")
    logps = separate.forward_only(inputs=pairs, micro_batch_size=3)["logps"]
    sums = logps.sum(1)
    ways: list[dict[str, Any]] = [
        {"ref_outputs": {"logps": logps}},
        {"ref_outputs": None, "ref_logps": [row[row != 0].tolist() for row in logps]},
        {"ref_outputs": None, "ref_chosen_logps": sums[0::2], "ref_rejected_logps": sums[1::2].tolist()},
    ]
    found = []
    for way, size in (({}, None), ({}, 5), *zip(ways, (2, None, 4), strict=True)):
        model = opened(folder)
        step(model, pairs)
        step(model, pairs, size, **way)
        found.append(torch.cat([weight.flatten() for weight in model.get_state_dict().values()]))
    for weights in found[1:]:
        assert float((weights - found[0]).abs().max()) < 2e-6


def test_an_adapter_of_a_pool_is_compared_with_its_base_in_the_same_pass(folder: Path, pairs: Any) -> None:
    separate = TransformersModel(model_id=str(folder), mixed_precision="no")
    pool = MultiLoraTransformersModel(model_id=str(folder), mixed_precision="no")
    pool.add_adapter_to_model("a", {**LORA, "init_lora_weights": False}, seed=0)
    pool.set_loss("DPOLoss", adapter_name="a")
    reference = separate.forward_only(inputs=pairs)
    base = pool.forward_only(inputs=pairs, adapter_name="a", disable_lora=True)
    assert float((base["logps"] - reference["logps"]).abs().max()) < 1e-6
    losses = [
        pool.forward_backward(inputs=pairs, adapter_name="a", micro_batch_size=size, **given)["loss"]
        for size, given in ((None, {"ref_logps": "base"}), (2, {"ref_logps": "base"}), (2, {"ref_outputs": reference}))
    ]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("loss", LOSSES)
def test_no_micro_batch_tears_a_pair(folder: Path, pairs: Any, loss: str) -> None:
    """Three rows at a time are two; one is an error; and five rows are no pairs."""
    losses = []
    for size in (None, 2, 3, 5):
        model = opened(folder, loss)
        given = {"ref_logps": torch.zeros(8, 20)} if loss == "DPOLoss" else {}
        losses.append(model.forward_backward(inputs=pairs, micro_batch_size=size, **given)["loss"])
    assert losses[1:] == pytest.approx([losses[0]] * 3, rel=1e-6)
    with pytest.raises(ArgumentError, match=f"{loss} needs 2 consecutive rows together, but a micro-batch has 1"):
        opened(folder, loss).forward_backward(inputs=pairs, micro_batch_size=1)
    with pytest.raises(ArgumentError, match=f"{loss} needs 2 consecutive rows together, but the batch has 5"):
        opened(folder, loss).forward_backward(inputs=pairs[:5])


@pytest.mark.full
def test_margins_grow_without_a_reference_too(folder: Path, pairs: Any) -> None:
    for loss in LOSSES[1:]:
        model = opened(folder, loss)
        gaps = []
        for _ in range(5):
            model.forward_backward(inputs=pairs, micro_batch_size=4)
            model.clip_grad_and_step()
            numbers = model.calculate_metric(is_training=True)
            gaps.append(numbers.get("rewards/margins", numbers.get("log_odds_ratio")))
        assert gaps == sorted(gaps), loss
        assert gaps[-1] > gaps[0] + 0.05, loss
