"""Patches of a model in the training loop: what it runs is the patched model, and afterwards its own again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle.errors import PatchError, Unsupported
from twinkle.model import TransformersModel
from twinkle.patch import Patch, applied_patches
from twinkle.testing import tiny_model

ROWS: Any = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}, {"input_ids": [9, 10], "labels": [10, -100]}]


class Sharper(Patch):
    """Doubles the logits of the whole model."""

    def __call__(self, module: Any) -> Any:
        base = module.get_base_model() if hasattr(module, "get_base_model") else module
        self.wrap(base, "forward", self.double)
        return module

    @staticmethod
    def double(original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        out.logits = 2 * out.logits
        return out


@pytest.fixture
def model(tmp_path: Path) -> TransformersModel:
    torch.manual_seed(0)
    return TransformersModel(model_id=str(tiny_model(tmp_path)), mixed_precision="no")


def logps(model: TransformersModel, **options: Any) -> Any:
    return model.forward_only(inputs=ROWS, **options)["logps"]


@pytest.mark.parametrize("adapter", [False, True])
def test_a_patched_forward_is_what_the_loop_runs(model: TransformersModel, adapter: bool) -> None:
    if adapter:
        model.add_adapter_to_model("default", {"r": 4, "target_modules": "all-linear"})
    own = logps(model)
    whole = model.forward_only(inputs=ROWS, return_logits=True)["logits"]
    model.apply_patch(Sharper)
    made = logps(model)
    expected = (2 * whole).log_softmax(-1)
    for row, tokens in enumerate(ROWS):
        for place, label in enumerate(tokens["labels"][:-1]):
            torch.testing.assert_close(made[row, place], expected[row, place, label], rtol=1e-5, atol=1e-6)
    model.undo_patch(Sharper)
    assert torch.equal(logps(model), own)
    assert model.backbone.splits


def test_a_patch_from_before_the_first_adapter_is_undone_too(model: TransformersModel) -> None:
    own = model.forward_only(inputs=ROWS)["logps"]
    model.apply_patch(Sharper)
    model.add_adapter_to_model("default", {"r": 4, "target_modules": "all-linear"})
    assert not torch.equal(logps(model), own)
    model.apply_patch("NoSplitModulesPatch", module_names="LlamaMLP")
    model.undo_patch(Sharper)
    model.undo_patch("NoSplitModulesPatch")
    torch.testing.assert_close(logps(model), own)
    assert applied_patches() == []


def test_fused_cross_entropy_changes_no_number_of_the_loop(model: TransformersModel) -> None:
    model.set_optimizer("AdamW", lr=1e-3)
    own = model.forward_backward(inputs=ROWS)["loss"]
    model.zero_grad()
    model.apply_patch("TransformersFusedCEPatch")
    assert abs(model.forward_backward(inputs=ROWS)["loss"] - own) < 1e-5
    model.undo_patch("TransformersFusedCEPatch")


def test_embeddings_instead_of_logits_are_refused_in_words(model: TransformersModel) -> None:
    model.apply_patch("TransformersEmbeddingPatch")
    with pytest.raises(Unsupported, match="use task='embedding'"):
        logps(model)
    made = model.forward_only(inputs=ROWS, task="embedding")["embeddings"]
    model.undo_patch("TransformersEmbeddingPatch")
    torch.testing.assert_close(made, model.forward_only(inputs=ROWS, task="embedding")["embeddings"])


def test_undoing_what_is_not_applied_is_an_error(model: TransformersModel) -> None:
    with pytest.raises(PatchError, match="Sharper is not applied to this LlamaForCausalLM"):
        model.undo_patch(Sharper)


def test_a_chat_template_is_not_the_model_s(model: TransformersModel) -> None:
    with pytest.raises(PatchError, match="LlamaForCausalLM has no chat template; give a tokenizer"):
        model.apply_patch("Qwen3ChatTemplate")
