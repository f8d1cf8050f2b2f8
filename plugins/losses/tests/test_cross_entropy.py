"""Cross entropy against torch's own in float64, whole and split."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle._registry import registry
from twinkle.errors import ArgumentError
from twinkle_losses.cross_entropy import CrossEntropyLoss


def batch(rows: int = 5, length: int = 7, vocabulary: int = 11) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(rows, length, vocabulary, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, vocabulary, (rows, length))
    labels[torch.rand(rows, length) < 0.4] = -100
    return {"labels": labels}, logits


def outputs(inputs: Any, logits: torch.Tensor) -> Any:
    labels = inputs["labels"]
    logps = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return {"logps": logps * (labels != -100)}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sum_over_denominator_is_torchs_mean_with_its_gradient(reduction: Any) -> None:
    inputs, logits = batch()
    result = CrossEntropyLoss(reduction=reduction)(inputs, outputs(inputs, logits))
    ours = result.loss_sum / result.denominator
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())
    torch.testing.assert_close(ours, wanted)
    torch.testing.assert_close(torch.autograd.grad(ours, logits), torch.autograd.grad(wanted, logits))


@settings(deadline=None)
@given(st.integers(1, 4))
def test_any_split_of_the_rows_adds_up(cut: int) -> None:
    inputs, logits = batch()
    whole = CrossEntropyLoss()(inputs, outputs(inputs, logits))
    parts = []
    for part in (slice(0, cut), slice(cut, None)):
        some = {"labels": inputs["labels"][part]}
        parts.append(CrossEntropyLoss()(some, outputs(some, logits[part])))
    torch.testing.assert_close(sum(p.loss_sum for p in parts), whole.loss_sum)
    assert sum(float(p.denominator) for p in parts) == whole.denominator


def test_dft_weights_each_token_by_its_own_constant_probability() -> None:
    inputs, logits = batch()
    result = CrossEntropyLoss(dft=True)(inputs, outputs(inputs, logits))
    terms = []
    for row, labels in zip(logits, inputs["labels"], strict=True):
        for z, label in zip(row, labels, strict=True):
            if label != -100:
                p = z.softmax(-1)[label]
                terms.append(-p.detach() * p.log())
    wanted = torch.stack(terms).sum()
    torch.testing.assert_close(result.loss_sum, wanted)
    torch.testing.assert_close(torch.autograd.grad(result.loss_sum, logits), torch.autograd.grad(wanted, logits))


def test_a_loss_scale_weights_tokens_but_not_the_count() -> None:
    inputs, logits = batch()
    inputs["loss_scale"] = torch.full(inputs["labels"].shape, 0.5, dtype=torch.float64)
    scaled = CrossEntropyLoss()(inputs, outputs(inputs, logits))
    del inputs["loss_scale"]
    plain = CrossEntropyLoss()(inputs, outputs(inputs, logits))
    torch.testing.assert_close(scaled.loss_sum, plain.loss_sum * 0.5)
    assert scaled.denominator == plain.denominator


def test_no_trained_token_counts_nothing_and_keeps_the_graph() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    inputs: Any = {"labels": torch.full((2, 3), -100)}
    result = CrossEntropyLoss()(inputs, outputs(inputs, logits))
    result.loss_sum.backward()
    assert result.denominator == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_it_is_found_by_name_and_refuses_what_it_does_not_know() -> None:
    assert registry().resolve("CrossEntropyLoss", "loss") is CrossEntropyLoss
    assert registry().resolve("twinkle-losses/CrossEntropyLoss", "loss") is CrossEntropyLoss
    with pytest.raises(ArgumentError, match="ignore_index"):
        registry().build("CrossEntropyLoss", "loss", ignore_indx=0)
    with pytest.raises(ValueError, match="reduction='none'; it must be 'mean' or 'sum'"):
        registry().build("CrossEntropyLoss", "loss", reduction="none")
