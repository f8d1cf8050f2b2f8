"""Models whose head scores rows or tokens: the right token is pooled, new heads begin alike, regression learns."""

from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle.errors import ArgumentError, ModelLoadError
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel

ROWS: list[Any] = [
    {"input_ids": [5, 6, 7], "labels": 1.0},
    {"input_ids": [5, 6, 8, 9, 256], "labels": 0.0},
    {"input_ids": [0], "labels": -0.5},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def build(folder: Path, kind: str = "Sequence", labels: int = 1) -> TransformersModel:
    torch.manual_seed(0)
    name = f"AutoModelFor{kind}Classification"
    model = TransformersModel(model_id=str(folder), model_cls=name, num_labels=labels, mixed_precision="no")
    model.set_loss("MSELoss")
    return model


@pytest.mark.sample(2)
@pytest.mark.parametrize("processor", [{}, {"padding_side": "left"}, {"padding_free": True}])
@pytest.mark.parametrize("size", [None, 2])
def test_a_row_is_scored_at_its_last_token_whatever_stands_in_the_padding(
    folder: Path, processor: Any, size: int | None
) -> None:
    model = build(folder, labels=2)
    model.set_processor("InputProcessor", **processor)
    found = model.forward_only(inputs=ROWS, micro_batch_size=size)["logits"]
    with torch.no_grad():
        hidden = [model.model.model(torch.tensor([row["input_ids"]])).last_hidden_state[0, -1] for row in ROWS]
        wanted = torch.stack(hidden) @ model.model.score.weight.T
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lora", [None, {"r": 4, "target_modules": "all-linear"}])
def test_regression_learns_its_targets_however_it_is_cut(folder: Path, lora: Any) -> None:
    curves = []
    for size in (None, 2):
        model = build(folder)
        if lora:
            torch.manual_seed(1)
            model.add_adapter_to_model("default", lora)
            model.set_loss("MSELoss")
        model.set_optimizer("SGD", lr=0.02, weight_decay=0.0)
        losses = []
        for _ in range(5):
            losses.append(model.forward_backward(inputs=ROWS, micro_batch_size=size)["loss"])
            model.clip_grad_and_step()
        curves.append(losses)
        assert losses[-1] < losses[0]
        assert "accuracy" not in model.calculate_metric(is_training=True)
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_with_lora_the_head_is_trained_and_saved_with_the_adapter(folder: Path, tmp_path: Path) -> None:
    model = build(folder)
    model.add_adapter_to_model("default", {"r": 4, "target_modules": ["q_proj"]})
    model.set_loss("MSELoss")
    model.set_optimizer("SGD", lr=0.1)
    before = model.forward_only(inputs=ROWS)["logits"]
    model.forward_backward(inputs=ROWS)
    model.clip_grad_and_step()
    trained = model.forward_only(inputs=ROWS)["logits"]
    assert not torch.equal(before, trained)
    assert any("score" in name for name in model.get_state_dict())
    saved = model.save("here", str(tmp_path))
    again = build(folder)
    again.add_adapter_to_model("default", str(saved))
    assert torch.equal(again.forward_only(inputs=ROWS)["logits"], trained)


def test_a_value_at_each_token_is_compared_where_there_is_a_target(folder: Path) -> None:
    model = build(folder, "Token")
    model.model.dropout.p = 0.0
    rows: list[Any] = [
        {"input_ids": [5, 6, 7], "labels": [0.5, float("nan"), 1.0]},
        {"input_ids": [5, 6], "labels": [0.5, -1.0]},
    ]
    output = model.forward_backward(inputs=rows, micro_batch_size=1)
    with torch.no_grad():
        values = [model.model(torch.tensor([row["input_ids"]])).logits[0, :, 0] for row in rows]
    errors = [
        (v - t) ** 2 for value, row in zip(values, rows, strict=True) for v, t in zip(value, row["labels"], strict=True)
    ]
    wanted = [error for error in errors if error == error]
    assert output["num_tokens"] == 4
    assert output["loss"] == pytest.approx(float(sum(wanted)) / 4, rel=1e-5)


def test_a_new_head_is_the_same_on_every_start_and_leaves_the_generator_alone(folder: Path) -> None:
    heads = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        options: Any = {"model_cls": "AutoModelForSequenceClassification", "num_labels": 1, "dtype": "float32"}
        heads.append(TransformersModel(model_id=str(folder), **options).model.score.weight)
    assert torch.equal(*heads)
    assert 0.005 < float(heads[0].std().detach()) < 0.05


def test_other_missing_weights_stay_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"1 weights of LlamaForSequenceClassification are missing: model.norm"):
        build(folder)


def test_an_adapter_for_a_language_model_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="LlamaForSequenceClassification does not predict tokens; leave it out"):
        build(folder).add_adapter_to_model("default", {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"})
