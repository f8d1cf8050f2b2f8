"""Calls with a wrong keyword or a text for a number: what was given, and what was meant."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle.errors import ArgumentError
from twinkle.model import TransformersModel
from twinkle.testing import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> TransformersModel:
    made = TransformersModel(model_id=str(folder), mixed_precision="no")
    made.set_optimizer("AdamW", lr=0.1)
    return made


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda m: m.clip_grad_and_step(max_grad=1), r"unknown argument 'max_grad', nearest: 'max_grad_norm'"),
        (lambda m: m.calculate_metric(), r"TransformersModel.calculate_metric: missing argument 'is_training'"),
        (lambda m: m.save(save_optimiser=True), r"'save_optimiser', nearest: 'save_optimizer'"),
        (lambda m: m.set_optimizer("AdamW", lr="1e-3"), r"lr of AdamW must be a number, got '1e-3'"),
        (lambda m: m.set_optimizer("SGD", lr=0.1, momentum="0.9"), r"momentum of SGD must be a number"),
        (lambda m: m.set_optimizer("Muon", lr="1e-3"), r"lr of Muon must be a number"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_by_name(
    model: TransformersModel, call: Callable[[Any], Any], told: str
) -> None:
    with pytest.raises(ArgumentError, match=told):
        call(model)


def test_a_misspelt_option_of_the_model_finds_the_models_own(folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"no argument 'mixed_prec'.*nearest: mixed_precision"):
        TransformersModel(model_id=str(folder), mixed_prec="no")


@pytest.mark.parametrize("wrong", ["5", 0.1, 5.0, -1, True])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("CosineWarmupScheduler", {"num_training_steps": 9}),
        ("LinearWarmupScheduler", {"num_training_steps": 9}),
        ("CosineRestartsWarmupScheduler", {"num_training_steps": 9}),
        ("PolynomialWarmupScheduler", {"num_training_steps": 9}),
        ("ConstantWarmupScheduler", {}),
        ("InverseSqrtWarmupScheduler", {}),
        ("WSDScheduler", {"num_training_steps": 9}),
    ],
)
def test_steps_are_counted_in_whole_numbers(
    model: TransformersModel, name: str, more: dict[str, int], wrong: Any
) -> None:
    with pytest.raises(ArgumentError, match=r"num_warmup_steps must be an integer of at least 0"):
        model.set_lr_scheduler(name, num_warmup_steps=wrong, **more)
    if more:
        with pytest.raises(ArgumentError, match=r"num_training_steps must be an integer of at least 1"):
            model.set_lr_scheduler(name, num_warmup_steps=1, num_training_steps=wrong)


def test_a_type_error_from_within_a_method_stays_what_it_is(model: TransformersModel) -> None:
    with pytest.raises(TypeError) as error:
        model.save(name=7)
    assert not isinstance(error.value, ArgumentError)
