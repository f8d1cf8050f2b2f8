"""GatedDeltaNetPaddingFreePatch: packed sequences compute what each computes alone."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from twinkle.errors import ArgumentError, PatchError
from twinkle.patch import GatedDeltaNetPaddingFreePatch, apply_context, apply_patch, undo_patch

LENGTHS = (7, 3, 12, 3)
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
FAMILIES = {"Qwen3NextConfig": SMALL | EXPERTS, "Qwen3_5TextConfig": SMALL, "OlmoHybridConfig": SMALL}
EVERY = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def model(build: Any) -> Any:
    def make(family: str = "Qwen3_5TextConfig") -> Any:
        made = build(config=getattr(transformers, family)(**FAMILIES[family]))
        made.config._experts_implementation = "eager"  # grouped products know no float64
        return made

    return make


def row() -> Tensor:
    return torch.randint(3, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))


def positions() -> Tensor:
    return torch.tensor([[place for length in LENGTHS for place in range(length)]])


def alone(model: Any) -> Tensor:
    """Logits of each sequence in a batch of its own."""
    return torch.cat([model(part, use_cache=False).logits for part in row().split(LENGTHS, dim=1)], dim=1)


def gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
    (logits * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_without_the_patch_sequences_leak(model: Any) -> None:
    made = model()
    assert (made(row(), position_ids=positions(), use_cache=False).logits - alone(made)).abs().max() > 1e-3


@pytest.mark.sample(2)
@EVERY
def test_each_sequence_computes_what_it_computes_alone(model: Any, family: str) -> None:
    made = model(family)
    wanted = alone(made)
    with apply_context(made, GatedDeltaNetPaddingFreePatch):
        found = made(row(), position_ids=positions()).logits
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # the delta rule itself is float32 here
        torch.testing.assert_close(alone(made), wanted, rtol=0, atol=0)


@pytest.mark.sample(2)
@EVERY
def test_gradients_are_theirs_too(model: Any, family: str) -> None:
    made = model(family)
    wanted = gradients(made, alone(made))
    with apply_context(made, GatedDeltaNetPaddingFreePatch):
        found = gradients(made, made(row(), position_ids=positions()).logits)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_recomputed_activations_see_the_same_sequences(model: Any) -> None:
    made = model().train()
    wanted = gradients(made, alone(made))
    made.activation_checkpointing_enable({"use_reentrant": False})
    with apply_context(made, GatedDeltaNetPaddingFreePatch):
        found = gradients(made, made(row(), position_ids=positions()).logits)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_lengths_may_be_given_instead_of_positions(model: Any) -> None:
    made = model()
    bounds = torch.tensor([0, 7, 10, 22, 25], dtype=torch.int32)
    with apply_context(made, "GatedDeltaNetPaddingFreePatch"):
        found = made(row(), cu_seq_lens_q=bounds).logits
    torch.testing.assert_close(found, alone(made), rtol=1e-5, atol=1e-6)


def test_a_model_with_an_adapter_takes_it(model: Any, lora: Any) -> None:
    made = lora(model())
    with apply_context(made, GatedDeltaNetPaddingFreePatch):
        found = made(input_ids=row(), position_ids=positions()).logits
    parts = [made(input_ids=part, use_cache=False).logits for part in row().split(LENGTHS, dim=1)]
    torch.testing.assert_close(found, torch.cat(parts, dim=1), rtol=1e-5, atol=1e-6)


def test_rows_of_one_sequence_and_generation_are_as_before(model: Any) -> None:
    made = model()
    ids = row()[:, :7]
    own = made(ids).logits, made.generate(ids, max_new_tokens=3, do_sample=False)
    with apply_context(made, GatedDeltaNetPaddingFreePatch):
        assert torch.equal(made(ids).logits, own[0])
        assert torch.equal(
            made(ids, position_ids=torch.arange(7)[None], attention_mask=torch.ones(1, 7)).logits, own[0]
        )
        assert torch.equal(made.generate(ids, max_new_tokens=3, do_sample=False), own[1])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": torch.tensor([[1] * 24 + [0]])}, "no padding; leave attention_mask out"),
        ({"use_cache": True}, "no cache; leave use_cache"),
        ({"position_ids": positions() + 1}, "begin at 0 with each"),
    ],
)
def test_what_a_packed_row_cannot_have_is_refused(model: Any, given: dict[str, Any], message: str) -> None:
    made = model()
    with apply_context(made, GatedDeltaNetPaddingFreePatch), pytest.raises(ArgumentError, match=message):
        made(row(), **{"position_ids": positions()} | given)


def test_two_packed_rows_are_refused(model: Any) -> None:
    made = model()
    with apply_context(made, GatedDeltaNetPaddingFreePatch), pytest.raises(ArgumentError, match="2 rows, some with"):
        made(row().repeat(2, 1), position_ids=positions().repeat(2, 1))


def test_a_model_without_such_layers_is_refused(build: Any) -> None:
    with pytest.raises(PatchError, match="LlamaForCausalLM has no gated delta-net layers"):
        apply_patch(build(), GatedDeltaNetPaddingFreePatch)


@pytest.mark.full
def test_a_model_in_which_they_still_leak_is_refused_and_left_as_it_was(model: Any) -> None:
    made = model()
    inner = made.model.layers[1].self_attn
    own = inner.forward
    inner.forward = lambda **kwargs: own(**kwargs | {"attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.float64)})
    with pytest.raises(
        PatchError, match=r"Qwen3_5ForCausalLM does not keep the sequences of a packed row apart: .*; pad instead"
    ):
        apply_patch(made, GatedDeltaNetPaddingFreePatch)
    assert "forward" not in vars(made.model)


@pytest.mark.full
def test_in_the_training_loop_it_stands_aside(model: Any, tmp_path: Any) -> None:
    from twinkle.model import TransformersModel

    made = model().float()
    made.save_pretrained(tmp_path)
    rows = [{"input_ids": part.tolist(), "labels": part.tolist()} for part in row()[0].split(LENGTHS)]
    losses = []
    for patched in (False, True):
        trained = TransformersModel(model_id=str(tmp_path), mixed_precision="no")
        trained.set_processor("InputProcessor", padding_free=True)
        trained.set_optimizer("AdamW", lr=1e-3)
        if patched:
            trained.apply_patch("GatedDeltaNetPaddingFreePatch")
        losses.append(trained.forward_backward(inputs=rows)["loss"])
        if patched:
            undo_patch(trained.model, "GatedDeltaNetPaddingFreePatch")
    assert losses[0] == losses[1]
