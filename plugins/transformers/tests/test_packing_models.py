"""Sequences in one row give each model the gradients that each alone gives it, and models that cannot are refused."""

import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoModelForCausalLM

from twinkle.errors import TrainingStateError, Unsupported
from twinkle_torch.segments import Segments
from twinkle_transformers.segments import NAME, Segmenter, recompute_contexts

LENGTHS = (11, 4, 9, 4, 1, 17)
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SMALL),
    "qwen2": ("Qwen2Config", SMALL),
    "qwen2-sliding": ("Qwen2Config", SMALL | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", SMALL | HEADS),
    "qwen3-moe": ("Qwen3MoeConfig", SMALL | HEADS | EXPERTS),
    "mistral": ("MistralConfig", SMALL | {"sliding_window": 5}),
    "gemma2": ("Gemma2Config", SMALL | HEADS | {"sliding_window": 5, "attn_logit_softcapping": 0.2}),
    "gemma3": (
        "Gemma3TextConfig",
        SMALL | HEADS | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt-oss": ("GptOssConfig", SMALL | HEADS | EXPERTS | {"sliding_window": 5}),
    "deepseek-v3": (
        "DeepseekV3Config",
        SMALL | {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
            "qk_nope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        },
    ),
    "qwen3-next": ("Qwen3NextConfig", SMALL | HEADS | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 16}),
    "qwen3.5": ("Qwen3_5TextConfig", SMALL | HEADS | LINEAR),
    "lfm2": ("Lfm2Config", SMALL | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "mamba": ("MambaConfig", MAMBA),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0,
            "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
}  # fmt: skip


def made(name: str, dtype: torch.dtype = torch.float32, attention: str | None = None, **changes: Any) -> Any:
    kind, fields = MODELS[name]
    torch.manual_seed(0)
    options = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**(fields | changes)), dtype=torch.float32, **options
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # Small random weights hardly attend; larger ones make leaks plain.
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.to(dtype).train()


def ids(seed: int = 3) -> Tensor:
    return torch.randint(3, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(seed))


def weighed(hidden: list[Tensor]) -> Tensor:
    """A scalar that every number of the hidden states has a part in."""
    flat = torch.cat([x.reshape(-1, x.shape[-1]) for x in hidden])
    return (flat * torch.randn(flat.shape, generator=torch.Generator().manual_seed(5)).to(flat.dtype)).sum()


def gradients(model: Any, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(model: Any) -> dict[str, Tensor]:
    parts = torch.split(ids(), LENGTHS, dim=1)
    return gradients(model, weighed([model.base_model(input_ids=x, use_cache=False)[0] for x in parts]))


def packed(model: Any, segmenter: Segmenter | None = None) -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    given = {} if "Mamba" in type(model).__name__ else {"position_ids": positions}
    with (segmenter or Segmenter(model)).within(Segments.of(LENGTHS)):
        hidden = model.base_model(input_ids=ids(), use_cache=False, **given)[0]
    return gradients(model, weighed([hidden]))


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    difference = sum(float((found[n].double() - wanted[n].double()).square().sum()) for n in wanted)
    return (difference / sum(float(wanted[n].double().square().sum()) for n in wanted)) ** 0.5


class AllFloat64(TorchFunctionMode):
    """Lets what models compute in float32 on purpose (norms, routers, soft-maxes) stay float64, as references need."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        if function is torch.Tensor.float:
            return args[0].double()
        return function(*(torch.float64 if x is torch.float32 else x for x in args), **kwargs)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", MODELS)
def test_packed_gradients_are_those_of_each_sequence_alone(name: str) -> None:
    model = made(name)
    assert error(packed(model), alone(model)) <= 1e-5
    model = made(name, torch.float64)
    model.config._experts_implementation = "eager"  # grouped products know no float64
    with AllFloat64():
        found = error(packed(model), alone(model))
    assert found <= 1e-10


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_whatever_attention_the_model_was_loaded_with(name: str) -> None:
    model = made(name, attention="eager")
    assert error(packed(model), alone(model)) <= 1e-5
    assert model.config._attn_implementation == "eager"


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that anything makes."""

    found = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            self.found = max(self.found, tensor.numel() if isinstance(tensor, Tensor) else 0)
        return out


def test_no_mask_over_the_whole_row_is_built() -> None:
    model = made("gemma3", max_position_embeddings=64).eval()
    lengths, row = (32, 31, 33, 32), torch.arange(128)[None] % 60
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    segmenter = Segmenter(model)
    with Largest() as plain:
        model.base_model(input_ids=row, position_ids=positions, use_cache=False)
    with segmenter.within(Segments.of(lengths)), Largest() as ours:
        model.base_model(input_ids=row, position_ids=positions, use_cache=False)
    assert ours.found < 128 * 128 <= plain.found


@pytest.mark.parametrize("name", ["mistral", "qwen3-next"])
def test_outside_the_context_the_model_is_as_it_was(name: str) -> None:
    model = made(name)
    before = alone(model)
    segmenter = Segmenter(model)
    attributes = {id(m): set(vars(m)) for m in model.modules()}
    with suppress(KeyError), segmenter.within(Segments.of(LENGTHS)):
        assert model.config._attn_implementation == NAME
        raise KeyError
    scope = segmenter.within(Segments.of(LENGTHS))
    with scope, scope:
        pass
    assert model.config._attn_implementation == "sdpa"
    assert {id(m): set(vars(m)) for m in model.modules()} == attributes
    after = alone(model)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert NAME not in model.config.to_json_string()


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
def test_recomputation_sees_the_segments_that_the_forward_saw(name: str) -> None:
    model = made(name)
    wanted = alone(model)
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": recompute_contexts})
    assert error(packed(model), wanted) <= 1e-5
    assert error(alone(model), wanted) <= 1e-6


@pytest.mark.parametrize(
    "options", [{"use_reentrant": False}, {"use_reentrant": True, "context_fn": recompute_contexts}]
)
def test_recomputation_that_would_forget_the_segments_is_refused(options: dict[str, Any]) -> None:
    model = made("llama")
    model.activation_checkpointing_enable(options)
    with pytest.raises(TrainingStateError, match="loses the boundaries of packed sequences; enable it with"):
        packed(model)
    with torch.no_grad():
        Segmenter(model).within(Segments.of(LENGTHS))


def test_two_backwards_may_recompute_twice() -> None:
    model = made("llama")
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": recompute_contexts})
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with Segmenter(model).within(Segments.of(LENGTHS)):
        hidden = model.base_model(input_ids=ids(), position_ids=positions, use_cache=False)[0]
    loss = weighed([hidden])
    found = [torch.autograd.grad(loss, list(model.base_model.parameters()), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Running(torch.nn.Module):
    """Mixes tokens in a way that nobody can know of: a running mean along the row."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]


def test_a_model_that_mixes_tokens_by_other_means_is_refused() -> None:
    model = made("llama")
    model.base_model.layers[0].mlp = Running()
    segmenter = Segmenter(model)
    for _ in range(2):
        with pytest.raises(
            Unsupported, match=r"LlamaForCausalLM does not take.*its sequences see each other: .*; pad inst"
        ):
            segmenter.within(Segments.of(LENGTHS))
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_local_attention_that_only_a_mask_knows_is_refused() -> None:
    fields = SMALL | HEADS | {
        "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 16,
        "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
    }  # fmt: skip
    model = AutoModel.from_config(transformers.Llama4TextConfig(**fields))
    with pytest.raises(Unsupported, match=r"Llama4TextModel.*its local attention of \[16\] tokens is made by a mask"):
        Segmenter(model).within(Segments.of(LENGTHS))


def test_a_forward_in_another_thread_is_refused() -> None:
    model = made("llama").eval()
    refused: list[BaseException] = []

    def run() -> None:
        try:
            model.base_model(input_ids=ids(), use_cache=False)
        except TrainingStateError as error:
            refused.append(error)

    with Segmenter(model).within(Segments.of(LENGTHS)):
        worker = threading.Thread(target=run)
        worker.start()
        worker.join()
    assert "two threads use one model" in str(refused[0])


def test_two_threads_may_see_segments_of_one_model_at_a_time() -> None:
    model = made("qwen3-next").eval()
    segmenter, parts = Segmenter(model), torch.split(ids(), LENGTHS, dim=1)
    found: dict[int, Tensor] = {}
    inside = threading.Barrier(2)

    def run(first: int) -> None:
        some, lengths = parts[first:], LENGTHS[first:]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        inside.wait(30)
        for _ in range(5):
            with torch.no_grad(), segmenter.within(Segments.of(lengths)):
                found[first] = model.base_model(input_ids=torch.cat(some, 1), position_ids=positions, use_cache=False)[
                    0
                ]

    segmenter.check()
    workers = [threading.Thread(target=run, args=(first,)) for first in (0, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(found[0][:, 15:], found[2], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        alone_ = model.base_model(input_ids=parts[5], use_cache=False)[0]
    torch.testing.assert_close(found[0][:, -17:], alone_, rtol=1e-4, atol=1e-4)
