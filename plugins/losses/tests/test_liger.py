"""Liger's kernel: called as it wants to be, wherever it can compute what is asked, and never elsewhere."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from twinkle.loss import HeadProduct
from twinkle_losses import liger
from twinkle_losses.liger import LigerFusedLinearCrossEntropyLoss

MODULE = "liger_kernel.transformers.fused_linear_cross_entropy"


class StandIn:
    """What Liger 0.8's class of this name takes and gives, computed by torch."""

    built: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(
        self, ce_weight: Any = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, accum_dtype: Any = None, use_token_scaling: bool = False,
        return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> None:  # fmt: skip
        self.softcap, self.returns = softcap, return_predicted_tokens
        self.options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
        self.built.append(self.options)

    def __call__(self, lin_weight: Any, _input: Any, target: Any, bias: Any = None) -> Any:
        logits = torch.nn.functional.linear(_input, lin_weight, bias)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        loss = torch.nn.functional.cross_entropy(logits, target, **self.options)
        return SimpleNamespace(loss=loss, predicted_tokens=logits.argmax(-1)) if self.returns else loss


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StandIn]]:
    module = ModuleType(MODULE)
    module.LigerFusedLinearCrossEntropyLoss = StandIn  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(liger, "_runs_on", lambda hidden: True)
    monkeypatch.setattr(StandIn, "built", [])
    liger._kernel.cache_clear()
    yield StandIn
    liger._kernel.cache_clear()


def product(**changed: Any) -> HeadProduct:
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "hidden": torch.randn(6, 4, dtype=torch.float64, requires_grad=True),
        "targets": torch.randint(0, 9, (6,)),
        "weight": torch.randn(9, 4, dtype=torch.float64),
        "bias": torch.randn(9, dtype=torch.float64),
    }
    return HeadProduct(**(values | changed))


def test_the_sum_comes_from_hidden_states_and_head(installed: type[StandIn]) -> None:
    given = product(softcap=2.0, predictions=True)
    made = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1).fuse(given)
    logits = 2.0 * torch.tanh((given.hidden @ given.weight.T + given.bias) / 2.0)
    wanted = torch.nn.functional.cross_entropy(logits, given.targets, label_smoothing=0.1, reduction="sum")
    assert made is not None
    assert made.predictions is not None
    torch.testing.assert_close(made.loss_sum, wanted)
    assert torch.equal(made.predictions, logits.argmax(-1))
    assert installed.built == [{"ignore_index": -100, "label_smoothing": 0.1, "reduction": "sum"}]
    loss = LigerFusedLinearCrossEntropyLoss()
    result = loss({"labels": torch.tensor([[1, 2, -100]])}, {"fused_loss_sum": wanted})
    assert (result.loss_sum is wanted, result.denominator) == (True, 2)


def test_an_ignored_label_is_left_to_the_kernel(installed: type[StandIn]) -> None:
    given = product(targets=torch.tensor([0, 1, 2, 3, 1, 1]))
    made = LigerFusedLinearCrossEntropyLoss(ignore_index=1).fuse(given)
    logits = given.hidden @ given.weight.T + given.bias
    assert made is not None
    torch.testing.assert_close(
        made.loss_sum, torch.nn.functional.cross_entropy(logits, given.targets, ignore_index=1, reduction="sum")
    )


def test_weights_of_one_are_none_and_others_are_the_heads(installed: type[StandIn]) -> None:
    loss = LigerFusedLinearCrossEntropyLoss()
    assert loss.fuse(product(loss_scale=torch.ones(6))) is not None
    assert loss.fuse(product(loss_scale=torch.tensor([1, 1, 1, 1, 1, 0.5]))) is None


def test_off_cuda_and_without_liger_the_head_computes(installed: type[StandIn], monkeypatch: Any) -> None:
    loss = LigerFusedLinearCrossEntropyLoss()
    monkeypatch.setattr(liger, "_runs_on", lambda hidden: hidden.is_cuda)
    assert loss.fuse(product()) is None
    monkeypatch.setattr(liger, "_runs_on", lambda hidden: True)
    liger._kernel.cache_clear()
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert loss.fuse(product()) is None


def test_a_liger_too_old_to_return_predictions_is_not_used(installed: type[StandIn], monkeypatch: Any) -> None:
    class Old:
        def __init__(self, ignore_index: int = -100, reduction: str = "mean") -> None: ...

    monkeypatch.setattr(sys.modules[MODULE], "LigerFusedLinearCrossEntropyLoss", Old)
    assert LigerFusedLinearCrossEntropyLoss().fuse(product()) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here; `make gpu` runs these on one")
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_real_kernel_gives_the_heads_numbers(softcap: float | None) -> None:
    pytest.importorskip("liger_kernel")
    from twinkle_torch.head import LogitTransform, score_tokens

    torch.manual_seed(0)
    head = torch.nn.Linear(64, 1000, bias=False, device="cuda")
    hidden = torch.randn(37, 64, device="cuda", requires_grad=True)
    targets = torch.randint(0, 1000, (37,), device="cuda")
    given = HeadProduct(hidden, targets, head.weight, softcap=softcap, predictions=True)
    made = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1).fuse(given)
    scores = score_tokens(
        hidden, targets, head, transform=LogitTransform(softcap=softcap), uniform_logps=True, predictions=True
    )
    assert made is not None
    assert scores.uniform_logps is not None
    wanted = -(0.9 * scores.logps + 0.1 * scores.uniform_logps).sum()
    torch.testing.assert_close(made.loss_sum, wanted, rtol=1e-4, atol=1e-3)
    assert made.predictions is not None
    assert made.predictions.tolist() == scores.predictions.tolist()  # type: ignore[union-attr]
    inputs = [hidden, head.weight]
    ours, theirs = torch.autograd.grad(made.loss_sum, inputs), torch.autograd.grad(wanted, inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
