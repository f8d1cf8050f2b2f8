"""Tiny models, and the promise that no test leaves a kernel behind."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from twinkle.patch import applied_patches
from twinkle.testing import tiny_config


@pytest.fixture(autouse=True)
def _nothing_stays_kernelized() -> Iterator[None]:
    yield
    if applied_patches():
        gc.collect()
    assert applied_patches() == []


@pytest.fixture
def build() -> Any:
    """Return a function that makes a tiny random causal model whose norms are not all ones."""
    from transformers import AutoModelForCausalLM

    def make(architecture: str = "llama", dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = AutoModelForCausalLM.from_config(tiny_config(architecture, **fields), dtype=torch.float32)
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.add_(torch.randn(parameter.shape) * 0.1)
        return made.to(dtype).eval()

    return make
