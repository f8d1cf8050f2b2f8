"""What tests of the sampler's engine share: prompts, a tiny model, adapters of several kinds, and short ways to ask."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rounding import FACTOR, rounds_alike, units

from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model
from twinkle_torch.numerics import RoundingNoise
from twinkle_transformers.loading import load_model

GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(0, 256, (n,), generator=GENERATOR).tolist() for n in (3, 21, 1, 40, 8, 16, 17, 5, 33)]
LENGTHS = (9, 20, 14, 3, 25, 11, 6, 18, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers differ."""
    return tiny_model(tmp_path_factory.mktemp("base"), "qwen3", initializer_range=0.3)


@pytest.fixture(scope="module")
def module(folder: Path) -> Any:
    """The model, loaded."""
    return load_model(folder)[0]


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folders of adapters of several ranks and targets, and PEFT's model with all of them."""
    target = tmp_path_factory.mktemp("adapters")
    model, _ = load_model(folder)
    configs = {
        "small": LoraConfig(r=2, target_modules="all-linear"),
        "other": LoraConfig(r=2, target_modules="all-linear"),
        "large": LoraConfig(r=6, lora_alpha=12, target_modules=["q_proj", "down_proj"], use_rslora=True),
        "head": LoraConfig(r=3, target_modules=["v_proj", "lm_head"], rank_pattern={"v_proj": 4}),
    }
    wrapped: Any = None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, config in configs.items():
            if wrapped is None:
                wrapped = get_peft_model(model, config, adapter_name=name)
            else:
                wrapped.add_adapter(name, config)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    wrapped.save_pretrained(target, save_embedding_layers=False)
    return target, wrapped.eval()


def rows(prompts: Sequence[Sequence[int]] = PROMPTS) -> list[dict[str, list[int]]]:
    """Return prompts as rows."""
    return [{"input_ids": list(ids)} for ids in prompts]


def tokens_of(responses: Sequence[Any]) -> list[list[list[int]]]:
    """Return the tokens of each sample of each response."""
    return [[sequence.tokens for sequence in response.sequences] for response in responses]


def sampler_of(folder: Path, **kwargs: Any) -> Any:
    """Return a sampler that is an engine."""
    sampler: Any = TorchSampler(folder, **kwargs)
    assert sampler._service.engine is not None
    return sampler


def assert_same_scores(model: Any, prompt: list[int], one: Any, other: Any) -> None:
    """Demand equal bits of two samples' log-probabilities where products round alike, else what rounding explains."""
    weights = [value for value in model.parameters() if value.ndim == 2]
    if all(rounds_alike(weights, 8, rows) for rows in (16, 64)):
        assert one.logprobs == other.logprobs
        return
    ids = torch.tensor([[*prompt, *one.tokens]])
    with torch.no_grad():
        plain = model(input_ids=ids).logits.double().log_softmax(-1)
        with RoundingNoise(0, units=units()):
            moved = model(input_ids=ids).logits.double().log_softmax(-1)
    limit = FACTOR * float((moved - plain).abs().max())
    assert limit < 1e-3, "a fault would be as small"
    for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], rel=0, abs=limit)
