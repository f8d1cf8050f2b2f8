"""Muon with AdamW beside it, against torch's two optimizers by hand; one state, one schedule, one checkpoint."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from twinkle.errors import ArgumentError
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.muon import Muon
from twinkle_transformers.optimizers import build_optimizer, override

ROWS = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}, {"input_ids": [9, 4], "labels": [4, -100]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1, attention_bias=True)


def full(folder: Path, **options: Any) -> TransformersModel:
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    model.set_optimizer("Muon", **options)
    return model


def step(model: TransformersModel, **options: Any) -> None:
    model.forward_backward(inputs=ROWS)
    model.clip_grad_norm(1.0)
    model.step(**options)
    model.zero_grad()
    model.lr_step()


def parts(optimizer: Any) -> dict[str, list[dict[str, Any]]]:
    return {part: [g for g in optimizer.param_groups if g["algorithm"] == part] for part in ("muon", "adamw")}


def toy() -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed_tokens.weight": (6, 4), "layers.0.weight": (4, 3), "layers.0.bias": (4,), "lm_head.weight": (6, 4)}
    return [(name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in shapes.items()]


def test_a_full_model_is_updated_by_torchs_two_optimizers(folder: Path) -> None:
    model = full(folder, lr=0.02, weight_decay=0.1, momentum=0.9, adamw_lr=3e-3, adamw_betas=(0.8, 0.9))
    names = dict(model.model.named_parameters())
    twin = {name: nn.Parameter(p.detach().clone()) for name, p in names.items()}
    tables = [twin["model.embed_tokens.weight"], twin["lm_head.weight"]]
    matrices = [p for name, p in twin.items() if p.ndim == 2 and "layers" in name]
    vectors = [p for p in twin.values() if p.ndim == 1]
    assert len(tables) + len(matrices) + len(vectors) == len(twin)
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.9)
    groups = [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.9))
    for _ in range(3):
        model.forward_backward(inputs=ROWS)
        model.clip_grad_norm(1.0)
        for name, parameter in names.items():
            assert parameter.grad is not None
            twin[name].grad = parameter.grad.clone()
        muon.step()
        adamw.step()
        model.step()
        model.zero_grad()
    assert all(torch.equal(parameter, twin[name]) for name, parameter in names.items())


def test_a_full_run_resumes_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    options = {"lr": 0.02, "adamw_lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"}
    unbroken, resumed = full(folder, **options), full(folder, **options)
    for model in (unbroken, resumed):
        model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=1, num_training_steps=9)
    for _ in range(2):
        step(unbroken)
    resumed.resume_from_checkpoint(str(unbroken.save("c", str(tmp_path), save_optimizer=True)))
    step(unbroken)
    step(resumed)
    wanted = dict(unbroken.model.named_parameters())
    assert all(torch.equal(p, wanted[name]) for name, p in resumed.model.named_parameters())


def test_adapters_have_matrices_alone(folder: Path) -> None:
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    model.add_adapter_to_model("default", {"r": 4, "target_modules": ["q_proj"]})
    model.set_optimizer("Muon", lr=0.02)
    assert [len(groups) for groups in parts(model.optimizer_group["default"].optimizer).values()] == [1, 0]


def test_a_scheduler_moves_both_parts(folder: Path) -> None:
    model = full(folder, lr=0.02, adamw_lr=0.004)
    model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=0, num_training_steps=4)
    step(model)
    muon, adamw = parts(model.optimizer_group[""].optimizer).values()
    assert [g["lr"] for g in muon] == pytest.approx([0.015] * len(muon))
    assert [g["lr"] for g in adamw] == pytest.approx([0.003] * len(adamw))


def test_step_options_reach_the_part_that_they_name(folder: Path) -> None:
    model = full(folder, lr=0.02)
    optimizer = model.optimizer_group[""].optimizer
    step(model, optim_params={"lr": 0.5, "adamw_betas": [0.5, 0.6], "momentum": 0.1})
    muon, adamw = parts(optimizer).values()
    assert {g["lr"] for g in [*muon, *adamw]} == {0.5}  # no adamw_lr was given, so that lr is for both
    assert {(g["momentum"], "betas" in g) for g in muon} == {(0.1, False)}
    assert {g["betas"] for g in adamw} == {(0.5, 0.6)}
    step(model, optim_params={"adamw_lr": 0.25, "lr": 0.125, "weight_decay": 0.3})
    assert ({g["lr"] for g in muon}, {g["lr"] for g in adamw}) == ({0.125}, {0.25})
    assert {g["weight_decay"] for g in muon} == {0.3}
    assert sorted(g["weight_decay"] for g in adamw) == [0.0, 0.3]


def test_an_own_adamw_rate_stays_when_muons_changes() -> None:
    optimizer = build_optimizer("Muon", toy(), lr=0.02, adamw_lr=0.004)
    override(optimizer, {"lr": 0.01})
    assert {part: {g["lr"] for g in groups} for part, groups in parts(optimizer).items()} == {
        "muon": {0.01},
        "adamw": {0.004},
    }
    with pytest.raises(ArgumentError, match="Muon has no 'betas'"):
        override(optimizer, {"betas": (0.9, 0.9)})


def test_rules_may_name_options_of_either_part() -> None:
    rules = [{"match": r"layers\.", "lr": 0.1, "adamw_lr": 0.2}, {"match": "lm_head", "adamw_weight_decay": 0.7}]
    optimizer = build_optimizer("Muon", toy(), lr=0.02, weight_decay=0.3, params=rules)
    muon, adamw = parts(optimizer).values()
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in muon] == [(1, 0.1, 0.3)]
    shown = [(g["params"][0].shape, g["lr"], g["weight_decay"]) for g in adamw]
    assert shown == [((4,), 0.2, 0.0), ((6, 4), 0.02, 0.7), ((6, 4), 0.02, 0.3)]


def test_other_names_may_go_to_adamw() -> None:
    optimizer = build_optimizer("Muon", toy(), lr=0.02, adamw_match="layers")
    assert [tuple(p.shape) for g in parts(optimizer)["muon"] for p in g["params"]] == [(6, 4), (6, 4)]
    with pytest.raises(ArgumentError, match="must be regular expressions"):
        build_optimizer("Muon", toy(), adamw_match="(")


def test_bare_parameters_are_split_by_dimension() -> None:
    optimizer = Muon([p for _, p in toy()], lr=0.1)
    assert [len(g["params"]) for g in optimizer.param_groups] == [3, 1]
    with pytest.raises(ArgumentError, match="Muon has no 'beta'"):
        Muon([{"params": [nn.Parameter(torch.zeros(2, 2))], "beta": 1}])


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
def test_a_copied_optimizer_goes_on_alike(way: str) -> None:
    def run(pairs: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            for _, parameter in pairs:
                parameter.grad = parameter.detach().cos()
            optimizer.step()

    pairs = toy()
    optimizer: Any = Muon(pairs, lr=0.1)
    run(pairs, optimizer, 2)
    if way == "deepcopy":
        others, other = copy.deepcopy((pairs, optimizer))
    else:
        others = [(name, nn.Parameter(p.detach().clone())) for name, p in pairs]
        other = Muon(others, lr=0.7)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(pairs, optimizer, 2)
    run(others, other, 2)
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(pairs, others, strict=True))


def test_a_closure_is_evaluated_with_gradients() -> None:
    pairs = toy()
    optimizer = Muon(pairs, lr=0.1)

    def closure() -> float:
        loss = sum((p.square().sum() for _, p in pairs), torch.zeros(()))
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    assert optimizer.step(closure) > 0
    assert all(p.grad is not None for _, p in pairs)
