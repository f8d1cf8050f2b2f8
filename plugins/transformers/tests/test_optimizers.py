"""Optimizers by name, parameter groups by rule, and the same after a resume; each against torch's own by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from twinkle.errors import ArgumentError, TrainingStateError, Unsupported
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.optimizers import build_optimizer

NAMES = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear"}
ROWS = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}, {"input_ids": [9, 4], "labels": [4, -100]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def build(folder: Path, *, lora: bool = True) -> TransformersModel:
    torch.manual_seed(0)
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    if lora:
        model.add_adapter_to_model("default", LORA)
    return model


def named(model: TransformersModel) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.model.named_parameters() if p.requires_grad)


def optimizer_of(model: TransformersModel) -> Any:
    return model.optimizer_group[model.active_group].optimizer


def groups_of(model: TransformersModel) -> list[tuple[set[str], dict[str, Any]]]:
    """Names and options of each group."""
    name_of = {id(p): name.replace(".default", "") for name, p in named(model)}
    return [({name_of[id(p)] for p in group["params"]}, group) for group in optimizer_of(model).param_groups]


def two_steps(model: TransformersModel, twin: dict[str, nn.Parameter], *theirs: torch.optim.Optimizer) -> None:
    """Make two steps; the twin makes them with the same gradients and optimizers of its own."""
    for _ in range(2):
        model.forward_backward(inputs=ROWS)
        model.clip_grad_norm(1.0)
        for name, parameter in named(model):
            twin[name].grad = parameter.grad.clone() if parameter.grad is not None else None
        for optimizer in theirs:
            optimizer.step()
        model.step()
        model.zero_grad()


# by name


@pytest.mark.sample(8)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_two_steps_equal_those_of_torch_by_hand(folder: Path, name: str, lora: bool) -> None:
    model = build(folder, lora=lora)
    model.set_optimizer(name, lr=1e-2)
    twin = {key: nn.Parameter(p.detach().clone()) for key, p in named(model)}
    matrices = [p for key, p in twin.items() if "norm" not in key]
    norms = [p for key, p in twin.items() if "norm" in key]
    assert bool(norms) is not lora
    decay = {} if name == "Rprop" else {"weight_decay": 0.01}
    groups: list[dict[str, Any]] = [{"params": matrices, **decay}]
    if norms:
        groups.append({"params": norms, **({"weight_decay": 0.0} if decay else {})})
    two_steps(model, twin, getattr(torch.optim, name)(groups, lr=1e-2))
    before = build(folder, lora=lora)
    assert any(not torch.equal(p, q) for (_, p), (_, q) in zip(named(model), named(before), strict=True))
    assert all(torch.equal(parameter, twin[key]) for key, parameter in named(model))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", [*NAMES, "Muon"])
def test_a_resumed_run_equals_the_unbroken_one(folder: Path, tmp_path: Path, name: str) -> None:
    def step(model: TransformersModel) -> None:
        model.forward_backward(inputs=ROWS)
        model.clip_grad_and_step()

    def begin() -> TransformersModel:
        model = build(folder)
        rules = [{"match": "lora_B", "lr": 2e-2}]
        model.set_optimizer(name, lr=1e-2, params=rules, **({"momentum": 0.9} if name == "SGD" else {}))
        return model

    unbroken, resumed = begin(), begin()
    step(unbroken)
    step(unbroken)
    resumed.resume_from_checkpoint(str(unbroken.save("c", str(tmp_path), save_optimizer=True)))
    step(unbroken)
    step(resumed)
    ours, theirs = resumed.get_state_dict(), unbroken.get_state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    ("name", "message"),
    [("LBFGS", "evaluates the loss inside its step"), ("SparseAdam", "takes only sparse gradients")],
)
def test_an_optimizer_that_the_loop_cannot_serve_is_refused_by_name_and_as_an_instance(
    folder: Path, name: str, message: str
) -> None:
    model = build(folder)
    with pytest.raises(Unsupported, match=f"{name} {message}"):
        model.set_optimizer(name)
    with pytest.raises(Unsupported, match=message):
        model.set_optimizer(getattr(torch.optim, name)([p for _, p in named(model)]))


def test_an_instance_is_taken_if_it_is_over_what_is_trained(folder: Path) -> None:
    model = build(folder)
    own = torch.optim.SGD([p for _, p in named(model)], lr=0.5)
    model.set_optimizer(own)
    assert optimizer_of(model) is own
    with pytest.raises(ArgumentError, match=r"SGD is an instance, so lr= must be given to its constructor"):
        model.set_optimizer(own, lr=1.0)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.5)
    with pytest.raises(ArgumentError, match=r"a parameter of shape \[3\] that the model .* does not train \(1 such\)"):
        model.set_optimizer(stranger)


def test_a_class_of_ones_own_and_a_function_that_builds_one(folder: Path) -> None:
    class Mine(torch.optim.SGD):
        pass

    def built(params: Any, lr: float) -> torch.optim.Optimizer:
        return Mine(params, lr=lr)

    model = build(folder)
    for optimizer in (Mine, built):
        model.set_optimizer(optimizer, lr=0.25)
        assert isinstance(optimizer_of(model), Mine)
        assert {group["lr"] for group in optimizer_of(model).param_groups} == {0.25}


def test_values_that_an_optimizer_refuses_are_an_argument_error(folder: Path) -> None:
    model = build(folder)
    with pytest.raises(ArgumentError, match=r"AdamW refuses its arguments: Invalid learning rate: -1"):
        model.set_optimizer("AdamW", lr=-1.0)
    with pytest.raises(ArgumentError, match="Nesterov"):
        model.set_optimizer("SGD", lr=1.0, nesterov=True)
    with pytest.raises(Unsupported, match="differentiable=True"):
        model.set_optimizer("AdamW", differentiable=True)
    with pytest.raises(ArgumentError, match="weight_decay"):
        model.set_optimizer("Rprop", weight_decay=0.1)
    with pytest.raises(TrainingStateError, match="no trainable parameters"):
        build_optimizer("AdamW", [], params=[nn.Parameter(torch.zeros(1))])


# groups


def test_rules_put_every_parameter_in_one_group_and_the_first_match_wins(folder: Path) -> None:
    model = build(folder, lora=False)
    rules: list[dict[str, Any]] = [
        {"match": ["embed", "head"], "weight_decay": 0.0},
        {"match": r"mlp\.", "lr": 3e-3},
        {"match": r"layers\.0", "lr": 2e-3, "weight_decay": 0.5, "betas": (0.5, 0.6)},
    ]
    model.set_optimizer("AdamW", lr=1e-3, weight_decay=0.1, params=rules)
    groups = groups_of(model)
    everything = [name for names, _ in groups for name in names]
    assert sorted(everything) == sorted(name for name, _ in named(model))
    shown = [(min(names), g["lr"], g["weight_decay"], g["betas"], g["decays"]) for names, g in groups]
    assert shown == [
        ("lm_head.weight", 1e-3, 0.0, (0.9, 0.999), False),
        ("model.layers.0.mlp.down_proj.weight", 3e-3, 0.1, (0.9, 0.999), True),
        ("model.layers.0.input_layernorm.weight", 2e-3, 0.5, (0.5, 0.6), True),
        ("model.norm.weight", 1e-3, 0.0, (0.9, 0.999), False),
    ]


def test_a_rule_without_weight_decay_spares_norms(folder: Path) -> None:
    model = build(folder, lora=False)
    model.set_optimizer("SGD", lr=1.0, weight_decay=0.1, params=[{"match": "layers", "lr": 2.0}])
    decays = {name: group["weight_decay"] for names, group in groups_of(model) for name in names}
    assert {name for name, decay in decays.items() if decay == 0.0} == {n for n in decays if "norm" in n}


def test_torchs_own_groups_and_bare_parameters_are_taken(folder: Path) -> None:
    model = build(folder)
    first = [p for name, p in named(model) if "lora_A" in name]
    second = [p for name, p in named(model) if "lora_B" in name]
    model.set_optimizer("SGD", lr=1.0, params=[{"params": first}, {"params": iter(second), "lr": 16.0}])
    assert [(len(names), group["lr"]) for names, group in groups_of(model)] == [(len(first), 1.0), (len(second), 16.0)]
    model.set_optimizer("SGD", lr=1.0, params=(p for p in first))
    assert [group["params"] for _, group in groups_of(model)] == [first]
    model.set_optimizer("SGD", lr=1.0, params=first[0])
    assert [group["params"] for _, group in groups_of(model)] == [first[:1]]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([{"match": "lora_C"}], r"the rule 'lora_C' matches no trained parameter; names look like 'base_model"),
        ([{"match": "lora"}, {"match": "lora_B"}], "'lora_B' applies to nothing: earlier rules match all"),
        ([{"match": "lora_["}], "must be a regular expression"),
        ([{"match": 3}], "must be a regular expression"),
        ([{"match": "lora_B", "learning_rate": 1.0}], "AdamW has no 'learning_rate' for a group"),
        ([{"match": "lora_B", "beta": 1.0}], "nearest: 'betas'"),
        ([{"match": "lora_B", "params": []}], "both 'params' and 'match'"),
        ([{"lr": 1.0}], "rules on saved names"),
        ([{"match": "lora_B"}, {"params": []}], "mixes rules"),
        ([3], "contains a int"),
        ([], "params= is empty"),
        ([nn.Parameter(torch.zeros(2))], r"shape \[2\] that the model .* does not train"),
    ],
)
def test_groups_that_cannot_be_made_are_named(folder: Path, params: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build(folder).set_optimizer("AdamW", params=params)


def test_a_parameter_in_two_groups_is_named(folder: Path) -> None:
    model = build(folder)
    name, parameter = next(named(model))
    with pytest.raises(ArgumentError, match=f"{name.replace('.default', '')} twice"):
        model.set_optimizer("AdamW", params=[{"params": [parameter]}, {"params": [parameter]}])


# values for a step


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": -1.0}, "at least 0"),
        ({"lr": float("nan")}, "at least 0"),
        ({"betas": [0.9, -0.1]}, "at least 0"),
        ({"params": []}, "has no 'params'"),
        ({"decays": True}, "has no 'decays'"),
        ({"lr": 1.0, "momentum": 0.9}, "AdamW has no 'momentum'; it has amsgrad, betas"),
    ],
)
def test_step_options_that_make_no_sense_change_nothing(folder: Path, values: dict[str, Any], message: str) -> None:
    model = build(folder)
    model.set_optimizer("AdamW", lr=1e-3)
    model.forward_backward(inputs=ROWS)
    with pytest.raises(ArgumentError, match=message):
        model.step(optim_params=values)
    assert {group["lr"] for group in optimizer_of(model).param_groups} == {1e-3}
