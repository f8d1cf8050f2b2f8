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
from families import shown
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

# The families of docs/guides/researcher/models.md with an available official chat template: package and file, and the
# template that reads them.
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
# Other chat templates of the two packages whose prefixes tell the places of the turns. Left out are those that mark the
# generated parts themselves, read images, or take no conversation as it is.
OTHERS = {
    "llama.cpp": [
        "Bielik-11B-v3.0-Instruct", "GLM-4.7-Flash", "MiMo-VL", "Qwen3-Coder", "Spark2.5", "StepFun3.5-Flash",
        "deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731", "google-gemma-4-31B-it-interleaved",
        "ibm-granite-granite-4.0", "ibm-granite-granite-4.1", "inclusionai-ling-3.0-flash",
        "meetkai-functionary-medium-v3.1", "moonshotai-Kimi-K2", "muse-glimmer", "openbmb-MiniCPM5-1B",
        "unsloth-mistral-Devstral-Small-2507",
    ],
    "trl": [
        "gemma4", "gemma4_v3", "gemma4_v4", "glm4moe", "lfm2_v2", "muse_glimmer", "nemotron_3_5_lightning",
        "nemotron_3_ultra", "qwen3_8", "qwen3_vl",
    ],
}  # fmt: skip


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str | None, reasoning: str | None = None, *calls: Any) -> dict[str, Any]:
    turn = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": list(calls)}
    return {key: value for key, value in turn.items() if key == "content" or value}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": IDS[name], "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str, name: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": IDS[name], "name": name}


IDS = {"weather": "weather01", "holidays": "holiday02"}  # of nine letters and digits, as Mistral wants them
FIRST, SECOND = call("weather", {"city": "Köln", "days": 5}), call("holidays", {"year": 2024})
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
    "call, then text and call": [
        user("q1"),
        said(None, None, FIRST),
        result("rain", "weather"),
        said("let me see", None, SECOND),
        result("none", "holidays"),
        said("a1"),
    ],
}


def _calls(messages: Any) -> list[Any]:
    return [call for message in messages for call in message.get("tool_calls", ())]


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
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    },
                }
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
# Chat templates that write arguments as they are, so that they must be JSON text; and those for which the content ""
# beside calls is an answer.
TEXT_ARGUMENTS = {"deepseekv3", "deepseek_r1_distill", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"}
NONE_BESIDE_CALLS = {
    "deepseek_r1_distill",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
}


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
    header, tag, rest = (
        prompt.rpartition(opens) if re.search(rf"{re.escape(opens)}\s*\S*\s*\Z", prompt) else (prompt, "", "")
    )
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


def build(package: str, file: str, reader: str, **options: Any) -> Template:
    template: Template = registry().build(
        reader, "template", **{"tokenizer": tokenizer(package, file), "max_length": None} | options
    )
    return template


def encoded(package: str, file: str, reader: str, given: Mapping[str, Any], **options: Any) -> str:
    template = build(package, file, reader, **options)
    return shown(template, template.encode(given))


# Conversations that a family's chat template does not take, and what the error says.
ONE_CALL = "the chat template refuses this conversation: This model only supports single tool-calls at once!"
NOT_SHOWN = r"message 1 \(assistant\) calls the tool '\w+', which the chat template does not show"
REFUSED = {
    "Llama 3.1": {"two calls": ONE_CALL},
    "Llama 3.2": {"two calls": ONE_CALL},
    "Llama 3.3": {"two calls": ONE_CALL},
    "Llama 3": {name: NOT_SHOWN for name, messages in CONVERSATIONS.items() if FIRST in _calls(messages)},
    "gpt-oss": {"two calls": NOT_SHOWN},
    "gpt-oss of TRL": {"two calls": NOT_SHOWN},
    "R1-Distill": {"text and call": NOT_SHOWN, "call, then text and call": NOT_SHOWN.replace("1", "3")},
    "R1-Distill-Llama": {"text and call": NOT_SHOWN, "call, then text and call": NOT_SHOWN.replace("1", "3")},
}
# Of these, prefixes do not tell the places of turns in every chat template.
TURNS: dict[str, list[dict[str, Any]]] = CONVERSATIONS | {
    "text, then thinking": [user("q1"), said("let me see", None, FIRST), result("rain", "weather"), said("a1", "t1")],
    "two texts with calls": [
        user("q1"),
        said(None, "t1", FIRST, SECOND),
        result("rain", "weather"),
        result("none", "holidays"),
        said("let me see", "t2", FIRST, SECOND),
        result("rain", "weather"),
        result("none", "holidays"),
        said("a1", "t3"),
    ],
}
TAKEN = [(family, name) for family in FAMILIES for name in CONVERSATIONS if name not in REFUSED.get(family, {})]


@pytest.mark.sample(100)
@pytest.mark.parametrize(("family", "name"), TAKEN)
def test_labels_are_what_renderings_of_prefixes_tell(family: str, name: str) -> None:
    """The text, too, is the tokenizer's own: but for thoughts of the last turn that `PUT_BACK` says."""
    for thinking in (True, False):
        wanted = expected(*FAMILIES[family], name, thinking)
        assert encoded(*FAMILIES[family], row(name), enable_thinking=thinking) == wanted


@pytest.mark.sample(60)
@pytest.mark.parametrize(("family", "name"), [pair for pair in TAKEN if "tools" in row(pair[1])])
def test_arguments_as_text_and_as_dicts_are_one(family: str, name: str) -> None:
    given = row(name)
    text = encoded(*FAMILIES[family], given | {"messages": as_text(given["messages"])})
    assert text == encoded(*FAMILIES[family], given)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in REFUSED.items() for name in names])
def test_a_refusal_says_why(family: str, name: str) -> None:
    with pytest.raises(EncodeError, match=REFUSED[family][name]):
        encoded(*FAMILIES[family], row(name))


@pytest.mark.sample(40)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["thinking and calls", "text, then thinking", "two texts with calls"])
def test_turns_that_are_trained_alone_share_no_token(family: str, name: str) -> None:
    """What they have together is what is trained if all are."""
    given: dict[str, Any] = {"messages": TURNS[name], "tools": TOOLS}
    template = build(*FAMILIES[family])
    try:
        whole: Any = template.encode(given)
    except EncodeError:
        assert re.match("Llama 3|gpt-oss|R1-Distill", family)  # it takes one call, or no text beside calls
        return
    together = [-100] * len(whole["labels"])
    for turn, message in enumerate(given["messages"]):
        if message["role"] == "assistant":
            alone = [
                m | {"weight": int(index == turn)} if m["role"] == "assistant" else m
                for index, m in enumerate(given["messages"])
            ]
            encoded_alone: Any = template.encode(given | {"messages": alone})
            for place, label in enumerate(encoded_alone["labels"]):
                assert label == -100 or together[place] == -100
                together[place] = label if label != -100 else together[place]
    assert together == whole["labels"]


@pytest.mark.parametrize("family", ["gpt-oss", "gpt-oss of TRL"])
def test_what_a_chat_template_refuses_is_not_written_in_another_form(family: str) -> None:
    """Its reasoning would be text between think tags, which the model does not know, in the answer."""
    messages = [user("q1"), said("let me see", "t1", FIRST), result("rain", "weather"), said("a1", "t2")]
    with pytest.raises(EncodeError, match=r"the chat template refuses .*: Cannot pass both content and thinking"):
        encoded(*FAMILIES[family], {"messages": messages, "tools": TOOLS})


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", [family for family in FAMILIES if re.match("Qwen|DeepSeek|Llama", family)])
def test_the_token_that_ends_a_turn_is_trained_once_a_turn(family: str) -> None:
    for name in ("multi-turn", "calls in turn", "text and call"):
        if name in REFUSED.get(family, {}):
            continue
        template = build(*FAMILIES[family])
        labels = template.encode(row(name))["labels"]
        turns = sum(message["role"] == "assistant" for message in CONVERSATIONS[name])
        assert labels.count(template.tokenizer.eos_token_id) == turns
        assert labels[-1] == -100


@pytest.mark.parametrize("family", ["Gemma 4", "gpt-oss", "R1-Distill-Qwen", "Qwen3.5"])
@pytest.mark.parametrize("strategy", ["left", "right", "split"])
def test_truncation_keeps_the_labels_of_what_it_keeps(family: str, strategy: Any) -> None:
    given = row("text and call")
    whole: Any = build(*FAMILIES[family]).encode(given)
    size = whole["length"] * 2 // 3
    cut: Any = build(*FAMILIES[family], max_length=size, truncation_strategy=strategy).encode(given)
    places = {"left": [(whole["length"] - size, whole["length"])], "right": [(0, size)]}.get(
        strategy, [(0, size), (size, whole["length"])]
    )
    for part, (first, last) in zip(cut if strategy == "split" else [cut], places, strict=True):
        assert part["input_ids"] == whole["input_ids"][first:last]
        assert part["labels"] == [*whole["labels"][first : last - 1], -100]


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["Gemma 4", "Gemma 4, newest", "gpt-oss", "R1-Distill-Qwen", "Qwen3.5", "Llama 3.1"])
@pytest.mark.parametrize("name", ["text and call", "calls in turn"])
def test_a_loss_scale_by_role_weights_what_is_trained_and_nothing_else(family: str, name: str) -> None:
    plain: Any = build(*FAMILIES[family]).encode(row(name))
    for weight in (1.0, 0.25):
        scale = registry().build("RoleLossScale", "loss_scale", weights={"assistant": weight})
        scaled: Any = build(*FAMILIES[family], loss_scale=scale).encode(row(name))
        assert scaled["labels"] == plain["labels"]
        assert scaled["loss_scale"] == [weight if label != -100 else 0.0 for label in plain["labels"]]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_encoding_of_deepseek_v4_agrees_with_the_chat_template_of_llama_cpp(name: str) -> None:
    """But for line breaks before the tools of a conversation without a system prompt, which llama.cpp leaves out."""
    for thinking in (True, False):
        other = encoded("llama.cpp", "deepseek-ai-DeepSeek-V4", "DeepseekTemplate", row(name), enable_thinking=thinking)
        own = encoded("llama.cpp", "deepseek-ai-DeepSeek-V4", "DeepseekV4Template", row(name), enable_thinking=thinking)
        assert own == other.replace("<s>## Tools", "<s>\n\n## Tools")


@pytest.mark.soak
@pytest.mark.parametrize(("package", "file"), [(package, file) for package, files in OTHERS.items() for file in files])
def test_so_it_is_with_other_models(package: str, file: str) -> None:
    reader = "Gemma4Template" if "gemma" in file else "Template"
    for name in CONVERSATIONS:
        for thinking in (True, False):
            wanted = expected(package, file, reader, name, thinking)
            assert encoded(package, file, reader, row(name), enable_thinking=thinking) == wanted, (name, thinking)
