"""Tiny models in float64, and the promise that no test leaves a patch behind."""

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from twinkle.patch import applied_patches
from twinkle.testing import tiny_config


@pytest.fixture(autouse=True)
def _nothing_stays_patched() -> Iterator[None]:
    before = Counter(applied_patches())  # of models that other tests still hold
    yield
    if Counter(applied_patches()) - before:
        gc.collect()
    assert Counter(applied_patches()) - before == Counter()


@pytest.fixture
def build() -> Any:
    """Return a function that makes a tiny random causal model in float64."""
    from transformers import AutoModelForCausalLM

    def make(architecture: str = "llama", dtype: torch.dtype = torch.float64, config: Any = None, **fields: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = AutoModelForCausalLM.from_config(config or tiny_config(architecture, **fields), dtype=torch.float32)
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.add_(torch.randn(parameter.shape) * 0.1)
        return made.to(dtype).eval()

    return make


@pytest.fixture
def lora() -> Any:
    """Return a function that puts an adapter with random weights on a model."""
    from peft import LoraConfig, get_peft_model

    def wrap(model: Any) -> Any:
        wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        return wrapped.to(torch.float64)

    return wrap
