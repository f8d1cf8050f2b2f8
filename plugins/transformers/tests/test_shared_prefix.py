"""A prefix that lies in the row once gives every row the hidden states and gradients that it has alone."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from twinkle.errors import Unsupported
from twinkle_torch.segments import Segments
from twinkle_transformers.segments import Segmenter, recompute_contexts
from twinkle_transformers.shared_prefixes import plan_prefixes

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
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SMALL),
    "qwen3": ("Qwen3Config", SMALL | HEADS),
    "qwen3-moe": ("Qwen3MoeConfig", SMALL | HEADS | EXPERTS),
    "mistral": ("MistralConfig", SMALL | {"sliding_window": 5}),
    "mistral, wide window": ("MistralConfig", SMALL | {"sliding_window": 19}),
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
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0,
            "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    "qwen3.5": ("Qwen3_5TextConfig", SMALL | HEADS | LINEAR),
    "lfm2": ("Lfm2Config", SMALL | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
}  # fmt: skip
MIXERS = {"qwen3.5": "Qwen3_5GatedDeltaNet", "lfm2": "Lfm2ShortConv"}
ATTENDING = [name for name in MODELS if name not in MIXERS]


def made(name: str) -> Any:
    kind, fields = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.train()


def rows() -> list[Tensor]:
    """Two groups, one with children of equal and unequal lengths; a row alone, one twice, one within another."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 64, (200,), generator=generator).split(20)
    one, other = tokens[0][:17], tokens[1][:9]
    group = [torch.cat([one, tokens[n][:length]]) for n, length in ((2, 4), (3, 4), (4, 11), (5, 1))]
    pair = [torch.cat([other, tokens[n][:6]]) for n in (6, 7)]
    return [group[0], pair[0], tokens[8], group[1], pair[0].clone(), group[2][:23], group[2], pair[1], group[3]]


def weighed(hidden: list[Tensor]) -> Tensor:
    flat = torch.cat(hidden)
    return (flat * torch.randn(flat.shape, generator=torch.Generator().manual_seed(5)).to(flat)).sum() / len(flat)


def alone(model: Any, table: Tensor) -> list[Tensor]:
    return [model.base_model(inputs_embeds=table[row][None], use_cache=False)[0][0] for row in rows()]


def together(model: Any, table: Tensor) -> list[Tensor]:
    given = rows()
    plan = plan_prefixes(given, least=4)
    assert plan.saved > 0.4 * sum(map(len, given))
    tokens = torch.cat([given[row][start:stop] for row, start, stop in plan.pieces])
    segments = Segments.of(plan.lengths, parents=plan.parents)
    with Segmenter(model).within(segments):
        stream = model.base_model(
            inputs_embeds=table[tokens][None], position_ids=segments.positions[None], use_cache=False
        )[0][0]
    return [stream[torch.from_numpy(index)] for index in plan.index]


def embeddings(model: Any) -> Tensor:
    table: Tensor = model.get_input_embeddings().weight.detach().clone()
    return table.requires_grad_()


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ATTENDING)
def test_hidden_states_and_gradients_are_those_of_each_row_alone(name: str) -> None:
    model = made(name)
    assert Segmenter(model).shares_prefixes()
    table = embeddings(model)
    leaves = {"inputs": table} | {n: p for n, p in model.named_parameters() if "embed" not in n and "lm_head" not in n}
    theirs, ours = alone(model, table), together(model, table)
    for found, wanted in zip(ours, theirs, strict=True):
        assert float((found - wanted).detach().norm() / wanted.detach().norm()) <= 1e-5
    wanted, found = (
        dict(zip(leaves, torch.autograd.grad(weighed(x), list(leaves.values()), allow_unused=True), strict=True))
        for x in (theirs, ours)
    )
    assert difference({"inputs": found.pop("inputs")}, {"inputs": wanted.pop("inputs")}) <= 5e-6
    assert difference(found, wanted) <= 5e-6


def difference(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> float:
    pairs = [(found[name], gradient) for name, gradient in wanted.items() if gradient is not None]
    assert all(ours is not None for ours, _ in pairs)
    error = sum(float((ours.double() - theirs.double()).square().sum()) for ours, theirs in pairs if ours is not None)
    return (error / sum(float(theirs.double().square().sum()) for _, theirs in pairs)) ** 0.5


def test_recomputed_activations_see_the_prefix_too() -> None:
    model = made("gemma3")
    table = embeddings(model)
    (wanted,) = torch.autograd.grad(weighed(together(model, table)), table)
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": recompute_contexts})
    (found,) = torch.autograd.grad(weighed(together(model, table)), table)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", MIXERS)
def test_models_that_keep_no_state_at_the_end_of_a_prefix_are_refused(name: str) -> None:
    segmenter = Segmenter(made(name))
    assert segmenter.check() is None
    assert not segmenter.shares_prefixes()
    with pytest.raises(
        Unsupported, match=rf"{MIXERS[name]} at the end of a prefix is not stored.*give each sequence its prefix"
    ):
        segmenter.within(Segments.of([3, 2], parents=[-1, 0]))
    with segmenter.within(Segments.of([3, 2])):
        pass


def test_a_model_that_counts_positions_by_itself_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama")
    forward = model.base_model.forward

    def from_zero(input_ids: Tensor, position_ids: Tensor | None = None, **rest: Any) -> Any:
        """Takes every jump of the positions for a sequence that begins."""
        if position_ids is not None:
            jumps = position_ids[0].diff(prepend=position_ids[0, :1] - 1) != 1
            places = torch.arange(len(jumps))
            position_ids = (places - (places * jumps).cummax(0).values)[None]
        return forward(input_ids=input_ids, position_ids=position_ids, **rest)

    monkeypatch.setattr(model.base_model, "forward", from_zero)
    segmenter = Segmenter(model)
    assert segmenter.check() is None
    assert not segmenter.shares_prefixes()
    assert "LlamaForCausalLM does not take sequences that share a prefix" in str(segmenter.check_prefixes())


def test_a_model_that_cannot_see_segments_cannot_share_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_DISABLE_FAST_PATHS", "packing")
    segmenter = Segmenter(made("llama"))
    refusal = segmenter.check_prefixes()
    assert refusal == segmenter.check()
    assert "LlamaForCausalLM does not take several sequences in one row: packing is disabled" in str(refusal)
    assert [str(found) for found in segmenter.measured().values()] == [
        f"{path} off: packing is disabled by TWINKLE_DISABLE_FAST_PATHS" for path in ("packing", "prefixes")
    ]


def test_what_was_measured_before_sharding_is_taken_over_and_the_model_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Segmenter(made("llama"))
    found = first.measured()
    assert [path for path in found if found[path].exact] == ["packing", "prefixes"]

    def sharded(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("one rank alone would wait for the others' shards")

    for segmenter in (first, Segmenter(made("llama"))):  # the first rank, and another one
        monkeypatch.setattr(segmenter.model.base_model, "forward", sharded)
        segmenter.assume(found)
        assert segmenter.measured() == found
        assert segmenter.shares_prefixes()
        with segmenter.within(Segments.of([3, 2], parents=[-1, 0])):
            pass


def test_paths_are_measured_in_the_precision_in_which_passes_run() -> None:
    segmenter = Segmenter(made("llama"))
    segmenter.precision = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    narrow = segmenter.measured()
    assert {found.dtype for found in narrow.values()} == {"bfloat16"}
    assert all(found.exact for found in narrow.values())
    segmenter.precision = nullcontext
    segmenter.forget()
    wide = segmenter.measured()
    assert {found.dtype for found in wide.values()} == {"float32"}
    assert narrow["prefixes"].rounding > 1000 * wide["prefixes"].rounding
