"""Squared errors against a plain loop and torch's own, masked and split; shapes that do not fit are refused."""

from typing import Any

import pytest
import torch

from twinkle._registry import registry
from twinkle.errors import DataError, TrainingStateError
from twinkle_losses.mse import MSELoss


def loss(logits: Any, labels: Any) -> Any:
    return MSELoss()({"labels": labels}, {"logits": logits})


@pytest.mark.parametrize(("given", "shape"), [((4, 1), (4,)), ((4, 3), (4, 3)), ((2, 5, 1), (2, 5)), ((4, 1), (4, 1))])
def test_it_is_torchs_mean_squared_error_with_its_gradient(given: Any, shape: Any) -> None:
    torch.manual_seed(0)
    logits = torch.randn(given, dtype=torch.float64, requires_grad=True)
    labels = torch.randn(shape)
    result = loss(logits, labels)
    wanted = torch.nn.functional.mse_loss(logits.view(shape), labels.double())
    torch.testing.assert_close(result.loss_sum / result.denominator, wanted)
    ours = torch.autograd.grad(result.loss_sum / result.denominator, logits)
    torch.testing.assert_close(ours, torch.autograd.grad(wanted, logits))


def test_missing_targets_are_neither_summed_nor_counted_nor_differentiated() -> None:
    logits = torch.tensor([[1.0], [2.0], [5.0]], requires_grad=True)
    result = loss(logits, torch.tensor([3.0, float("nan"), -100.0]))
    result.loss_sum.backward()
    assert (result.loss_sum.item(), result.denominator) == (4.0, 1)
    assert logits.grad is not None
    assert logits.grad.tolist() == [[-4.0], [0.0], [0.0]]


def test_any_split_of_the_rows_adds_up() -> None:
    logits, labels = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 2)
    whole, first, rest = loss(logits, labels), loss(logits[:2], labels[:2]), loss(logits[2:], labels[2:])
    torch.testing.assert_close(first.loss_sum + rest.loss_sum, whole.loss_sum)
    assert first.denominator + rest.denominator == whole.denominator == 10


def test_whole_numbers_and_bfloat16_are_compared_in_float32() -> None:
    result = loss(torch.tensor([[1.5]], dtype=torch.bfloat16), torch.tensor([2]))
    assert result.loss_sum.dtype == torch.float32
    assert result.loss_sum.item() == 0.25


@pytest.mark.parametrize("labels", [torch.zeros(4), torch.zeros(3, 2), torch.zeros(3, 1, 1), [1.0, 2.0, 3.0]])
def test_shapes_that_differ_are_refused(labels: Any) -> None:
    with pytest.raises(DataError, match="labels"):
        loss(torch.zeros(3, 1), labels)


def test_it_is_found_by_name_and_says_what_it_needs() -> None:
    found = registry().build("MSELoss", "loss")
    assert isinstance(found, MSELoss)
    assert (found.require_logits, found.require_logps) == (True, False)
    with pytest.raises(TrainingStateError, match=r"needs outputs\['logits'\]"):
        found({"labels": torch.zeros(1)}, {"logps": torch.zeros(1, 1)})
