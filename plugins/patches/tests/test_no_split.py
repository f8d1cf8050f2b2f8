"""NoSplitModulesPatch: the list that a model is spread by."""

from typing import Any

import pytest
from torch import nn

from twinkle.errors import ArgumentError, PatchError
from twinkle.patch import NoSplitModulesPatch, apply_context, apply_patch, undo_patch


@pytest.mark.parametrize("given", ["LlamaMLP", ["LlamaMLP"], {"LlamaMLP"}, ("LlamaMLP",)])
def test_the_list_is_replaced_and_comes_back(build: Any, given: Any) -> None:
    model = build()
    own = model._no_split_modules
    with apply_context(model, NoSplitModulesPatch(given)):
        assert set(model._no_split_modules) == {"LlamaMLP"}
        assert type(model._no_split_modules) is type(own)
    assert model._no_split_modules is own
    assert set(own) == {"LlamaDecoderLayer"}


def test_by_name_the_list_goes_to_the_call(build: Any) -> None:
    model = build()
    apply_patch(model, "NoSplitModulesPatch", ["LlamaMLP", "LlamaAttention"])
    assert set(model._no_split_modules) == {"LlamaMLP", "LlamaAttention"}
    undo_patch(model, "NoSplitModulesPatch")


def test_a_model_with_an_adapter_passes_it_on(build: Any, lora: Any) -> None:
    model = build()
    wrapped = lora(model)
    with apply_context(wrapped, NoSplitModulesPatch("LlamaMLP")):
        assert set(model._no_split_modules) == {"LlamaMLP"}


@pytest.mark.parametrize("given", [[], "", [1], None])
def test_no_names_are_an_error(build: Any, given: Any) -> None:
    with pytest.raises(ArgumentError, match="module_names"):
        apply_patch(build(), "NoSplitModulesPatch", given)


def test_a_class_that_the_model_lacks_names_the_nearest(build: Any) -> None:
    with pytest.raises(ArgumentError, match="no module of class 'LlamaDecoder'; nearest: 'LlamaDecoderLayer'"):
        apply_patch(build(), NoSplitModulesPatch("LlamaDecoder"))


def test_other_modules_are_refused() -> None:
    with pytest.raises(
        PatchError, match=r"is for transformers models, and this is a torch\.nn\.modules\.linear\.Linear"
    ):
        apply_patch(nn.Linear(1, 1), NoSplitModulesPatch("Linear"))


@pytest.mark.parametrize("patch", [NoSplitModulesPatch("LlamaMLP"), "TransformersFusedCEPatch"])
def test_a_sharded_model_is_too_late(build: Any, monkeypatch: pytest.MonkeyPatch, patch: Any) -> None:
    model = build()
    monkeypatch.setattr("torch.distributed.tensor.DTensor", nn.Parameter)
    with pytest.raises(PatchError, match="LlamaForCausalLM is sharded already; apply the patch before that"):
        apply_patch(model, patch)
