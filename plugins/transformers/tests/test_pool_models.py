"""Adapters of a pool on many architectures: outputs, losses and gradients are those of PEFT, each row by itself."""

import contextlib
import copy
import logging
import re
import warnings
from typing import Any

import pytest
import torch
import transformers
from peft import get_peft_model
from torch import Tensor

from twinkle.engine import Operation, OperationError
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.group import new_group
from twinkle_transformers.memory import Recompute
from twinkle_transformers.pool.pool import LoraPool
from twinkle_transformers.pool.tenants import matrices_of
from twinkle_transformers.segments import recompute_contexts

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {"shared_expert_intermediate_size": 16}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "qk_nope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
GPT2 = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
    "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1,
}  # fmt: skip
LOCAL = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", SMALL | HEADS),
    "qwen3-moe": ("Qwen3Moe", SMALL | HEADS | EXPERTS),
    "mistral": ("Mistral", SMALL | {"sliding_window": 5}),
    "mixtral": ("Mixtral", SMALL | EXPERTS),
    "gemma2": ("Gemma2", SMALL | HEADS | {"sliding_window": 5, "attn_logit_softcapping": 0.2}),
    "gemma3": ("Gemma3", SMALL | HEADS | LOCAL),
    "gpt-oss": ("GptOss", SMALL | HEADS | EXPERTS | {"sliding_window": 5}),
    "deepseek-v3": ("DeepseekV3", SMALL | LATENT),
    "phi3": ("Phi3", SMALL | {"sliding_window": 5}),
    "olmo2": ("Olmo2", SMALL),
    "cohere": ("Cohere", SMALL),
    "granite": ("Granite", SMALL),
    "stablelm": ("StableLm", SMALL),
    "gpt-neox": ("GPTNeoX", SMALL),
    "opt": ("OPT", SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "smollm3": ("SmolLM3", SMALL | {"no_rope_layers": [1, 0]}),
    "glm4": ("Glm4", SMALL | HEADS),
    "gpt2": ("GPT2", GPT2),
    "modernbert-decoder": ("ModernBertDecoder", SMALL | {"sliding_window": 5}),
    "jetmoe": ("JetMoe", SMALL | EXPERTS | {"kv_channels": 8}),
}
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", SMALL | HEADS | EXPERTS | SHARED | LINEAR),
    "qwen3.5": ("Qwen3_5", SMALL | HEADS | LINEAR),
    "qwen3.5-moe": ("Qwen3_5Moe", SMALL | HEADS | EXPERTS | SHARED | LINEAR),
    "lfm2": ("Lfm2", SMALL | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "mamba": ("Mamba", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
}
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("Falcon", SMALL | {"alibi": True}),
    "gptj": ("GPTJ", GPT2 | {"rotary_dim": 4}),
    "bloom": ("Bloom", SMALL | {"n_layer": 2, "n_head": 4}),
    "llama4": (
        "Llama4",
        SMALL | HEADS | EXPERTS | {
            "intermediate_size_mlp": 48, "num_experts_per_tok": 1, "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
        },
    ),
    "deepseek-v3.2": ("DeepseekV32", SMALL | LATENT | {"index_head_dim": 8, "index_n_heads": 4, "index_topk": 3}),
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "depth": 1, "out_hidden_size": 32}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
PICTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": ("Qwen2VL", SMALL | ROPE, {"embed_dim": 32, "hidden_size": 32, "depth": 1, "num_heads": 4}),
    "qwen2.5-vl": ("Qwen2_5_VL", SMALL | ROPE, VISION),
    "qwen3-vl": ("Qwen3VL", SMALL | HEADS | ROPE, VISION | {"deepstack_visual_indexes": [0]}),
    "qwen3.5": ("Qwen3_5", SMALL | HEADS | LINEAR | ROPE, VISION),
    "gemma3": (
        "Gemma3", SMALL | HEADS | LOCAL,
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
    ),
}  # fmt: skip
LENGTHS = ((9,), (4, 23), (12,))
"""Of the rows of each adapter."""


def made(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model whose random weights are large enough for attention to matter."""
    prefix, fields = (MODELS | MIXERS | ALONE)[name]
    text = hasattr(transformers, f"{prefix}TextConfig")
    config = getattr(transformers, f"{prefix}TextConfig" if text else f"{prefix}Config")(**(fields | changes))
    kind = "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
    return strong(getattr(transformers, f"{prefix}{kind}"), config, dtype)


def pictured(name: str) -> Any:
    prefix, text, vision = PICTURES[name]
    ids = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    ids |= {"image_token_index": 60, "boi_token_index": 62, "eoi_token_index": 63}
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=vision, **ids)
    return strong(getattr(transformers, f"{prefix}ForConditionalGeneration"), config, torch.float32)


def strong(cls: Any, config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = cls._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.to(dtype)


def pool_of(model: Any, recompute: bool = False, dtype: torch.dtype | None = None) -> LoraPool:
    cpu = torch.device("cpu")

    def new_recompute(forward: Any) -> Recompute:
        return Recompute(model, recompute, cpu, recompute_contexts, forward=forward)

    return LoraPool(
        Backbone.of(model), cpu, contextlib.nullcontext, dtype or model.dtype, new_recompute, new_group, lambda row: row
    )


def add(pool: LoraPool, name: str, config: dict[str, Any], seed: int) -> Any:
    """Add an adapter and give all of its matrices random values."""
    pool.add(name, config, seed=seed)
    tenant = pool.tenants[name]
    draw = torch.Generator().manual_seed(seed)
    for entry in tenant.plan.layout.entries.values():
        entry.up_of(tenant.flat.data).normal_(0.0, 0.1, generator=draw)
    return tenant


def rows(lengths: tuple[int, ...], seed: int) -> list[Any]:
    draw = torch.Generator().manual_seed(seed)
    found = [torch.randint(3, 56, (length + 1,), generator=draw).tolist() for length in lengths]
    return [{"input_ids": ids[:-1], "labels": ids[1:]} for ids in found]


def configs(pool: LoraPool) -> list[dict[str, Any]]:
    """Return an adapter everywhere, and two that share the layers among them."""
    everything = pool_targets(pool)
    return [
        {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        {"r": 3, "lora_alpha": 3, "target_modules": everything[::2]},
        {"r": 6, "lora_alpha": 9, "use_rslora": True, "target_modules": everything[1::2] or everything},
    ]


def pool_targets(pool: LoraPool) -> list[str]:
    """Return the names of the layers that "all-linear" means."""
    pool.add("probe", {"r": 1, "target_modules": "all-linear"})
    found = [name for name in pool.tenants["probe"].plan.layout.entries if name in pool.sites]
    pool.remove("probe")
    return found


def peft_of(base: Any, tenant: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a copy of the base under PEFT with an adapter's weights, and its trained parameters by PEFT's names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice about other things
        model = get_peft_model(copy.deepcopy(base), copy.deepcopy(tenant.plan.config)).eval()
    trained = {re.sub(r"\.default(?=\.weight$)", "", n): p for n, p in model.named_parameters() if p.requires_grad}
    mine = dict(matrices_of(tenant.plan, tenant.flat.data))
    assert mine.keys() == trained.keys()
    with torch.no_grad():
        for name, value in mine.items():
            trained[name].copy_(value)
    return model, trained


def logps(model: Any, row: Any) -> Tensor:
    logits = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(row["labels"])[:, None])[:, 0]


def run(pool: LoraPool, operations: list[Operation]) -> list[Any]:
    results = pool.run(operations)
    for result in results:
        if isinstance(result, OperationError):
            raise result.error
    return results


def compare(base: Any, pool: LoraPool, wanted: list[dict[str, Any]]) -> None:
    """Train adapters and the base in one pass; compare with PEFT on a copy of the base, one row after the other."""
    tenants = [add(pool, f"t{at}", config, at) for at, config in enumerate(wanted)]
    lengths = LENGTHS[: len(tenants)]
    mine = [rows(lengths[at], at) for at in range(len(tenants))]
    others = rows((3, 17), 9)
    operations = [Operation(None, "forward", others)]
    operations += [Operation(t.name, "forward_backward", r) for t, r in zip(tenants, mine, strict=True)]
    first, *results = run(pool, operations)
    with torch.no_grad():
        for row, output in zip(others, first.outputs, strict=True):
            torch.testing.assert_close(output["logps"], logps(base, row), rtol=0, atol=1e-5)
    for tenant, part, result in zip(tenants, mine, results, strict=True):
        model, trained = peft_of(base, tenant)
        found = [logps(model, row) for row in part]
        for output, reference in zip(result.outputs, found, strict=True):
            torch.testing.assert_close(output["logps"], reference.detach(), rtol=0, atol=1e-5)
        loss = -torch.cat(found).sum()
        loss.backward()
        assert result.loss_sum == pytest.approx(float(loss.detach()), rel=1e-5)
        assert error(dict(matrices_of(tenant.plan, tenant.flat.grad)), trained) <= 2e-5


def error(mine: dict[str, Tensor], trained: dict[str, Tensor]) -> float:
    """Return how far gradients are from PEFT's, relative to their norm; PEFT has none where nothing was used."""
    theirs = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}
    gap = sum(float((mine[n].double() - g.double()).square().sum()) for n, g in theirs.items())
    return (gap / sum(float(g.double().square().sum()) for g in theirs.values())) ** 0.5


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", [*MODELS, *MIXERS, *ALONE])
def test_a_pass_of_three_adapters_and_the_base_is_peft_row_by_row(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = made(name).eval()
    base = copy.deepcopy(model)
    with caplog.at_level(logging.INFO):
        pool = pool_of(model)
    assert caplog.text.count("Each sequence runs through the model by itself") == (name in ALONE)
    assert caplog.text.count("sees sequences of one length at a time") == (name in MIXERS)
    compare(base, pool, configs(pool))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PICTURES)
def test_text_rows_of_vision_language_models_are_pefts(name: str) -> None:
    base = pictured(name).eval()
    pool = pool_of(copy.deepcopy(base))
    assert not any("visual" in key or "vision" in key for key in pool.sites)
    compare(base, pool, configs(pool)[:1])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["gemma3", "opt", "gpt2", "qwen3.5", "gptj"])
def test_recomputation_changes_nothing_and_the_base_drops_nothing(name: str) -> None:
    gradients = []
    for recompute in (False, True):
        changes = {"dropout": 0.5} if name == "opt" else {"attention_dropout": 0.5}
        pool = pool_of(made(name, **changes).train(), recompute)
        assert bool(pool.passes._layers) is (name != "opt")  # its layers drop by their own `training`
        tenants = [add(pool, f"t{at}", config, at) for at, config in enumerate(configs(pool))]
        run(pool, [Operation(t.name, "forward_backward", rows(LENGTHS[at], at)) for at, t in enumerate(tenants)])
        gradients.append([tenant.flat.grad.clone() for tenant in tenants])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["qwen3.5", "mamba", "gptj"])
def test_dropout_where_sequences_are_taken_out_of_the_stream_is_that_of_each_adapter_alone(name: str) -> None:
    pool = pool_of(made(name))
    wanted = [config | {"lora_dropout": 0.4} for config in configs(pool)]
    tenants = [add(pool, f"t{at}", config, at) for at, config in enumerate(wanted)]
    operations = [
        Operation(t.name, "forward_backward", rows(LENGTHS[at], at), number=5) for at, t in enumerate(tenants)
    ]
    together = run(pool, operations)
    gradients = [tenant.flat.grad.clone() for tenant in tenants]
    for tenant, operation, result, gradient in zip(tenants, operations, together, gradients, strict=True):
        tenant.flat.grad = None
        [alone] = run(pool, [operation])
        assert alone.loss_sum == pytest.approx(result.loss_sum, rel=1e-5)
        assert (tenant.flat.grad - gradient).norm() <= 2e-6 * gradient.norm()
        [other] = run(pool, [Operation(tenant.name, "forward_backward", operation.rows, number=6)])
        assert abs(other.loss_sum - result.loss_sum) > 1e-3


@pytest.mark.parametrize("off", ["self_attn", "linear_attn"])
def test_adapters_beside_the_mixers_or_on_them_alone(off: str) -> None:
    base = made("qwen3.5").eval()
    pool = pool_of(copy.deepcopy(base))
    targets = [name for name in pool_targets(pool) if off not in name]
    compare(base, pool, [{"r": 2, "target_modules": targets}, {"r": 2, "target_modules": targets[:1]}])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["llama", "gemma2", "modernbert-decoder"])
def test_an_adapter_on_a_tied_output_projection_leaves_the_embedding_alone(name: str) -> None:
    base = made(name, tie_word_embeddings=True).eval()
    assert base.get_input_embeddings().weight is base.get_output_embeddings().weight
    pool = pool_of(copy.deepcopy(base))
    head = next(key for key, site in pool.sites.items() if site.head)
    compare(base, pool, [{"r": 3, "target_modules": [head, pool_targets(pool)[0]]}, {"r": 2, "target_modules": [head]}])
    assert torch.equal(pool.backbone.model.get_input_embeddings().weight, base.get_input_embeddings().weight)


@pytest.mark.full
def test_routers_are_adapted_where_they_are_named() -> None:
    base = made("jetmoe").eval()
    pool = pool_of(copy.deepcopy(base))
    routers = [name for name, site in pool.sites.items() if site.router]
    assert routers
    assert not set(routers) & set(pool_targets(pool))
    pool.add("mlp", {"train_attn": True, "train_mlp": True, "train_unembed": False})
    assert not set(routers) & pool.tenants["mlp"].plan.layout.entries.keys()
    compare(base, pool, [{"r": 2, "target_modules": routers}])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt-oss", "qwen3.5", "falcon"])
def test_bfloat16_is_near_float32(name: str) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        pool = pool_of(made(name, dtype))
        tenant = add(pool, "a", {"r": 4, "target_modules": "all-linear"}, 0)
        [result] = run(pool, [Operation("a", "forward_backward", rows((30, 12), 0))])
        assert tenant.flat.dtype == tenant.flat.grad.dtype == torch.float32
        found.append((result.loss_sum, tenant.flat.grad))
    assert found[1][0] == pytest.approx(found[0][0], rel=0.03)
    assert torch.cosine_similarity(found[0][1], found[1][1], dim=0) > 0.9
