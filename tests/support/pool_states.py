"""Adapters of a pool that differ in all that their state can be made of, and everything that such a state is."""

from pathlib import Path
from typing import Any

import torch
from pools import lora, make_rows, open_pool
from torch import Tensor

ROWS = [make_rows(2, 9, seed=seed) for seed in range(6)]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "one vector": {"optimizer_cls": "AdamW", "lr": 1e-2},
    "foreach": {"optimizer_cls": torch.optim.Adam, "lr": 1e-2, "foreach": True},
    "momentum": {"optimizer_cls": torch.optim.SGD, "lr": 1e-2, "momentum": 0.9},
    "matrices": {"optimizer_cls": "Muon", "lr": 1e-3},
    "factored": {"optimizer_cls": "Adafactor", "lr": 1e-2},
}


def opened(folder: Path, *names: str, optimizer: str = "one vector", scheduler: bool = True, **options: Any) -> Any:
    """Return a model with adapters of these names, with dropout and an accumulation of two."""
    model = open_pool(folder, **options)
    for at, name in enumerate(names or ("a", "b")):
        model.add_adapter_to_model(name, lora(4, lora_dropout=0.25), seed=at, gradient_accumulation_steps=2)
        model.set_optimizer(adapter_name=name, **OPTIMIZERS[optimizer])
        if scheduler:
            model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=8, adapter_name=name)
    return model


def train(model: Any, name: str, seeds: range, *, step: bool = True) -> None:
    """Make one backward call a seed, and a step where one is due."""
    for seed in seeds:
        model.forward_backward(inputs=ROWS[seed % 6], adapter_name=name)
        if step:
            model.clip_grad_and_step(adapter_name=name)


def everything(model: Any, name: str) -> dict[str, Any]:
    """Return all that an adapter is, without the means that are tested here."""
    tenant = model.pool.tenants[name]
    group = tenant.group
    found: dict[str, Any] = {"weights": tenant.flat.detach().clone(), "grad": None}
    if tenant.flat.grad is not None:
        found["grad"] = tenant.flat.grad.clone()
    for number, state in group.optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": v.clone() if isinstance(v, Tensor) else v for key, v in state.items()}
    found["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in group.optimizer.param_groups]
    found["scheduler"] = group.lr_scheduler and {
        key: value for key, value in group.lr_scheduler.state_dict().items() if not callable(value)
    }
    for key in ("cur_step", "updates", "pending", "denominator", "loss_sum", "scheduled", "seed", "last_grad_norm"):
        found[key] = getattr(group, key)
    return found


def equal(one: Any, other: Any) -> bool:
    """Say whether two such states are the same, bit for bit."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)
