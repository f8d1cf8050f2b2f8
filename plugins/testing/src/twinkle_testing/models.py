"""Tiny random models in Hugging Face folders: real architectures, a byte-level tokenizer, a ChatML chat template."""

from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VOCABULARY = 264  # 256 bytes and the special tokens, rounded up to a multiple of 8
_CONFIGS = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "mistral": "MistralConfig",
    "gemma2": "Gemma2Config",
    "gemma3": "Gemma3TextConfig",
}


def tiny_tokenizer(chat_template: str | None = CHATML) -> Any:
    """Return a byte-level tokenizer (one token per byte, three special tokens; eos is `<|im_end|>`).

    Args:
        chat_template: Jinja text; None leaves the tokenizer without one.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token="<|im_start|>",
        clean_up_tokenization_spaces=False,
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(architecture: str = "llama", **overrides: Any) -> Any:
    """Return a transformers configuration of a two-layer model of hidden size 64.

    Args:
        architecture: one of llama, qwen2, qwen3, mistral, gemma2, gemma3.
        **overrides: fields of the configuration class.
    """
    import transformers

    values: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "eos_token_id": 258,
        "bos_token_id": 257,
        "pad_token_id": 256,
    }
    return getattr(transformers, _CONFIGS[architecture])(**(values | overrides))


def tiny_model(
    folder: str | Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    chat_template: str | None = CHATML,
    **overrides: Any,
) -> Path:
    """Write a tiny random model (float32 safetensors) with tokenizer and chat template, and return its folder.

    Args:
        folder: the folder to write; created if necessary.
        architecture: see `tiny_config`.
        seed: seed of the weights; torch's global generator is not changed.
        chat_template: see `tiny_tokenizer`.
        **overrides: fields of the configuration class.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from twinkle.hub.quiet import quiet_transformers

    target = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(architecture, **overrides), dtype=torch.float32)
    with quiet_transformers():
        model.save_pretrained(target)
    tiny_tokenizer(chat_template).save_pretrained(target)
    return target
