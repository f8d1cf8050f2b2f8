"""What the contract kit applies these patches to."""

from collections.abc import Mapping
from typing import Any

_TURN = """
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- if ns.multi_step_tool %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content %}
        {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1] %}
        {%- set content = content.split('</think>')[-1] %}
    {%- endif %}
    {{- content }}
{%- endfor %}"""
"""What Qwen3.5's chat template and this one have in common: the lines that the patches edit."""

NO_SPLIT: Mapping[str, Any] = {"kwargs": {"module_names": ["LlamaMLP"]}, "same_numbers": True}
NEFTUNE: Mapping[str, Any] = {"same_numbers": True}  # the noise is for training mode
EMBEDDING: Mapping[str, Any] = {"same_numbers": False}
FUSED_CE: Mapping[str, Any] = {"same_numbers": True}  # the kit's forward has no labels


def chat_template() -> dict[str, Any]:
    """Return the example of patches of chat templates."""
    from twinkle.testing import tiny_tokenizer

    return {"module": lambda: tiny_tokenizer(_TURN), "inputs": None}


def gated_delta() -> dict[str, Any]:
    """Return the example of patches of gated delta-net models: three sequences in a row."""
    import torch

    ids = torch.arange(1, 13)[None]
    positions = torch.tensor([[*range(5), *range(3), *range(4)]])
    return {
        "module": _delta_model,
        "inputs": lambda: {"input_ids": ids, "position_ids": positions, "use_cache": False},
        "same_numbers": False,
    }


def _delta_model() -> Any:
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"], initializer_range=0.2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3_5ForCausalLM(config).eval()
