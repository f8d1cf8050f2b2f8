"""Labels on official chat templates, against renderings of prefixes of the conversation.

The chat templates are read from two packages of the index at test time. The tokenizer is a byte-level one with the
special tokens of each chat template: spans are about characters, and each character has tokens of its own.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from families import call, shown
from official_templates import official
from template_reference import Reference, bracketed

from twinkle._registry import registry
from twinkle.errors import EncodeError
from twinkle.template import Template
from twinkle.testing import tiny_tokenizer

SPECIAL = re.compile(
    r"<\|[\w/:]+\|?>|<[\w]+\|>|<｜(?!DSML|tool)[\w▁]+｜>|<(?:start|end)_of_turn>|<\|\"\|>"
    r"|\[/?(?:INST|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|SYSTEM_PROMPT|ARGS|CALL_ID|THINK)\]"
)
ENDS = ("<｜end▁of▁sentence｜>", "<|im_end|>", "<|eot_id|>", "<|return|>", "<turn|>", "<end_of_turn>", "<|end|>")

# The families of docs/models.md that have an official chat template at hand: package and file, and the template that
# reads them.
FAMILIES = {
    "Qwen2.5": ("llama.cpp", "Qwen-Qwen2.5-7B-Instruct", "Qwen2_5Template"),
    "Qwen2.5 of TRL": ("trl", "qwen2_5", "Qwen2_5Template"),
    "Qwen3": ("llama.cpp", "Qwen-Qwen3-0.6B", "Qwen3Template"),
    "Qwen3 of TRL": ("trl", "qwen3", "Qwen3Template"),
    "Qwen3-2507": ("trl", "qwen3_instruct_2507", "Qwen3Template"),
    "Qwen3.5": ("llama.cpp", "Qwen3.5-4B", "Qwen3_5Template"),
    "Qwen3.5 thinking": ("trl", "qwen3_5_think", "Qwen3_5Template"),
    "Qwen3.5 not thinking": ("trl", "qwen3_5_nothink", "Qwen3_5Template"),
    "Qwen3.6": ("trl", "qwen3_6", "Qwen3_5Template"),
    "DeepSeek-V3": ("trl", "deepseekv3", "DeepseekTemplate"),
    "DeepSeek-V3.1": ("llama.cpp", "deepseek-ai-DeepSeek-V3.1", "DeepseekTemplate"),
    "DeepSeek-V3.2": ("llama.cpp", "deepseek-ai-DeepSeek-V3.2", "DeepseekTemplate"),
    "R1-Distill": ("trl", "deepseek_r1_distill", "DeepseekR1Template"),
    "R1-Distill-Qwen": ("llama.cpp", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "DeepseekR1Template"),
    "R1-Distill-Llama": ("llama.cpp", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "DeepseekR1Template"),
    "Gemma 4": ("llama.cpp", "google-gemma-4-31B-it", "Gemma4Template"),
    "Gemma 4, first": ("trl", "gemma4_v2", "Gemma4Template"),
    "Gemma 4, newest": ("trl", "gemma4_v5", "Gemma4Template"),
    "gpt-oss": ("llama.cpp", "openai-gpt-oss-120b", "Template"),
    "gpt-oss of TRL": ("trl", "gptoss", "Template"),
    "Llama 3": ("trl", "llama3", "Template"),
    "Llama 3.1": ("llama.cpp", "meta-llama-Llama-3.1-8B-Instruct", "Template"),
    "Llama 3.2": ("llama.cpp", "meta-llama-Llama-3.2-3B-Instruct", "Template"),
    "Llama 3.3": ("llama.cpp", "meta-llama-Llama-3.3-70B-Instruct", "Template"),
    "GLM-4.6": ("llama.cpp", "GLM-4.6", "Template"),
}
# What else the packages have, and why these are left out: variants of TRL that mark the generated parts themselves,
# and chat templates of another kind of model.
OTHERS = ["*"]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str | None, reasoning: str | None = None, *calls: Any) -> dict[str, Any]:
    turn = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": list(calls)}
    return {key: value for key, value in turn.items() if key == "content" or value}


def result(content: str, name: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"call_{name}", "name": name}


CITY = {"city": "Köln", "days": 5}
FIRST, SECOND = call("weather", CITY), call("holidays", {"year": 2024})
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [user("q1"), said("a1")],
    "system": [{"role": "system", "content": "be brief"}, user("q1"), said("a1")],
    "multi-turn": [user("q1"), said("a1"), user("q2"), said("a2"), user("q3"), said("a3")],
    "thinking": [user("q1"), said("a1", "t1"), user("q2"), said("a2", "t2")],
    "call": [user("q1"), said(None, None, FIRST)],
    "result": [user("q1"), said(None, None, FIRST), result("rain", "weather")],
    "answer": [user("q1"), said(None, None, FIRST), result("rain", "weather"), said("a1"), user("q2"), said("a2")],
    "two calls": [
        user("q1"),
        said(None, None, FIRST, SECOND),
        result("rain", "weather"),
        result("none", "holidays"),
        said("a1"),
    ],
    "calls in turn": [
        user("q1"),
        said(None, None, FIRST),
        result("rain", "weather"),
        said(None, None, SECOND),
        result("none", "holidays"),
        said("a1"),
    ],
    "thinking and calls": [
        user("q1"),
        said(None, "t1", FIRST),
        result("rain", "weather"),
        said(None, "t2", SECOND),
        result("none", "holidays"),
        said("a1", "t3"),
        user("q2"),
        said("a2"),
    ],
    "text and call": [user("q1"), said("let me see", None, FIRST), result("rain", "weather"), said("a1")],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {key: {"type": "string", "description": "e"}}},
        },
    }
    for name, key in (("weather", "city"), ("holidays", "year"))
]


@cache
def tokenizer(package: str, file: str) -> Any:
    text = official(package)[f"{file}.jinja"]
    made = tiny_tokenizer(text)
    special = {"</s>", "<s>", *SPECIAL.findall(text)}
    made.add_special_tokens({"additional_special_tokens": sorted(special)})
    made.eos_token = next((end for end in ENDS if end in special), "<｜end▁of▁sentence｜>" if "｜" in text else "</s>")
    made.bos_token = "<s>"
    return made


def row(name: str) -> dict[str, Any]:
    messages = CONVERSATIONS[name]
    calls = any("tool_calls" in message for message in messages)
    return {"messages": messages, **({"tools": TOOLS} if calls else {})}


def as_text(messages: Any) -> Any:
    """Return messages with the arguments of their calls as JSON text."""
    return [
        {
            **message,
            "tool_calls": [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
                for call in message["tool_calls"]
            ],
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]


def inlined(messages: Any) -> Any:
    """Return messages with reasoning at the beginning of the content, for chat templates that read it nowhere else."""
    return [
        {key: value for key, value in message.items() if key != "reasoning_content"}
        | {"content": f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content'] or ''}"}
        if message.get("reasoning_content")
        else message
        for message in messages
    ]


# What the last turn of a row has beside the chat template's own text: opening and closing of a thought, and the thought
# that stands for none where the generation prompt opens one.
PUT_BACK = {
    "DeepseekR1Template": ("<think>\n", "\n</think>\n\n", "<think>\n\n</think>\n\n"),
    "Gemma4Template": ("<|channel>thought\n", "\n<channel|>", ""),
}
# Chat templates that write arguments as they are, so that they must be JSON text; "" beside calls is an answer for some.
TEXT_ARGUMENTS = {"deepseekv3", "deepseek_r1_distill", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"}
NONE_BESIDE_CALLS = {"deepseek_r1_distill", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"}


def own_form(file: str, messages: Any, reads_reasoning: bool) -> Any:
    """Return messages in the form that the chat template of a file takes."""
    messages = messages if reads_reasoning else inlined(messages)
    messages = as_text(messages) if file in TEXT_ARGUMENTS else messages
    silent = None if file in NONE_BESIDE_CALLS else ""
    return [m | {"content": m["content"] or silent} if m.get("tool_calls") else m for m in messages]


def expected(package: str, file: str, reader: str, name: str, thinking: bool) -> str:
    """Return the text of a conversation with brackets around what is to be trained."""
    given = tokenizer(package, file)
    reads = reader in PUT_BACK or re.search("reasoning_content|thinking_text|message.thinking", given.chat_template)
    messages = own_form(file, row(name)["messages"], bool(reads))
    reference = Reference(given, row(name).get("tools"), enable_thinking=thinking)
    text, spans = reference.spans(messages)
    if reader in PUT_BACK and messages[-1]["role"] == "assistant":
        text, spans = put_back(reader, reference, messages, text, spans)
    return bracketed(text, spans)


def put_back(reader: str, reference: Reference, messages: Any, text: str, spans: Any) -> tuple[str, Any]:
    """Show the thought of the last turn that its prompt or its row has and the chat template leaves out."""
    opening, closing, none = PUT_BACK[reader]
    prompt = reference.render(messages[:-1], prompt=True)
    opens = opening.strip()
    header, tag, rest = prompt.rpartition(opens) if re.search(rf"{re.escape(opens)}\s*\S*\s*\Z", prompt) else (prompt, "", "")
    if not text.startswith(header) or text.startswith(header + opening):
        return text, spans
    reasoning = messages[-1].get("reasoning_content")
    if reasoning:
        thought = opening + reasoning + closing
        first = len(header) + (len(opening) if prompt == header + opening else 0)
    else:
        thought = none if not rest.strip() and tag else tag + rest
        first = len(header) + len(thought)
    *earlier, (_, end) = spans
    return header + thought + text[len(header) :], [*earlier, (first, end + len(thought))]


def encoded(package: str, file: str, reader: str, given: Mapping[str, Any], **options: Any) -> str:
    template: Template = registry().build(
        reader, "template", **{"tokenizer": tokenizer(package, file), "max_length": None} | options
    )
    return shown(template, template.encode(given))
