"""Losses called as published scripts call them: outputs with logits alone, results as a mapping, published numbers."""

import math
from typing import Any

import pytest
import torch

from twinkle.data_format import LossOutput
from twinkle.errors import ArgumentError, DataError, TrainingStateError
from twinkle.loss import (
    ChunkedCrossEntropyLoss,
    CISPOLoss,
    CPOLoss,
    CrossEntropyLoss,
    DPOLoss,
    GKDLoss,
    GRPOLoss,
    LigerFusedLinearCrossEntropyLoss,
    ORPOLoss,
)
from twinkle_torch.logit_scores import scores_of_logits

F64 = torch.float64
VOCABULARY = 11


def batch(rows: int = 4, width: int = 6) -> tuple[dict[str, Any], torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, VOCABULARY, (rows, width), generator=draw)
    labels[torch.rand(labels.shape, generator=draw) < 0.3] = -100
    labels[:, -1] = -100
    labels[:, 0] = 3
    logits = torch.randn(rows, width, VOCABULARY, generator=draw, dtype=F64) * 2
    return {"labels": labels}, logits.requires_grad_()


def log_p(inputs: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
    table = logits.log_softmax(-1).gather(-1, inputs["labels"].clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(inputs["labels"] != -100, table, 0.0)


@pytest.mark.parametrize("name", ["logps", "entropies", "uniform_logps"])
@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_scores_of_logits_are_those_of_a_soft_max(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle_torch.logit_scores.CHUNK_TOKENS", chunk)
    inputs, logits = batch()
    trained, table = inputs["labels"] != -100, logits.log_softmax(-1)
    by_hand = {
        "logps": log_p(inputs, logits),
        "entropies": torch.where(trained, -(table.exp() * table).sum(-1), 0.0),
        "uniform_logps": torch.where(trained, table.mean(-1), 0.0),
    }[name]
    weights = torch.randn(trained.shape, generator=torch.Generator().manual_seed(2), dtype=F64)
    (expected,) = torch.autograd.grad((by_hand * weights).sum(), logits)
    outputs: Any = {"logits": logits}
    found = scores_of_logits(inputs, outputs, name)  # type: ignore[arg-type]
    assert found is not None
    torch.testing.assert_close(found, by_hand, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
    assert outputs[name] is found
    assert scores_of_logits(inputs, outputs, name) is found  # type: ignore[arg-type]


def test_scores_of_logits_take_a_chunk_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle_torch.logit_scores.CHUNK_TOKENS", 2)
    inputs, logits = batch()
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.ndim == 2 and tensor.shape[-1] == VOCABULARY:
                    largest = max(largest, len(tensor))
            return out

    with Largest():
        CrossEntropyLoss()(inputs, {"logits": logits}).loss_sum.backward()  # type: ignore[arg-type]
    assert largest == 2
    assert logits.grad is not None


LOSSES: list[tuple[Any, dict[str, Any]]] = [
    (CrossEntropyLoss(), {}),
    (CrossEntropyLoss(dft=True), {}),
    (GRPOLoss(), {"advantages": [1.0, -1.0, 0.5, 2.0]}),
    (GRPOLoss(entropy_coef=0.1), {"advantages": [1.0, -1.0, 0.5, 2.0]}),
    (CISPOLoss(), {"advantages": [1.0, -1.0, 0.5, 2.0]}),
    (DPOLoss(reference_free=True), {}),
    (ORPOLoss(), {}),
]


@pytest.mark.parametrize(
    ("loss", "arguments"), LOSSES, ids=[type(loss).__name__ + str(i) for i, (loss, _) in enumerate(LOSSES)]
)
def test_logits_give_the_same_as_logps(loss: Any, arguments: dict[str, Any]) -> None:
    inputs, logits = batch()
    table = logits.log_softmax(-1)
    prepared = {"logps": log_p(inputs, logits), "entropies": -(table.exp() * table).sum(-1)}
    expected = loss(inputs, prepared, **arguments)
    found = loss(inputs, {"logits": logits}, **arguments)
    torch.testing.assert_close(found.loss_sum, expected.loss_sum, rtol=1e-12, atol=1e-12)
    assert found["num_tokens"] == expected["num_tokens"] == expected.denominator
    assert found["loss"] is found.loss_sum
    assert dict(found).keys() == {"loss", "num_tokens"}


@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropyLoss(),
        CrossEntropyLoss(dft=True),
        ChunkedCrossEntropyLoss(chunk_size=2),
        LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_flat_logits_give_the_same_as_those_of_rows(loss: Any) -> None:
    inputs, logits = batch()
    expected = loss(inputs, {"logits": logits})
    labels, rows = inputs["labels"].flatten(), logits.flatten(0, 1)
    found = loss({"labels": labels}, {"logits": rows})
    torch.testing.assert_close(found["loss"], expected["loss"])
    torch.testing.assert_close(*(torch.autograd.grad(out["loss"], logits)[0] for out in (found, expected)))
    assert found["num_tokens"].item() == expected["num_tokens"].item() == int((labels != -100).sum())


def test_smoothing_reads_logits_beside_logps() -> None:
    inputs, logits = batch()
    loss = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1)
    expected = loss(inputs, {"logits": logits})  # type: ignore[arg-type]
    found = loss(inputs, {"logits": logits, "logps": log_p(inputs, logits)})  # type: ignore[arg-type]
    torch.testing.assert_close(found["loss"], expected["loss"])
    with pytest.raises(TrainingStateError, match="uniform_logps"):
        loss(inputs, {"logps": log_p(inputs, logits)})  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [CrossEntropyLoss(), DPOLoss(reference_free=True), GRPOLoss()])
@pytest.mark.parametrize("name", ["logits", "logps"])
def test_labels_that_are_a_list_are_named(loss: Any, name: str) -> None:
    inputs, logits = batch()
    outputs = {"logits": logits, "logps": log_p(inputs, logits)}
    with pytest.raises(DataError, match="labels are a list; give a tensor"):
        loss({"labels": inputs["labels"].tolist()}, {name: outputs[name]})


def test_neither_logits_nor_logps_is_refused() -> None:
    inputs, logits = batch()
    with pytest.raises(TrainingStateError, match="logps"):
        CrossEntropyLoss()(inputs, {})  # type: ignore[arg-type]
    with pytest.raises(DataError, match="one label"):
        CrossEntropyLoss()(inputs, {"logits": logits[:, :3]})  # type: ignore[arg-type]
    with pytest.raises(DataError, match="below the 11 columns"):
        CrossEntropyLoss()({"labels": inputs["labels"] + 200}, {"logits": logits})  # type: ignore[arg-type]


def test_a_loss_output_is_built_and_read_in_the_published_form() -> None:
    total = torch.tensor(3.0)
    published = LossOutput(loss=total, num_tokens=torch.tensor(2))
    assert published["loss"] is total
    assert (float(published.denominator), published.is_mean) == (2.0, False)
    assert LossOutput(loss=total, num_tokens=0).is_mean
    assert not LossOutput(total, 0).is_mean
    assert LossOutput(total, 2.0).get("num_tokens") == 2.0
    with pytest.raises(KeyError):
        _ = published["logps"]
    for wrong in ({"loss": total}, {"loss_sum": total, "num_tokens": 1}, {}):
        with pytest.raises(ValueError, match="LossOutput"):
            LossOutput(**wrong)


# Closed forms of what the portability page states


def test_dft_is_the_published_term_with_its_probability_held_constant() -> None:
    inputs, logits = batch()
    logps = log_p(inputs, logits).detach().requires_grad_()
    out = CrossEntropyLoss(dft=True)(inputs, {"logps": logps})  # type: ignore[arg-type]
    trained = inputs["labels"] != -100
    value = -(logps.detach().exp() * logps.detach())[trained].sum()
    torch.testing.assert_close(out.loss_sum.detach(), value)
    (gradient,) = torch.autograd.grad(out.loss_sum, logps)
    torch.testing.assert_close(gradient, torch.where(trained, -logps.detach().exp(), 0.0))  # arXiv:2508.05629, eq. 9


@pytest.mark.parametrize("high", [None, 0.5])
def test_cispo_clips_at_one_plus_epsilon_high(high: float | None) -> None:
    inputs, logits = batch()
    logps = log_p(inputs, logits).detach().requires_grad_()
    old = logps.detach() - torch.linspace(-1, 1, logps.numel(), dtype=F64).view_as(logps)
    weights = [1.0, -1.0, 0.5, 2.0]
    out = CISPOLoss(epsilon=0.2, epsilon_high=high)(inputs, {"logps": logps}, old, advantages=weights)  # type: ignore[arg-type]
    bound, total, count = 1 + (0.2 if high is None else high), 0.0, 0
    for row, column in (inputs["labels"] != -100).nonzero().tolist():
        now = float(logps.detach()[row, column])
        total -= min(math.exp(now - float(old[row, column])), bound) * weights[row] * now
        count += 1
    assert float(out["loss"].detach()) == pytest.approx(total, rel=1e-12)
    assert out["num_tokens"] == count


def test_ipo_is_equation_17_without_beta_on_the_margin() -> None:
    inputs, logits = batch(2)
    logps = log_p(inputs, logits).detach()
    out = DPOLoss(beta=0.25, loss_type="ipo", reference_free=True)(inputs, {"logps": logps})  # type: ignore[arg-type]
    margin = float(logps[0].sum() - logps[1].sum())
    assert float(out["loss"]) == pytest.approx((margin - 2.0) ** 2, rel=1e-12)  # arXiv:2310.12036: 1 / (2 tau)
    scaled = (0.25 * margin - 2.0) ** 2  # the published scale
    assert abs(float(out["loss"]) - scaled) > 1


def test_the_likelihood_of_chosen_rows_is_a_mean_over_their_own_tokens() -> None:
    inputs, logits = batch(4)
    logps = log_p(inputs, logits).detach()
    counts = (inputs["labels"] != -100).sum(1)
    sums, means = logps.sum(1), logps.sum(1) / counts

    def log_sigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x))

    cpo = sum(-log_sigmoid(0.1 * float(sums[i] - sums[i + 1])) - float(means[i]) for i in (0, 2))
    assert float(CPOLoss()(inputs, {"logps": logps})["loss"]) == pytest.approx(cpo, rel=1e-12)  # type: ignore[arg-type]
    orpo = 0.0
    for i in (0, 2):
        p, q = math.exp(float(means[i])), math.exp(float(means[i + 1]))
        orpo += -math.log(p) - 0.1 * log_sigmoid(math.log(p / (1 - p)) - math.log(q / (1 - q)))
    assert float(ORPOLoss()(inputs, {"logps": logps})["loss"]) == pytest.approx(orpo, rel=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("rest", ["bucket", "renormalize"])
def test_gkd_top_k_is_exact_over_its_events(rest: Any) -> None:
    inputs, student = batch(1)
    _, teacher = batch(1, 6)
    teacher = teacher.detach().flip(-1)
    out = GKDLoss(beta=0.0, rest=rest)(inputs, {"logits": student}, teacher_logits=teacher, topk=3)  # type: ignore[arg-type]
    total = 0.0
    for column in (inputs["labels"][0] != -100).nonzero().flatten().tolist():
        t, s = teacher[0, column].softmax(-1), student.detach()[0, column].softmax(-1)
        best = t.topk(3).indices
        p, q = t[best], s[best]
        if rest == "bucket":
            p, q = torch.cat([p, 1 - p.sum(0, keepdim=True)]), torch.cat([q, 1 - q.sum(0, keepdim=True)])
        p, q = p / p.sum(), q / q.sum()
        total += float((p * (p / q).log()).sum())
    assert float(out["loss"].detach()) == pytest.approx(total, rel=1e-9)


def test_arguments_that_are_stricter_than_published_are_errors_and_value_errors() -> None:
    inputs, logits = batch()
    outputs: Any = {"logps": log_p(inputs, logits)}
    with pytest.raises(ValueError, match="advantages are missing"):
        GRPOLoss()(inputs, outputs)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reference is missing"):
        DPOLoss()(inputs, outputs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_items_in_batch"):
        CISPOLoss()(inputs, outputs, advantages=[1.0] * 4, num_items_in_batch=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="epsilon"):
        GRPOLoss(epsilon=-1)


def test_every_loss_has_its_published_short_name() -> None:
    from twinkle._registry import registry
    from twinkle.loss import torch_loss_mapping

    assert {"mse", "cross_entropy", "grpo", "dr_grpo", "dpo", "infonce"} <= set(torch_loss_mapping)
    for name, loss in torch_loss_mapping.items():
        assert registry().resolve(loss.__name__, "loss") is loss, name
