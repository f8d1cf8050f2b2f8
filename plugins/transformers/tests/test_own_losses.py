"""Losses that are plain functions: what they may ask for, and what is said where they ask for it wrongly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.nn.functional import cross_entropy

from twinkle.data_format import LossOutput
from twinkle.errors import ArgumentError, ComponentTypeError
from twinkle.loss import Loss
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.testing import tiny_model

ROWS = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}, {"input_ids": [9, 4], "labels": [4, -100]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> TransformersModel:
    return TransformersModel(model_id=str(folder), mixed_precision="no")


def from_logits() -> Callable[..., LossOutput]:
    """Return a loss that computes everything itself, from whole logits."""

    def whole(inputs: Any, outputs: Any) -> LossOutput:
        logits = outputs["logits"].flatten(0, 1)
        total = cross_entropy(logits, inputs["labels"].flatten(), ignore_index=-100, reduction="sum")
        return LossOutput(total, int((inputs["labels"] != -100).sum()))

    return whole


def test_a_function_asks_for_logits_by_an_attribute(model: TransformersModel) -> None:
    model.set_loss("CrossEntropyLoss")
    wanted = model.forward_backward(inputs=ROWS)["loss"]
    loss = from_logits()
    loss.require_logits = True  # type: ignore[attr-defined]
    model.set_loss(loss)
    assert model.forward_backward(inputs=ROWS, micro_batch_size=1)["loss"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("key", "way"),
    [
        ("logits", r"set reads\.require_logits = True"),
        ("entropies", r"set reads\.require_entropy = True"),
        ("uniform_logps", r"set reads\.require_uniform_logps = True"),
        ("embeddings", r"call forward_backward\(task='embedding'\)"),
    ],
)
def test_an_output_that_was_not_asked_for_is_named_with_the_way_to_get_it(
    model: TransformersModel, key: str, way: str
) -> None:
    def reads(inputs: Any, outputs: Any) -> LossOutput:
        return LossOutput(outputs[key].sum(), 1)

    model.set_loss(reads)
    with pytest.raises(ComponentTypeError, match=rf"the forward computed logps, .*For outputs\['{key}'\]: {way}"):
        model.forward_backward(inputs=ROWS)


def test_log_probabilities_of_a_forward_for_embeddings_are_explained(model: TransformersModel) -> None:
    model.set_loss(lambda inputs, outputs: LossOutput(outputs["logps"].sum(), 1))
    with pytest.raises(
        ComponentTypeError, match=r"the forward computed embeddings.*For outputs.* for task='causal_lm'"
    ):
        model.forward_backward(inputs=ROWS, task="embedding")


def test_a_key_that_the_loss_itself_misses_stays_its_own_error(model: TransformersModel) -> None:
    model.set_loss(lambda inputs, outputs: LossOutput(outputs["logps"].sum() * {}["logps"], 1))
    with pytest.raises(KeyError, match="logps"):
        model.forward_backward(inputs=ROWS)


class Needs(Loss):
    """A loss that cannot do without an argument of its own."""

    def __call__(self, inputs: Any, outputs: Any, weight: Any, *, power: float = 1.0) -> LossOutput:  # type: ignore[override]
        return LossOutput((outputs["logps"] * weight).sum() ** power, 1)


def test_an_argument_that_the_loss_needs_is_missed_before_anything_is_computed(model: TransformersModel) -> None:
    def needs(inputs: Any, outputs: Any, weight: float) -> LossOutput:
        return LossOutput(outputs["logps"].sum() * weight, 1)

    for loss, name in ((needs, "needs"), (Needs(), "Needs")):
        model.set_loss(loss)
        for _ in range(2):
            with pytest.raises(ArgumentError, match=rf"the loss {name}: missing argument 'weight'\. Its signature is"):
                model.forward_backward(inputs=ROWS)
            model.forward_backward(inputs=ROWS, weight=2.0)
    with pytest.raises(ArgumentError, match="unknown argument 'wait', nearest: 'weight'"):
        model.forward_backward(inputs=ROWS, wait=2.0)


def test_an_unknown_argument_for_several_adapters_is_not_taken_for_a_missing_one(folder: Path) -> None:
    pool = MultiLoraTransformersModel(model_id=str(folder), mixed_precision="no")
    for name in ("a", "b"):
        pool.add_adapter_to_model(name, {"r": 2, "target_modules": ["q_proj"]})
        pool.set_loss(Needs(), adapter_name=name)
    with pytest.raises(ArgumentError, match="'wait', nearest: 'weight'") as caught:
        pool.forward_backward(inputs=ROWS, adapter_name=["a", "b"], weight=2.0, wait=[1.0, 1.0])
    assert "missing" not in str(caught.value)


@pytest.mark.parametrize("more", [{}, {"num_tokens": None}])
def test_a_sum_without_what_it_is_divided_by_is_refused(model: TransformersModel, more: dict[str, Any]) -> None:
    model.set_loss(lambda inputs, outputs: {"loss": -outputs["logps"].sum(), **more})
    with pytest.raises(ComponentTypeError, match=r"without 'num_tokens', .* return LossOutput\(loss_sum, denominator"):
        model.forward_backward(inputs=ROWS)
