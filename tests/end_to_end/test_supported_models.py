"""The table of supported models says what is so: every family that it claims trains, every other cannot be loaded."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from twinkle.errors import ModelLoadError
from twinkle.model import TransformersModel
from twinkle.template import Template
from twinkle.testing import tiny_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "researcher" / "models.md"
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.read_text("utf-8").split("\n## ")}
SUPPORTED, PARSERS, UNSUPPORTED = (
    SECTIONS[name] for name in ("Families", "Tool calls in generated text", "Not supported")
)

SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 258,
    "bos_token_id": 257,
    "pad_token_id": 256,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
}
GEMMA = {
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 264,
}
GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {}),
    "qwen2_moe": ("Qwen2MoeConfig", EXPERTS),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", EXPERTS | DELTA),
    "glm": ("GlmConfig", {}),
    "llama": ("LlamaConfig", {}),
    "deepseek_v2": ("DeepseekV2Config", LATENT),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "deepseek_v4": ("DeepseekV4Config", LATENT),
    "gemma4": ("Gemma4TextConfig", GEMMA | GEMMA_EXPERTS),
    "gemma4_unified": ("Gemma4UnifiedTextConfig", {"layer_types": GEMMA["layer_types"]}),
}


def rows(text: str) -> list[tuple[str, str, str]]:
    """Return models, model types and template or reason of each row of the tables in a text."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| .*`", line)]
    return [(cells[0], cells[1], cells[2]) for cells in lines]


def types_of(text: str) -> list[str]:
    return sorted({name for _, types, _ in rows(text) for name in re.findall(r"`(\w+)`", types)})


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_claimed_type_is_tried_here() -> None:
    assert types_of(SUPPORTED) == sorted(TINY)
    assert len(rows(SUPPORTED)) > 10
    assert len(rows(UNSUPPORTED)) > 2


def sizes(name: str) -> dict[str, Any]:
    return {**SIZES, **TINY[name][1]}


def train_a_step(model: Any, folder: Path) -> float:
    """Save a model with a tokenizer, load it as ours, and return the loss of its first step."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    template = Template(str(folder))
    answers = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": text}] for text in ("yes", "no way")]
    loaded = TransformersModel(model_id=str(folder))
    loaded.set_loss("CrossEntropyLoss")
    loaded.set_optimizer("SGD", lr=0.01)
    outputs: Any = loaded.forward_backward(inputs=[template.encode({"messages": messages}) for messages in answers])
    loaded.clip_grad_and_step(max_grad_norm=1.0)
    return float(outputs["loss"])


GUESS = pytest.approx(math.log(SIZES["vocab_size"]), abs=0.4)  # a random model is as good as a guess


@pytest.mark.sample(5)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_of_each_supported_type_trains(name: str, tmp_path: Path) -> None:
    config = getattr(transformers, TINY[name][0])(**sizes(name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert train_a_step(model, tmp_path) == GUESS


VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "pooling_kernel_size": 2,
}


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "family"),
    [("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe"), ("gemma4", "Gemma4"), ("gemma4_unified", "Gemma4Unified")],
)
def test_a_checkpoint_with_a_vision_tower_trains_as_a_text_model(name: str, family: str, tmp_path: Path) -> None:
    """The published checkpoints of these families are of this form."""
    parts: dict[str, Any] = {"text_config": sizes(name)}
    if name != "gemma4_unified":
        parts["vision_config"] = VISION
    config = getattr(transformers, f"{family}Config")(**parts)
    assert config.model_type == name
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    assert train_a_step(model, tmp_path) == GUESS


@pytest.mark.parametrize("name", types_of(SUPPORTED))
def test_a_checkpoint_of_a_supported_type_is_loaded_as_a_causal_language_model(name: str) -> None:
    assert name in CONFIG_MAPPING_NAMES
    assert name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


@pytest.mark.parametrize("template", sorted({row[2].strip("`") for row in rows(SUPPORTED)}))
def test_the_templates_of_the_table_exist(template: str) -> None:
    from twinkle._registry import registry

    assert issubclass(registry().resolve(template, "template"), Template)


def test_every_template_of_ours_is_in_the_table() -> None:
    from twinkle._registry import registry

    ours = {name for name, specs in registry().specs("template").items() if specs[0].dist == "twinkle-chat"}
    assert ours == {row[2].strip("`") for row in rows(SUPPORTED)}


def test_every_tool_parser_of_ours_is_in_its_table() -> None:
    from twinkle._registry import registry

    ours = {name for name, specs in registry().specs("tool_parser").items() if specs[0].dist == "twinkle-chat"}
    assert ours == {row[0].strip("`") for row in rows(PARSERS)}


@pytest.mark.parametrize("name", types_of(UNSUPPORTED))
def test_what_is_not_supported_is_refused_by_name(name: str, tmp_path: Path) -> None:
    assert name not in CONFIG_MAPPING_NAMES
    remote = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X", "AutoModel": "modeling_x.X"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "auto_map": remote}))
    (tmp_path / "configuration_x.py").write_text("raise SystemExit('this code must not run')")
    with pytest.raises(ModelLoadError) as error:
        TransformersModel(model_id=str(tmp_path))
    assert str(tmp_path) in str(error.value)
