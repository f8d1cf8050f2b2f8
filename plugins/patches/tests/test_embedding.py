"""TransformersEmbeddingPatch: pooled hidden states, wherever the padding is."""

import copy
from typing import Any

import pytest
import torch

from twinkle.errors import ArgumentError, PatchError
from twinkle.patch import TransformersEmbeddingPatch, apply_context, apply_patch, undo_patch

ROWS = [[5, 6, 7], [5, 6, 8, 9, 10], [4]]


def padded(side: str) -> dict[str, torch.Tensor]:
    longest = max(map(len, ROWS))
    gaps = [longest - len(row) for row in ROWS]
    pairs = [([0] * g + row, [0] * g + [1] * len(row)) for g, row in zip(gaps, ROWS, strict=True)]
    if side == "right":
        pairs = [(row + [0] * g, [1] * len(row) + [0] * g) for g, row in zip(gaps, ROWS, strict=True)]
    return {
        "input_ids": torch.tensor([ids for ids, _ in pairs]), "attention_mask": torch.tensor([m for _, m in pairs]),
    }  # fmt: skip


def expected(model: Any) -> torch.Tensor:
    """Each row alone, without padding: its last hidden state divided by its length."""
    vectors = [model.model(input_ids=torch.tensor([row])).last_hidden_state[0, -1] for row in ROWS]
    return torch.stack([vector / vector.pow(2).sum().sqrt() for vector in vectors])


@pytest.mark.parametrize("side", ["left", "right"])
def test_embeddings_are_the_last_hidden_states_at_length_one(build: Any, side: str) -> None:
    model = build()
    batch = padded(side)
    if side == "left":
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with apply_context(model, TransformersEmbeddingPatch):
        made = model(**batch)
    torch.testing.assert_close(made["embeddings"], expected(model), rtol=1e-9, atol=1e-9)
    assert made.last_hidden_state.shape == (3, 5, 64)


def test_a_packed_row_has_one_for_each_sequence(build: Any) -> None:
    model = build()
    ids = torch.tensor([[token for row in ROWS for token in row]])
    positions = torch.tensor([[place for row in ROWS for place in range(len(row))]])
    with apply_context(model, "TransformersEmbeddingPatch"):
        made = model(input_ids=ids, position_ids=positions).embeddings
    torch.testing.assert_close(made, expected(model), rtol=1e-9, atol=1e-9)


def test_gradients_reach_an_adapter(build: Any, lora: Any) -> None:
    model = lora(build())
    apply_patch(model, TransformersEmbeddingPatch)
    out = model(**padded("right")).embeddings
    (out[0] @ out[1]).backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" in n and "lm_head" not in n)
    undo_patch(model, TransformersEmbeddingPatch)
    assert model(**padded("right")).logits.shape == (3, 5, 264)


def test_afterwards_the_model_is_as_before(build: Any) -> None:
    model = build()
    before = model(**padded("right")).logits
    attributes = dict(vars(model))
    with apply_context(model, TransformersEmbeddingPatch):
        pass
    assert vars(model) == attributes
    assert torch.equal(model(**padded("right")).logits, before)


def test_a_deep_copy_gives_embeddings_of_its_own_weights(build: Any) -> None:
    model = build()
    with apply_context(model, TransformersEmbeddingPatch):
        other = copy.deepcopy(model)
        with torch.no_grad():
            model.model.embed_tokens.weight.zero_()
        made = other(**padded("right")).embeddings
    torch.testing.assert_close(made, expected(other), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["labels", "logits_to_keep"])
def test_what_belongs_to_the_head_is_refused(build: Any, name: str) -> None:
    model = build()
    value = {"labels": torch.ones(3, 5, dtype=torch.long), "logits_to_keep": 1}[name]
    with apply_context(model, TransformersEmbeddingPatch), pytest.raises(ArgumentError, match=f"have no {name}"):
        model(**padded("right"), **{name: value})


def test_a_forward_that_something_else_has_wrapped_is_refused(build: Any) -> None:
    model = build()
    model.forward = lambda *args, **kwargs: None
    with pytest.raises(PatchError, match="wrapped by something else already"):
        apply_patch(model, TransformersEmbeddingPatch)
