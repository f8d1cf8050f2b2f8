"""Metrics that a script feeds by hand: rows, lists of tensors and plain lists give what a model's batches give."""

import math
from typing import Any

import pytest
import torch

from twinkle.errors import DataError
from twinkle.metric import Accuracy, DPOMetric, EmbeddingMetric, GRPOMetric, LossMetric

ROWS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7, 8], "labels": [-100, 7, 8, -100], "messages": [{"role": "user", "content": "a"}]},
    {"input_ids": [1, 2], "labels": [2, -100], "messages": []},
]
BATCH = {"labels": torch.tensor([[-100, 7, 8, -100], [2, -100, -100, -100]])}
LOGPS = torch.tensor([[0.0, -1.0, -2.0, 0.0, -200.0], [-0.5, 0.0, 0.0, 0.0, -200.0]])  # of a longer batch
OLD = [[-1.5, -1.0], [-0.25]]


def close(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[name], expected[name], rel_tol=1e-9) for name in expected), (found, expected)


@pytest.mark.parametrize(
    "logps",
    [LOGPS, [LOGPS[i : i + 1] for i in range(2)], LOGPS.tolist(), LOGPS.numpy()],
    ids=["tensor", "rows", "lists", "array"],
)
@pytest.mark.parametrize("inputs", [ROWS, {"labels": BATCH["labels"].tolist()}], ids=["rows", "lists"])
def test_a_policys_numbers(inputs: Any, logps: Any) -> None:
    metric, usual = GRPOMetric(), GRPOMetric()
    metric.accumulate(inputs, {"logps": logps}, old_logps=OLD, advantages=[1.0, -1.0])
    usual.accumulate(BATCH, {"logps": LOGPS[:, :4]}, old_logps=OLD, advantages=[1.0, -1.0])
    found = metric.calculate()
    close(found, usual.calculate())
    assert found["train/logp_diff_mean"] == pytest.approx((0.5 - 1.0 - 0.25) / 3)


def test_pairs_and_accuracy_and_embeddings() -> None:
    metric, usual = DPOMetric(beta=0.5), DPOMetric(beta=0.5)
    metric.accumulate(ROWS, {"logps": LOGPS.tolist()}, ref_logps=[[-1.0, -1.0], [-1.0]])
    usual.accumulate(BATCH, {"logps": LOGPS[:, :4]}, ref_logps=[[-1.0, -1.0], [-1.0]])
    close(metric.calculate(), usual.calculate())
    accuracy = Accuracy()
    logits = torch.zeros(2, 4, 10)
    logits[0, 1, 7] = logits[0, 2, 3] = logits[1, 0, 2] = 1.0
    accuracy.accumulate(ROWS, {"logits": list(logits)})
    close(accuracy.calculate(), {"accuracy": 2 / 3, "correct_tokens": 2, "total_tokens": 3})
    similar = EmbeddingMetric()
    rows = [{"input_ids": [1], "labels": [1]}, {"input_ids": [2, 3], "labels": [0]}]
    similar.accumulate(rows, {"embeddings": [[1.0, 0.0], [0.6, 0.8]]})
    assert similar.calculate()["pos_sim"] == pytest.approx(0.6)


def test_losses_are_sums_or_means_as_published() -> None:
    metric = LossMetric()
    metric.accumulate(ROWS, {"loss": torch.tensor(6.0), "num_tokens": torch.tensor(3)})
    metric.accumulate(ROWS, {"loss": 4.0, "num_tokens": 1})
    assert metric.calculate()["loss"] == 2.5
    metric.accumulate(ROWS, {"loss": 6.0, "num_tokens": 0})
    metric.accumulate(ROWS, {"loss": 2.0}, grad_norm=0.5)
    metric.accumulate(ROWS, {"loss": 1.0, "num_tokens": 7}, loss_reduction="mean")
    assert metric.calculate() == {"loss": 3.0, "grad_norm": 0.5}


def test_flat_labels_are_tokens_as_published() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([0, 0, 0, 4]), 10).float()
    labels = torch.tensor([0, 2, -100, 4])
    accuracy = Accuracy()
    for inputs in ({"labels": labels}, {"labels": labels.tolist()}):
        accuracy.accumulate(inputs, {"logits": logits})  # type: ignore[arg-type]
        close(accuracy.calculate(), {"accuracy": 2 / 3, "correct_tokens": 2, "total_tokens": 3})
    policy = GRPOMetric()
    for logps in (torch.tensor([-1.0, -2.0, -9.0, -3.0]), [-1.0, -2.0, -9.0, -3.0]):
        policy.accumulate({"labels": labels}, {"logps": logps}, old_logps=[[-1.0, -2.0, -2.0]])  # type: ignore[typeddict-item]
        assert policy.calculate()["train/mean_new_logp"] == -2.0


def test_a_completion_mask_restricts_the_accuracy() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[0, 0, 0, 4]]), 10).float()
    inputs: Any = {"labels": torch.tensor([[0, 2, -100, 4]]), "completion_mask": torch.tensor([[1, 0, 0, 0]])}
    accuracy = Accuracy()
    for given in (inputs, {name: value.bool() if name != "labels" else value for name, value in inputs.items()}):
        accuracy.accumulate(given, {"logits": logits})
        close(accuracy.calculate(), {"accuracy": 1.0, "correct_tokens": 1, "total_tokens": 1})
    accuracy.accumulate({name: value.tolist() for name, value in inputs.items()}, {"logits": logits.tolist()})
    close(accuracy.calculate(), {"accuracy": 1.0, "correct_tokens": 1, "total_tokens": 1})


def test_sums_without_a_number_are_divided_by_the_trained_tokens() -> None:
    metric, inputs = LossMetric(), {"labels": torch.tensor([[1, 2, -100]])}
    metric.accumulate(inputs, {"loss": torch.tensor(6.0)}, loss_reduction="sum")  # type: ignore[typeddict-item]
    assert metric.calculate() == {"loss": 3.0}
    metric.accumulate(ROWS, {"loss": 6.0}, loss_reduction="sum")  # type: ignore[arg-type]
    metric.accumulate(ROWS, {"loss": 4.0, "num_tokens": 1}, loss_reduction="sum")  # type: ignore[arg-type]
    assert metric.calculate() == {"loss": 2.5}


@pytest.mark.parametrize("kind", [LossMetric, GRPOMetric, DPOMetric, EmbeddingMetric, Accuracy])
def test_passes_without_outputs_are_not_counted(kind: Any) -> None:
    metric = kind(None, None)
    for outputs in ({}, None):
        metric.accumulate(BATCH, outputs)
    assert metric.calculate() == {}


def test_similarities_are_cosines_and_come_with_the_loss() -> None:
    metric = EmbeddingMetric(None, None)
    vectors = torch.tensor([[2.0, 0.0], [3.0, 4.0], [0.0, 5.0], [1.0, 0.0]])
    for name in ("embeddings", "logits"):
        outputs: Any = {name: vectors, "loss": torch.tensor(2.5)}
        metric.accumulate({"labels": torch.tensor([1, 0, 1, 0])}, outputs, grad_norm=0.5)
        wanted = {"pos_sim": 0.3, "pos_sim_min": 0.0, "pos_sim_max": 0.6, "neg_sim": 0.9, "loss": 2.5, "grad_norm": 0.5}
        found = metric.calculate()
        assert found.keys() == wanted.keys()
        assert all(math.isclose(found[key], wanted[key], abs_tol=1e-7) for key in wanted), found
    with pytest.raises(DataError, match="2 labels and 4 embeddings"):
        metric.accumulate({"labels": torch.tensor([1, 0])}, {"embeddings": vectors})


def test_what_does_not_fit_is_named() -> None:
    metric = GRPOMetric()
    for inputs, outputs, text in (
        ("text", {}, "list of encoded rows"),
        ({"input_ids": None}, {}, "needs 'labels'"),
        ([ROWS[0], {"input_ids": [1]}], {"logps": LOGPS}, "row 1 has no 'labels'"),
        (ROWS, {"logps": LOGPS[:1]}, "1 entries, and the inputs have 2 rows"),
        (ROWS, {"logps": LOGPS[:, :3]}, "3 values a row"),
    ):
        with pytest.raises(DataError, match=text):
            metric.accumulate(inputs, outputs)  # type: ignore[arg-type]
