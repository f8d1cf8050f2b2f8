"""Tinker's losses in a pool's passes: whatever the cut of the rows and whoever is beside, the sums are one tenant's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pools import Alone, distance, folder, lora, make_rows, open_pool  # noqa: F401 - a fixture
from torch import Tensor

from twinkle.engine import Operation, OperationError, OperationResult, Step

LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
LENGTHS = [9, 5, 12, 3, 1, 7]


def given(name: str) -> dict[str, Any]:
    """Return a request's arguments, one array a row, as a service decodes them."""
    draw = torch.Generator().manual_seed(1)

    def numbers(scale: float, shift: float = 0.0) -> list[Any]:
        return [(torch.randn(n, generator=draw) * scale + shift).numpy() for n in LENGTHS]

    found = {"old_logps": numbers(1.5, -5.5), "advantages": numbers(1.0)}
    if name == "gspo":
        found["sequence_ratio_mask"] = [(torch.rand(n, generator=draw) < 0.7).float().numpy() for n in LENGTHS]
    if name in ("ppo", "gspo"):
        found["clip_high_threshold"] = numbers(0.0, 1.5)
    return found


def by_torch(name: str, lp: Tensor, q: Tensor, a: Tensor, mask: Tensor | None) -> Tensor:
    """Return the loss of one row, literally."""
    r = (lp - q).exp()
    if name == "importance_sampling":
        return -(r * a).sum()
    if name == "ppo":
        return -torch.minimum(r * a, r.clamp(0.8, 1.5) * a).sum()
    if name == "cispo":
        return -(r.clamp(0.0, 4.0).detach() * lp * a).sum()
    if name == "dro":
        return -(lp * a - 0.025 * (lp - q) ** 2).sum()
    assert mask is not None
    chosen = mask != 0
    s = (lp.detach() - q)[chosen].mean() if bool(chosen.any()) else torch.zeros(())
    r = (s + lp - lp.detach()).exp()
    return -torch.minimum(r * a, r.clamp(0.9997, 1.5) * a).sum()


@pytest.mark.sample(5)
@pytest.mark.parametrize("tokens_per_pass", [16_384, 10])
@pytest.mark.parametrize("name", LOSSES)
def test_the_sum_and_its_gradient_are_those_of_the_formula(folder: Path, name: str, tokens_per_pass: int) -> None:
    model = open_pool(folder, tokens_per_pass=tokens_per_pass)
    for number, adapter in enumerate(("a", "b")):
        model.add_adapter_to_model(adapter, lora(), seed=number)
        model.set_optimizer("SGD", adapter_name=adapter, lr=1.0, weight_decay=0.0)
    rows = make_rows(len(LENGTHS), LENGTHS, seed=2)
    for row in rows:
        row["labels"] = [*row["labels"][:-1], 7]  # a target at every position, as a service has them
    alone = Alone(folder, lora(), model.get_state_dict(adapter_name="a"))
    arguments = given(name)
    beside = Operation("b", "forward_backward", make_rows(2, 8, seed=3), loss="cross_entropy")
    result, other = model.pool.run([Operation("a", "forward_backward", rows, name, arguments), beside])
    assert isinstance(result, OperationResult), result.error
    assert not isinstance(other, OperationError)
    total = torch.zeros(())
    for at, row in enumerate(rows):
        mask = torch.as_tensor(arguments["sequence_ratio_mask"][at]) if name == "gspo" else None
        q, a = (torch.as_tensor(arguments[key][at]) for key in ("old_logps", "advantages"))
        total = total + by_torch(name, alone.logps(row), q, a, mask)
    assert result.loss_sum == pytest.approx(float(total.detach()), rel=1e-4)
    total.backward()  # type: ignore[no-untyped-call]
    before = model.get_state_dict(adapter_name="a")
    model.pool.step([Step("a", divide=False)])
    after = model.get_state_dict(adapter_name="a")
    for place, gradient in alone.gradients().items():
        assert distance(before[place] - after[place], gradient) < 1e-3, place
