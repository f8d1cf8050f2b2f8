"""Adapters on experts give each token what PEFT gives it where its adapter is alone, and PEFT reads their files."""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from twinkle.errors import ArgumentError, CheckpointError, Unsupported
from twinkle.torch.grouped import Groups
from twinkle.torch.layout import Layout, Shape
from twinkle.torch.lowrank import Cohort, Routing, stack
from twinkle.torch.segments import Segments
from twinkle_transformers.pool.expert_files import from_peft, match_experts, to_peft
from twinkle_transformers.pool.experts import find_expert_sites, install_experts, uninstall_experts
from twinkle_transformers.pool.sites import find_sites, install, uninstall
from twinkle_transformers.segments import Segmenter

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3MoeConfig", {}),
    "qwen2-moe": ("Qwen2MoeConfig", {"shared_expert_intermediate_size": 16}),
    "mixtral": ("MixtralConfig", {}),
    "gpt-oss": ("GptOssConfig", {"sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
            "v_head_dim": 6, "qk_nope_head_dim": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        },
    ),
}  # fmt: skip
BOTH = ("experts.gate_up_proj", "experts.down_proj")
LINEAR = ["q_proj", "q_b_proj", "o_proj"]
LENGTHS = (9, 4, 1, 13)
"""Of the sequences; each is a row of its own where PEFT is alone."""


def make(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    name, changes = MODELS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**(SMALL | changes)), dtype=dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # transformers' grouped products are for narrower numbers
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim != 1 or not parameter.any():
                parameter.normal_(std=0.2)
    return model.requires_grad_(False)


class Adapter:
    """An adapter of random weights, and its configuration for PEFT."""

    def __init__(self, model: Any, rank: int, *, targets: Sequence[str] = BOTH, seed: int = 0, alpha: int = 12) -> None:
        self.rank, self.targets, self.alpha = rank, list(targets), alpha
        self.linears = {n: s for n, s in find_sites(model).items() if n.rpartition(".")[2] in LINEAR}
        everything = find_expert_sites(model)
        self.experts = {n: everything[n] for n in match_experts("a", self.config(), everything, model)}
        shapes = [(n, Shape(rank, s.fan_in, s.fan_out, alpha / rank)) for n, s in self.linears.items()]
        shapes += [(n, Shape(rank, s.fan_in, s.fan_out, alpha / rank, s.experts)) for n, s in self.experts.items()]
        self.layout = Layout.of(shapes)
        draw = torch.Generator().manual_seed(seed)
        self.flat = (torch.randn(self.layout.size, generator=draw, dtype=torch.float64) * 0.3).to(model.dtype)

    def config(self) -> LoraConfig:
        return LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=LINEAR, target_parameters=self.targets)

    def tensors(self, flat: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in self.linears:
            entry = self.layout.entries[name]
            found[f"base_model.model.{name}.lora_A.weight"] = entry.down_of(flat).clone()
            found[f"base_model.model.{name}.lora_B.weight"] = entry.up_of(flat).t().contiguous()
        for name, site in self.experts.items():
            found |= to_peft(site, self.layout.entries[name], flat, self.layout.entries)
        return found

    def peft(self, kind: str, dtype: torch.dtype) -> Any:
        """Return PEFT's model with these weights."""
        model = quietly_wrapped(make(kind, dtype), self.config())
        parameters = dict(model.named_parameters())
        mine = {key.replace(".weight", ".default.weight"): value for key, value in self.tensors(self.flat).items()}
        assert mine.keys() == {name for name, value in parameters.items() if value.requires_grad}
        with torch.no_grad():
            for key, value in mine.items():
                parameters[key].copy_(value)
        return model


def quietly_wrapped(model: Any, config: LoraConfig) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, config)


@contextmanager
def installed(model: Any) -> Iterator[None]:
    linears, experts = list(find_sites(model).values()), list(find_expert_sites(model).values())
    install(linears)
    install_experts(experts)
    yield
    uninstall(linears)
    uninstall_experts(experts)


def tokens(lengths: Sequence[int]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randint(3, 64, (length,), generator=draw) for length in lengths]


def weigh(logits: Tensor, number: int) -> Tensor:
    """Return a scalar that depends on all logits of a sequence `[T, V]`, with other factors for each sequence."""
    draw = torch.Generator().manual_seed(number)
    return (logits * torch.randn(logits.shape, generator=draw, dtype=torch.float64).to(logits)).sum()


def fused(model: Any, cohorts: list[Cohort], trained: int, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """Run one pass; return the logits of each sequence, after the backward of those that are trained."""
    routing = Routing(cohorts, sum(lengths), trained)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with installed(model), Segmenter(model).within(Segments.of(lengths), routing):
        logits = model(torch.cat(tokens(lengths))[None], position_ids=positions, use_cache=False).logits[0]
        parts = logits.split(list(lengths))
        if trained:
            torch.stack([weigh(part, number) for number, part in enumerate(parts)]).sum().backward()
    return [part.detach() for part in parts]


def alone(model: Any, number: int, lengths: Sequence[int] = LENGTHS) -> Tensor:
    """Run one sequence by itself, backward too where something can have a gradient; return its logits."""
    logits = model(tokens(lengths)[number][None], use_cache=False).logits[0]
    if logits.requires_grad:
        weigh(logits, number).backward()
    return logits.detach()


def error(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm())


def cohort(adapters: Sequence[Adapter], start: int, lengths: Sequence[int]) -> Cohort:
    weights = stack([adapter.flat for adapter in adapters], adapters[0].flat.dtype)
    return Cohort(adapters[0].layout, Groups(start, tuple(lengths)), weights, torch.zeros_like(weights))


def gradients_of(adapter: Adapter, flat: Tensor) -> dict[str, Tensor]:
    return {key.replace(".weight", ".default.weight"): value for key, value in adapter.tensors(flat).items()}


def assert_gradients(adapter: Adapter, flat: Tensor, wrapped: Any, limit: float) -> None:
    parameters = dict(wrapped.named_parameters())
    for key, mine in gradients_of(adapter, flat).items():
        assert error(mine, parameters[key].grad) < limit, key


@pytest.mark.parametrize("kind", MODELS)
def test_two_adapters_of_different_rank_in_one_pass_are_each_as_with_peft_alone(kind: str) -> None:
    model = make(kind)
    first, second = Adapter(model, 4, seed=1), Adapter(model, 3, seed=2)
    cohorts = [cohort([first], 0, [LENGTHS[0]]), cohort([second], LENGTHS[0], [sum(LENGTHS[1:])])]
    logits = fused(model, cohorts, sum(LENGTHS))
    for adapter, mine, numbers in ((first, cohorts[0], [0]), (second, cohorts[1], [1, 2, 3])):
        wrapped = adapter.peft(kind, torch.float64)
        for number in numbers:
            assert error(logits[number], alone(wrapped, number)) < 1e-10
        assert mine.grads is not None
        assert_gradients(adapter, mine.grads[0], wrapped, 1e-10)
    assert all(parameter.grad is None for parameter in model.parameters())
