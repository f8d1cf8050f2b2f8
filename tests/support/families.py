"""Families of models, as tests see them: chat templates after their public documentation, on a byte-level tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from twinkle._registry import registry
from twinkle.template import Template
from twinkle.testing import tiny_tokenizer

CHAT_TEMPLATES = Path(__file__).parents[2] / "plugins" / "chat" / "tests" / "chat_templates"
CHATML = ("<|im_start|>", "<|im_end|>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
GLM = ("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "[gMASK]", "<sop>")


@dataclass(frozen=True)
class Family:
    """A family's chat template, its special tokens and the template that reads it."""

    template: str
    special: Sequence[str]
    eos: str
    bos: str | None = None
    thinks: bool = False
    file: str | None = None


FAMILIES = {
    "qwen2": Family("Qwen2Template", CHATML, "<|im_end|>"),
    "qwen2_5": Family("Qwen2_5Template", CHATML, "<|im_end|>"),
    "qwen3": Family("Qwen3Template", CHATML, "<|im_end|>", thinks=True),
    "qwen3_5": Family("Qwen3_5Template", CHATML, "<|im_end|>", thinks=True),
    "deepseek_v2": Family("DeepseekTemplate", DEEPSEEK, DEEPSEEK[1], DEEPSEEK[0]),
    "deepseek_v3": Family("DeepseekTemplate", DEEPSEEK, DEEPSEEK[1], DEEPSEEK[0]),
    "deepseek_r1": Family("DeepseekR1Template", DEEPSEEK, DEEPSEEK[1], DEEPSEEK[0], thinks=True),
    "deepseek_v4": Family("DeepseekV4Template", DEEPSEEK, DEEPSEEK[1], DEEPSEEK[0], thinks=True),
    "glm4": Family("Glm4Template", GLM, "<|endoftext|>"),
    "glm_edge": Family("Glm4Template", GLM, "<|endoftext|>"),
    "chatglm3": Family("Glm4Template", GLM, "<|endoftext|>"),
    "internlm2": Family("Template", ("<s>", "</s>", *CHATML), "</s>", "<s>"),
    "gemma4": Family(
        "Gemma4Template",
        ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_response>"),
        "<eos>",
        "<bos>",
        thinks=True,
    ),
    "smollm2": Family("Template", CHATML, "<|im_end|>"),
    "llama3": Family(
        "Template", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>",
        "<|begin_of_text|>",
    ),
}  # fmt: skip
EVERY = pytest.mark.parametrize("family", FAMILIES)


@cache
def tokenizer(family: str) -> Any:
    values = FAMILIES[family]
    file = CHAT_TEMPLATES / f"{family}.jinja"
    made = tiny_tokenizer(file.read_text("utf-8") if file.is_file() else None)
    made.add_special_tokens({"additional_special_tokens": list(values.special)})
    made.eos_token, made.bos_token = values.eos, values.bos
    return made


def template(family: str, **options: Any) -> Template:
    made: Template = registry().build(
        FAMILIES[family].template, "template", **{"tokenizer": tokenizer(family), "max_length": None} | options
    )
    return made


def talk(*turns: str, system: str | None = None) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for index, text in enumerate(turns):
        reasoning, mark, content = text.partition("|")
        message = {"role": ("user", "assistant")[index % 2], "content": content if mark else text}
        messages.append(message | ({"reasoning_content": reasoning} if mark else {}))
    return {"messages": messages}


def shown(encoder: Template, feature: Any) -> str:
    """Return the text of a row with brackets ⟦ ⟧ around what is trained."""
    targets = [-100, *feature["labels"][:-1]]
    runs = groupby(zip(feature["input_ids"], targets, strict=True), key=lambda pair: pair[1] != -100)
    texts = [(trained, encoder.decode([token for token, _ in run])) for trained, run in runs]
    return "".join(f"⟦{text}⟧" if trained else text for trained, text in texts)


def encoded(family: str, row: dict[str, Any], **options: Any) -> str:
    encoder = template(family, **options)
    return shown(encoder, encoder.encode(row))


def trained(family: str, row: dict[str, Any], **options: Any) -> list[str]:
    return [part.partition("⟧")[0] for part in encoded(family, row, **options).split("⟦")[1:]]


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLS = {
    "qwen2_5": '<tool_call>\n{{"name": "f", "arguments": {json}}}\n</tool_call><|im_end|>',
    "qwen3": '<tool_call>\n{{"name": "f", "arguments": {json}}}\n</tool_call><|im_end|>',
    "qwen3_5": "<tool_call>\n<function=f>\n{xml}</function>\n</tool_call><|im_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{json}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    "deepseek_v4": '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{dsml}\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls><｜end▁of▁sentence｜>",
    "gemma4": "<|tool_call>call:f{gemma}<tool_call|><|tool_response>",
}

QWEN2 = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>⟧\n"
QWEN2 += "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n⟦A<|im_end|>⟧\n"
DEEP = "<｜begin▁of▁sentence｜>{system}<｜User｜>q<｜Assistant｜>⟦a<｜end▁of▁sentence｜>⟧"
DEEP += "<｜User｜>Q<｜Assistant｜>{thought}⟦A<｜end▁of▁sentence｜>⟧"
TWO_TURNS = {
    "qwen2": QWEN2.format(system="You are a helpful assistant."),
    "qwen2_5": QWEN2.format(system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "smollm2": QWEN2.format(system="You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
    "internlm2": "<s>" + QWEN2.partition("<|im_end|>\n")[2],
    "qwen3": QWEN2.partition("<|im_end|>\n")[2].replace("⟦A", "<think>\n\n</think>\n\n⟦A"),
    "qwen3_5": QWEN2.partition("<|im_end|>\n")[2].replace("⟦A", "<think>\n\n</think>\n\n⟦A"),
    "deepseek_v2": "<｜begin▁of▁sentence｜>User: q\n\nAssistant:⟦ a<｜end▁of▁sentence｜>⟧User: Q\n\n"
    "Assistant:⟦ A<｜end▁of▁sentence｜>⟧",
    "deepseek_v3": DEEP.format(system="", thought=""),
    "deepseek_r1": DEEP.format(system="", thought="<think>\n\n</think>\n\n"),
    "deepseek_v4": DEEP.format(system="", thought="<think></think>").replace("⟦a", "</think>⟦a"),
    "glm4": "[gMASK]<sop><|user|>\nq<|assistant|>⟦\na<|user|>⟧\nQ<|assistant|>⟦\nA<|user|>⟧",
    "glm_edge": "<|user|>\nq<|assistant|>⟦\na<|user|>⟧\nQ<|assistant|>⟦\nA<|user|>⟧",
    "chatglm3": "[gMASK]sop<|user|>\n q<|assistant|>⟦\n a<|user|>⟧\n Q<|assistant|>⟦\n A<|user|>⟧",
    "gemma4": "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nq<turn|>\n<|turn>model\n⟦a<turn|>⟧\n"
    "<|turn>user\nQ<turn|>\n<|turn>model\n⟦A<turn|>⟧\n",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦a<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦A<|eot_id|>⟧",
}
