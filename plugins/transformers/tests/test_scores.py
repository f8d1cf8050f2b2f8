"""What losses may ask of a forward: smoothed targets, chunks, positions of weight 0 left out, the product itself."""

from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle.data_format import LossOutput
from twinkle.errors import ArgumentError
from twinkle.loss import FusedLoss, HeadProduct, Loss
from twinkle.testing import tiny_model
from twinkle_transformers import backbone
from twinkle_transformers.model import TransformersModel

ROWS: list[Any] = [
    {"input_ids": [5, 6, 7, 8, 9], "labels": [6, 7, 8, 9, -100], "loss_scale": [1.0, 0.0, 0.5, 1.0, 0.0]},
    {"input_ids": [9, 8, 7], "labels": [8, 7, -100], "loss_scale": [0.0, 2.0, 0.0]},
]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp(request.param), architecture=request.param)


def build(folder: Path, loss: Any, *, lora: bool = False, **options: Any) -> TransformersModel:
    model = TransformersModel(model_id=str(folder), mixed_precision="no", attn_implementation="eager")
    if lora:
        torch.manual_seed(0)
        model.add_adapter_to_model("default", {"r": 4, "target_modules": "all-linear"})
    model.set_loss(loss, **options)
    return model


def gradients(model: TransformersModel) -> list[torch.Tensor]:
    return [p.grad for p in model.model.parameters() if p.grad is not None]


@pytest.mark.sample(10)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("CrossEntropyLoss", {"label_smoothing": 0.2}),
        ("ChunkedCrossEntropyLoss", {"chunk_size": 2}),
        ("LigerFusedLinearCrossEntropyLoss", {"label_smoothing": 0.2}),
    ],
)
@pytest.mark.parametrize("task", ["causal_lm", "fused_lm_ce"])
def test_loss_and_gradients_are_those_of_whole_logits(
    folder: Path, lora: bool, loss: str, options: Any, task: str
) -> None:
    model = build(folder, loss, lora=lora, **options)
    output = model.forward_backward(inputs=ROWS, task=task, micro_batch_size=1)
    ours = [grad.clone() for grad in gradients(model)]
    model.model.zero_grad()
    total: Any = 0.0
    for row in ROWS:
        logits = model.model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        terms = torch.nn.functional.cross_entropy(
            logits, torch.tensor(row["labels"]), reduction="none", label_smoothing=options.get("label_smoothing", 0.0)
        )
        total = total + (terms * torch.tensor(row["loss_scale"])).sum()
    total.backward()
    assert output["num_tokens"] == 6
    assert output["loss"] == pytest.approx(total.item() / 6, rel=1e-5)
    torch.testing.assert_close(ours, gradients(model), rtol=1e-3, atol=1e-5)


def test_positions_of_weight_zero_are_scored_only_where_somebody_may_want_them(folder: Path) -> None:
    model = build(folder, "CrossEntropyLoss")
    trained = model.forward_backward(inputs=ROWS)["logps"] != 0
    assert trained.tolist() == [[True, False, True, True, False], [False, True, False, False, False]]
    assert (model.forward_only(inputs=ROWS)["logps"] != 0).sum() == 6
    metrics = model.calculate_metric(is_training=True)
    assert metrics["total_tokens"] == 4

    def sums(inputs: Any, outputs: Any) -> LossOutput:
        return LossOutput(-outputs["logps"].sum(), 1)

    model.set_loss(sums)
    assert (model.forward_backward(inputs=ROWS)["logps"] != 0).sum() == 6


def test_the_head_is_told_the_chunk_size_of_the_loss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    score = backbone.score_tokens
    monkeypatch.setattr(
        backbone,
        "score_tokens",
        lambda *args, **options: told.append(options["chunk_tokens"]) or score(*args, **options),
    )
    build(folder, "ChunkedCrossEntropyLoss", chunk_size=3).forward_backward(inputs=ROWS)
    build(folder, "CrossEntropyLoss").forward_backward(inputs=ROWS)
    assert told == [3, 256]


class Fused(Loss):
    """Cross entropy that computes itself from the product."""

    skips_weight_zero = True
    seen: list[HeadProduct] = []  # noqa: RUF012

    def fuse(self, product: HeadProduct) -> FusedLoss | None:
        self.seen.append(product)
        logits = torch.nn.functional.linear(product.hidden, product.weight, product.bias)
        if product.softcap is not None:
            logits = product.softcap * torch.tanh(logits / product.softcap)
        terms = torch.nn.functional.cross_entropy(logits, product.targets, reduction="none")
        weights: Any = 1.0 if product.loss_scale is None else product.loss_scale
        return FusedLoss((terms * weights).sum(), logits.argmax(-1) if product.predictions else None)

    def __call__(self, inputs: Any, outputs: Any) -> LossOutput:
        total = outputs.get("fused_loss_sum")
        if total is None:
            total = -(outputs["logps"] * inputs["loss_scale"]).sum()
        return LossOutput(total, int((inputs["labels"] != -100).sum()))


def test_a_loss_may_make_the_product_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fused, "seen", [])
    fused, plain = build(folder, Fused), build(folder, "CrossEntropyLoss")
    ours, theirs = (model.forward_backward(inputs=ROWS, micro_batch_size=1) for model in (fused, plain))
    assert [len(product.targets) for product in Fused.seen] == [3, 1]
    assert "logps" not in ours
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert torch.equal(ours["predictions"], theirs["predictions"])
    torch.testing.assert_close(gradients(fused), gradients(plain), rtol=1e-3, atol=1e-5)
    assert fused.calculate_metric(True)["accuracy"] == plain.calculate_metric(True)["accuracy"]


def test_evaluation_and_whole_logits_do_not_ask_the_loss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fused, "seen", [])
    model = build(folder, Fused)
    assert "logps" in model.forward_only(inputs=ROWS)
    model.forward_backward(inputs=ROWS, return_logits=True)
    assert Fused.seen == []


def test_a_softcap_that_is_not_the_models_is_refused(folder: Path) -> None:
    model = build(folder, "LigerFusedLinearCrossEntropyLoss", softcap=7.0)
    with pytest.raises(ArgumentError, match=r"softcap of the loss must be that of .*, got 7.0"):
        model.forward_backward(inputs=ROWS)
    own = model.model.config.get_text_config()
    if getattr(own, "final_logit_softcapping", None):
        model.set_loss("LigerFusedLinearCrossEntropyLoss", softcap=own.final_logit_softcapping)
        assert model.forward_backward(inputs=ROWS)["loss"] > 0
