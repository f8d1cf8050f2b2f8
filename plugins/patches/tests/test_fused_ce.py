"""TransformersFusedCEPatch: the loss of plain cross entropy and its gradients, without logits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinkle.errors import PatchError
from twinkle.patch import TransformersFusedCEPatch, apply_context, apply_patch, undo_patch

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]])
LABELS = torch.tensor([[-100, -100, 7, 8, 9, 10], [11, -100, 13, 14, -100, -100]])
MASK = (IDS != 0).long()


def plain(model: Any, labels: Tensor = LABELS, count: float | None = None) -> Tensor:
    """Cross entropy of the model's own logits in float64, token by token."""
    logits = model(input_ids=IDS, attention_mask=MASK).logits
    terms = [
        -logits[row, place].log_softmax(-1)[labels[row, place + 1]]
        for row in range(2)
        for place in range(5)
        if labels[row, place + 1] != -100
    ]
    return torch.stack(terms).sum() / (len(terms) if count is None else count)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


FAMILIES = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 3.0},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_plain_cross_entropy(build: Any, family: str) -> None:
    model = build(family, **FAMILIES[family])
    wanted = gradients(model, plain(model))
    expected = plain(model).detach()
    with apply_context(model, TransformersFusedCEPatch):
        made = model(input_ids=IDS, attention_mask=MASK, labels=LABELS)
        found = gradients(model, made.loss)
    assert made.logits is None
    torch.testing.assert_close(made.loss.detach(), expected, rtol=1e-10, atol=1e-10)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11)


def test_an_adapter_is_seen_also_on_the_head(build: Any) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = get_peft_model(build("llama"), config).to(torch.float64)
    wanted = gradients(model, plain(model))
    apply_patch(model, "TransformersFusedCEPatch")
    found = gradients(model, model(input_ids=IDS, attention_mask=MASK, labels=LABELS).loss)
    undo_patch(model, "TransformersFusedCEPatch")
    assert any("lm_head" in name for name in wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("count", [3, torch.tensor(20)])
def test_the_number_of_items_of_a_step_divides(build: Any, count: Any) -> None:
    model = build()
    expected = plain(model, count=float(count))
    with apply_context(model, TransformersFusedCEPatch):
        made = model(input_ids=IDS, attention_mask=MASK, labels=LABELS, num_items_in_batch=count).loss
    torch.testing.assert_close(made, expected, rtol=1e-10, atol=1e-10)


def test_shifted_labels_are_taken_as_they_are(build: Any) -> None:
    model = build()
    shifted = nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)
    with apply_context(model, TransformersFusedCEPatch):
        made = model(input_ids=IDS, attention_mask=MASK, labels=LABELS, shift_labels=shifted).loss
    torch.testing.assert_close(made, plain(model), rtol=1e-10, atol=1e-10)


def test_no_trained_token_is_nan_as_without_the_patch(build: Any) -> None:
    model = build()
    labels = torch.full_like(LABELS, -100)
    own = model(input_ids=IDS, labels=labels).loss
    with apply_context(model, TransformersFusedCEPatch):
        assert model(input_ids=IDS, labels=labels).loss.isnan() == own.isnan()


def test_positional_arguments_mean_the_same(build: Any) -> None:
    model = build()
    with apply_context(model, TransformersFusedCEPatch):
        made = model(IDS, MASK, labels=LABELS).loss
    torch.testing.assert_close(made, plain(model), rtol=1e-10, atol=1e-10)


def test_whole_logits_never_exist(build: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            seen.append(out.numel() if isinstance(out, Tensor) and out.shape[-1:] == (264,) else 0)
            return out

    model = build()
    ids = torch.arange(700).remainder(200)[None]
    for part in model.model.parameters():
        part.requires_grad_(False)
    with apply_context(model, TransformersFusedCEPatch), Watch():
        model(input_ids=ids, labels=ids).loss.backward()
    assert 0 < max(seen) <= 2 * 256 * 264 < 700 * 264


@pytest.mark.parametrize(
    "options", [{}, {"labels": LABELS, "logits_to_keep": 6}, {"labels": LABELS, "return_dict": False}]
)
def test_everything_else_is_the_model_s_own_forward(build: Any, options: dict[str, Any]) -> None:
    model = build()
    own = model(input_ids=IDS, **options)
    with apply_context(model, TransformersFusedCEPatch):
        made = model(input_ids=IDS, **options)
    assert type(made) is type(own)
    for first, second in zip(own[:2], made[:2], strict=True):
        assert not isinstance(first, Tensor) or torch.equal(first, second)


def test_generation_is_as_before(build: Any) -> None:
    model = build("llama", torch.float32)
    own = model.generate(IDS[:1], max_new_tokens=4, do_sample=False)
    with apply_context(model, TransformersFusedCEPatch):
        assert torch.equal(model.generate(IDS[:1], max_new_tokens=4, do_sample=False), own)


def test_dropout_and_mode_are_not_touched(build: Any) -> None:
    model = build().train()
    model.lm_head.eval()
    with apply_context(model, TransformersFusedCEPatch):
        assert model.training
        assert not model.lm_head.training


class TestRefused:
    def test_a_loss_of_the_model_s_own(self, build: Any) -> None:
        model = build()
        model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
        with pytest.raises(PatchError, match="LlamaForCausalLM computes its loss in a way that is not known"):
            apply_patch(model, TransformersFusedCEPatch)

    def test_a_router_s_auxiliary_loss(self, build: Any) -> None:
        from transformers import Qwen3MoeConfig

        fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
        config = Qwen3MoeConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, **fields)
        with pytest.raises(PatchError, match="auxiliary loss"):
            apply_patch(build(config=config), TransformersFusedCEPatch)

    def test_a_model_without_a_head(self, build: Any) -> None:
        with pytest.raises(PatchError, match="LlamaModel has no head"):
            apply_patch(build().model, TransformersFusedCEPatch)

    def test_together_with_another_patch_of_forward(self, build: Any) -> None:
        model = build()
        apply_patch(model, TransformersFusedCEPatch)
        with pytest.raises(PatchError, match=r"TransformersEmbeddingPatch cannot replace LlamaForCausalLM\.forward"):
            apply_patch(model, "TransformersEmbeddingPatch")
