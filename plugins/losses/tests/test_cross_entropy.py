"""Cross entropy against torch's own in float64, whole and split."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle._registry import registry
from twinkle.errors import ArgumentError, TrainingStateError
from twinkle_losses.chunked import ChunkedCrossEntropyLoss
from twinkle_losses.cross_entropy import CrossEntropyLoss
from twinkle_losses.liger import LigerFusedLinearCrossEntropyLoss

CLASSES = (CrossEntropyLoss, ChunkedCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss)


def batch(rows: int = 5, length: int = 7, vocabulary: int = 11) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(rows, length, vocabulary, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, vocabulary, (rows, length))
    labels[torch.rand(rows, length) < 0.4] = -100
    return {"labels": labels}, logits


def outputs(inputs: Any, logits: torch.Tensor) -> Any:
    labels = inputs["labels"]
    log_p = logits.log_softmax(-1)
    logps = log_p.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return {"logps": logps * (labels != -100), "uniform_logps": log_p.mean(-1) * (labels != -100)}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("loss", CLASSES)
def test_sum_over_denominator_is_torchs_mean_with_its_gradient(loss: Any, smoothing: float, reduction: Any) -> None:
    inputs, logits = batch()
    result = loss(reduction=reduction, label_smoothing=smoothing)(inputs, outputs(inputs, logits))
    ours = result.loss_sum / result.denominator
    wanted = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), inputs["labels"].flatten(), label_smoothing=smoothing
    )
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


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"dft": True}])
def test_a_weight_multiplies_its_token_and_leaves_the_count(options: Any) -> None:
    inputs, logits = batch()
    weights = torch.rand(inputs["labels"].shape, dtype=torch.float64).round(decimals=1)
    made: Any = outputs(inputs, logits)
    result = CrossEntropyLoss(**options)({**inputs, "loss_scale": weights}, made)
    wanted = 0.0
    for row, column in (inputs["labels"] != -100).nonzero().tolist():
        one = {"labels": inputs["labels"][row : row + 1, column : column + 1]}
        alone = {name: value[row : row + 1, column : column + 1] for name, value in made.items()}
        term = CrossEntropyLoss(**options)(one, alone).loss_sum
        wanted += float(weights[row, column]) * term.item()
    assert float(result.loss_sum.detach()) == pytest.approx(wanted, rel=1e-12)
    assert result.denominator == int((inputs["labels"] != -100).sum())


def test_another_ignored_label_is_not_trained_either() -> None:
    inputs, logits = batch()
    inputs["labels"][0, 0] = 3
    result = CrossEntropyLoss(ignore_index=3)(inputs, outputs(inputs, logits))
    kept = {"labels": inputs["labels"].masked_fill(inputs["labels"] == 3, -100)}
    wanted = CrossEntropyLoss()(kept, outputs(kept, logits))
    torch.testing.assert_close(result.loss_sum, wanted.loss_sum)
    assert result.denominator == wanted.denominator


def test_no_trained_token_counts_nothing_and_keeps_the_graph() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    inputs: Any = {"labels": torch.full((2, 3), -100)}
    result = CrossEntropyLoss()(inputs, outputs(inputs, logits))
    result.loss_sum.backward()
    assert result.denominator == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_a_chunk_size_is_what_the_head_is_told() -> None:
    assert ChunkedCrossEntropyLoss().chunk_tokens == 1024
    assert ChunkedCrossEntropyLoss(chunk_size=8).chunk_tokens == 8
    assert CrossEntropyLoss().chunk_tokens is None


@pytest.mark.parametrize("loss", CLASSES)
def test_it_is_found_by_name_and_refuses_what_it_does_not_know(loss: Any) -> None:
    name = loss.__name__
    assert registry().resolve(name, "loss") is loss
    assert registry().resolve(f"twinkle-losses/{name}", "loss") is loss
    with pytest.raises(ArgumentError, match="ignore_index"):
        registry().build(name, "loss", ignore_indx=0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("CrossEntropyLoss", {"reduction": "none"}, "reduction='none'; it must be 'mean' or 'sum'"),
        ("CrossEntropyLoss", {"label_smoothing": 1.0}, "label_smoothing=1.0; it must be a number in"),
        ("CrossEntropyLoss", {"label_smoothing": "a"}, "label_smoothing='a'"),
        ("CrossEntropyLoss", {"ignore_index": None}, "ignore_index=None; it must be a whole number"),
        ("CrossEntropyLoss", {"dft": True, "label_smoothing": 0.1}, "leave label_smoothing out"),
        ("CrossEntropyLoss", {"dft": "no"}, "dft='no'; it must be True or False"),
        ("ChunkedCrossEntropyLoss", {"chunk_size": 0}, "chunk_size=0; it must be a whole number of at least 1"),
        ("ChunkedCrossEntropyLoss", {"chunk_size": 1.5}, "chunk_size=1.5"),
        ("LigerFusedLinearCrossEntropyLoss", {"softcap": 0.0}, "softcap=0.0; it must be a finite number above 0"),
    ],
)
def test_values_outside_their_range_are_refused(name: str, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        registry().build(name, "loss", **options)


def test_a_forward_of_another_task_is_named() -> None:
    inputs, _ = batch()
    with pytest.raises(TrainingStateError, match=r"needs outputs\['logps'\], but the forward gave \['embeddings'\]"):
        CrossEntropyLoss()(inputs, {"embeddings": torch.zeros(5, 2)})
