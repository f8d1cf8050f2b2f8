"""task='embedding': the last token of each row, wherever the padding is; contrastive training over the model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle.errors import ArgumentError, TrainingStateError, Unsupported
from twinkle.testing import tiny_model
from twinkle_torch.pooling import last_tokens
from twinkle_transformers.model import TransformersModel

ROWS: list[Any] = [
    {"input_ids": [5, 6, 7], "labels": 1},
    {"input_ids": [5, 6, 8, 9, 10], "labels": 0},
    {"input_ids": [0], "labels": 0},
    {"input_ids": [7, 0], "labels": 1},
    {"input_ids": [7, 8, 9, 0], "labels": 0},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3")


def build(folder: Path, *, lora: bool = True, **options: Any) -> TransformersModel:
    torch.manual_seed(0)
    model = TransformersModel(model_id=str(folder), mixed_precision="no", **options)
    if lora:
        model.add_adapter_to_model("default", {"r": 4, "target_modules": "all-linear"})
    model.set_loss("InfonceLoss")
    model.set_optimizer("SGD", lr=0.1, weight_decay=0.0)
    return model


def by_hand(model: TransformersModel, row: Any) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.model.base_model.model.model(torch.tensor([row["input_ids"]])).last_hidden_state
    return hidden[0, -1] / hidden[0, -1].square().sum().sqrt()


@pytest.mark.sample(2)
@pytest.mark.parametrize("processor", [{}, {"padding_side": "left"}, {"pad_to_multiple_of": 8}, {"padding_free": True}])
@pytest.mark.parametrize("size", [None, 2])
def test_an_embedding_is_the_last_tokens_state_at_length_one(folder: Path, processor: Any, size: int | None) -> None:
    model = build(folder)
    model.set_processor("InputProcessor", **processor)
    found = model.forward_only(inputs=ROWS, task="embedding", micro_batch_size=size)
    assert set(found) == {"embeddings"}
    wanted = torch.stack([by_hand(model, row) for row in ROWS])
    torch.testing.assert_close(found["embeddings"], wanted, rtol=1e-4, atol=1e-5)


def test_the_last_tokens_of_packed_and_padded_rows() -> None:
    batch = {
        "input_ids": torch.zeros(3, 5, dtype=torch.int64),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 0], [0, 0, 0, 1, 2], [0, 1, 0, 0, 1]]),
    }
    assert last_tokens(batch).tolist() == [2, 9, 11, 12, 14]
    assert last_tokens({"input_ids": batch["input_ids"]}).tolist() == [4, 9, 14]


@pytest.mark.parametrize("lora", [True, False])
def test_contrastive_training_brings_positives_near(folder: Path, lora: bool) -> None:
    model = build(folder, lora=lora)
    model.add_metric("EmbeddingMetric", is_training=True)
    seen = []
    for _ in range(4):
        model.forward_backward(inputs=ROWS, task="embedding")
        model.clip_grad_and_step()
        seen.append(model.calculate_metric(is_training=True))
    assert seen[-1]["loss"] < seen[0]["loss"]
    assert seen[-1]["pos_sim"] > seen[0]["pos_sim"]
    assert "accuracy" not in seen[0]


def test_its_gradient_is_autograds(folder: Path) -> None:
    model = build(folder, lora=False)
    model.forward_backward(inputs=ROWS, task="embedding")
    ours = model.model.model.norm.weight.grad.clone()
    model.model.zero_grad()
    e = []
    for row in ROWS:
        hidden = model.model.model(torch.tensor([row["input_ids"]])).last_hidden_state[0, -1]
        e.append(hidden / hidden.norm())
    documents = torch.stack([e[1], e[2], e[4]])
    loss = sum(-(e[q] @ documents.T / 0.1).log_softmax(-1)[d] for q, d in ((0, 0), (3, 2)))
    loss.backward()  # type: ignore[union-attr]
    torch.testing.assert_close(ours, model.model.model.norm.weight.grad, rtol=1e-3, atol=1e-4)


def test_a_loss_over_the_batch_refuses_micro_batches_and_one_over_groups_takes_them(folder: Path) -> None:
    model = build(folder)
    with pytest.raises(ArgumentError, match=r"InfonceLoss compares all rows .* leave micro_batch_size out"):
        model.forward_backward(inputs=ROWS, task="embedding", micro_batch_size=3)
    model.set_loss("InfonceLoss", use_batch=False)
    whole = model.forward_backward(inputs=ROWS, task="embedding")["loss"]
    split = model.forward_backward(inputs=ROWS, task="embedding", micro_batch_size=3)["loss"]
    assert split == pytest.approx(whole, rel=1e-5)


def test_what_an_embedding_has_no_use_for_is_refused(folder: Path) -> None:
    model = build(folder)
    for options in ({"return_logits": True}, {"temperature": 0.5}):
        with pytest.raises(ArgumentError, match="task='embedding' makes no logits"):
            model.forward_only(inputs=ROWS, task="embedding", **options)
    with pytest.raises(TrainingStateError, match="call with task='embedding'"):
        model.forward_backward(inputs=ROWS)
    with pytest.raises(Unsupported, match="choose 'causal_lm', 'fused_lm_ce' or 'embedding'"):
        model.forward_only(inputs=ROWS, task="embeddings")


def test_a_model_without_head_embeds_the_same_and_predicts_nothing(folder: Path) -> None:
    headless = build(folder, lora=False, model_cls="AutoModel")
    wanted = build(folder, lora=False).forward_only(inputs=ROWS, task="embedding")["embeddings"]
    assert torch.equal(headless.forward_only(inputs=ROWS, task="embedding")["embeddings"], wanted)
    with pytest.raises(Unsupported, match="Qwen3Model has no head; use task='embedding'"):
        headless.forward_only(inputs=ROWS)
    headless.add_adapter_to_model("default", {"r": 4, "target_modules": "all-linear"})
    headless.set_loss("InfonceLoss")
    assert headless.forward_backward(inputs=ROWS, task="embedding")["num_tokens"] == 2
