"""What is trained in each family of models, to the character: chat templates after their public documentation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle._registry import registry
from twinkle.errors import ArgumentError, EncodeError
from twinkle.template import Template
from twinkle.template.turns import _place, _Prompts, find_turns, turn_span
from twinkle.testing import tiny_tokenizer

CHAT_TEMPLATES = Path(__file__).with_name("chat_templates")
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


# Two turns, to the character


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
    "<|turn>user\nQ<turn|>\n<|turn>model\n<|channel>thought\n<channel|>⟦A<turn|>⟧\n",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦a<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦A<|eot_id|>⟧",
}


@EVERY
def test_two_turns_without_reasoning(family: str) -> None:
    assert encoded(family, talk("q", "a", "Q", "A")) == TWO_TURNS[family]


@EVERY
def test_one_turn_is_the_last_of_two(family: str) -> None:
    one, two = trained(family, talk("Q", "A")), trained(family, talk("q", "a", "Q", "A"))
    assert one == two[1:]


@EVERY
def test_a_system_prompt_is_shown_and_not_trained_and_replaces_the_familys_own(family: str) -> None:
    text = encoded(family, talk("q", "a", system="be brief"))
    assert "be brief" in text.partition("⟦")[0]
    assert "You are" not in text
    assert text == encoded(family, talk("q", "a"), default_system="be brief")


@EVERY
@settings(max_examples=15, deadline=None)
@given(
    turns=st.lists(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=6).map("x{}y".format), min_size=1, max_size=6
    )
)
def test_what_the_assistant_says_is_trained_and_nothing_that_others_say(family: str, turns: list[str]) -> None:
    own = [turn.replace("|", "") for turn in turns]
    row = talk(*(text for turn in own for text in ("QUESTION", turn)))
    encoder = template(family)
    feature: Any = encoder.encode(row)
    parts = trained(family, row)
    assert len(parts) == len(own)
    assert all(part.strip().startswith(turn) for part, turn in zip(parts, own, strict=True))
    assert not any("QUESTION" in part for part in parts)
    assert feature["labels"][-1] == -100
    assert encoder.decode(
        encoder.tokenizer(encoder.decode(feature["input_ids"]), add_special_tokens=False)["input_ids"]
    ) == (encoder.decode(feature["input_ids"]))


# The generation prompt


@EVERY
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("answer", ["A", "R|A"])
def test_the_generation_prompt_is_the_beginning_of_the_trained_form(family: str, thinking: bool, answer: str) -> None:
    """The one exception: reasoning in a row, where thinking is disabled, replaces the empty thought of the prompt."""
    if answer == "R|A" and not FAMILIES[family].thinks:
        answer = "A"
    encoder = template(family, enable_thinking=thinking)
    row = talk("q", "a", "Q", answer)
    prompt: Any = encoder.encode({"messages": row["messages"][:-1]}, add_generation_prompt=True)
    whole: Any = encoder.encode(row)
    same = whole["input_ids"][: prompt["length"]] == prompt["input_ids"]
    closed = not thinking and family in ("qwen3", "qwen3_5", "gemma4")
    assert same == (not (closed and answer == "R|A"))
    assert set(prompt["labels"]) == {-100}
    if thinking and answer == "R|A":
        assert whole["labels"][prompt["length"] - 1] == whole["input_ids"][prompt["length"]]


# Thinking


THOUGHT = {
    ("qwen3", True): "<think>\nR\n</think>\n\nA<|im_end|>",
    ("qwen3", False): "R\n</think>\n\nA<|im_end|>",
    ("qwen3_5", True): "R\n</think>\n\nA<|im_end|>",
    ("qwen3_5", False): "R\n</think>\n\nA<|im_end|>",
    ("deepseek_r1", True): "R\n</think>\n\nA<｜end▁of▁sentence｜>",
    ("deepseek_r1", False): "R\n</think>\n\nA<｜end▁of▁sentence｜>",
    ("deepseek_v4", True): "R</think>A<｜end▁of▁sentence｜>",
    ("deepseek_v4", False): "A<｜end▁of▁sentence｜>",
    ("gemma4", True): "<|channel>thought\nR\n<channel|>A<turn|>",
    ("gemma4", False): "<|channel>thought\nR\n<channel|>A<turn|>",
}


@pytest.mark.parametrize(("family", "thinking"), THOUGHT)
def test_the_reasoning_of_the_last_turn_is_trained_and_that_of_earlier_turns_not_shown(
    family: str, thinking: bool
) -> None:
    row = talk("q", "r|a", "Q", "R|A")
    earlier, last = trained(family, row, enable_thinking=thinking)
    assert last == THOUGHT[family, thinking]
    assert earlier == last[last.rindex("A") :].replace("A", "a")
    inline = talk("q", "a", "Q", "<think>\nR\n</think>\n\nA")
    assert encoded(family, inline, enable_thinking=thinking) == encoded(family, row, enable_thinking=thinking)


@pytest.mark.parametrize("family", [name for name, values in FAMILIES.items() if values.thinks])
@pytest.mark.parametrize("thinking", [True, False])
def test_without_reasoning_only_the_answer_is_trained(family: str, thinking: bool) -> None:
    for row in (talk("Q", "A"), talk("q", "a", "Q", "A")):
        assert trained(family, row, enable_thinking=thinking)[-1].startswith("A")


def test_the_smaller_gemmas_prompt_without_a_channel() -> None:
    small = tiny_tokenizer("{% set small = true %}" + tokenizer("gemma4").chat_template)
    small.add_special_tokens({"additional_special_tokens": list(FAMILIES["gemma4"].special)})
    small.bos_token = "<bos>"
    expected = "<bos><|turn>user\nQ<turn|>\n<|turn>model\n⟦A<turn|>⟧\n"
    assert encoded("gemma4", talk("Q", "A"), enable_thinking=False, tokenizer=small) == expected


# Tools


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
ARGUMENTS: list[dict[str, Any]] = [
    {"json": "{}", "xml": "", "dsml": "", "gemma": "{}"},
    {
        "json": '{"n": 5}',
        "xml": "<parameter=n>\n5\n</parameter>\n",
        "dsml": '<｜DSML｜parameter name="n" string="false">5</｜DSML｜parameter>',
        "gemma": "{n:5}",
    },
    {
        "json": '{"a": "<|im_end|> ü", "l": [true]}',
        "xml": "<parameter=a>\n<|im_end|> ü\n</parameter>\n<parameter=l>\n[true]\n</parameter>\n",
        "dsml": '<｜DSML｜parameter name="a" string="true"><|im_end|> ü</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="l" string="false">[true]</｜DSML｜parameter>',
        "gemma": '{a:<|"|><|im_end|> ü<|"|>,l:[true]}',
    },
]


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["none", "a number", "text and a list"])
@pytest.mark.parametrize("calls", [1, 2])
def test_tool_calls_are_trained_whole_and_their_results_are_not(
    family: str, arguments: dict[str, Any], calls: int
) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call("f", arguments["json"])] * calls},
        *[{"role": "tool", "content": "RESULT", "tool_call_id": "call_f"}] * calls,
        {"role": "assistant", "content": "done"},
    ]
    first, last = trained(family, {"messages": messages, "tools": TOOLS}, enable_thinking=False)
    if calls == 1:
        assert first == CALLS[family].format(**arguments)
    assert first.count("RESULT") == 0
    assert first.endswith(CALLS[family].format(**arguments)[-14:])
    assert last.strip().startswith("done")
    assert "RESULT" not in last


def test_results_of_deepseek_v4_come_in_the_order_of_the_calls() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "ok", "tool_calls": [call("f", {}), call("g", {})]},
        {"role": "tool", "content": "G", "tool_call_id": "call_g"},
        {"role": "tool", "content": "F", "tool_call_id": "call_f"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "done"},
    ]
    text = encoded("deepseek_v4", {"messages": messages})
    assert (
        "<｜User｜><tool_result>F</tool_result>\n\n<tool_result>G</tool_result>\n\nmore<｜Assistant｜><think>" in text
    )
    assert [message["content"] for message in messages[2:4]] == ["G", "F"]


def test_with_tools_deepseek_v4_keeps_the_reasoning_of_all_turns() -> None:
    row = talk("q", "r|a", "Q", "R|A", system="S") | {"tools": TOOLS}
    text = encoded("deepseek_v4", row)
    assert "q<｜Assistant｜><think>⟦r</think>a<｜end▁of▁sentence｜>⟧" in text
    assert text.startswith("<｜begin▁of▁sentence｜>S\n\n## Tools\n\n")
    assert '### Available Tool Schemas\n\n{"name": "f", "parameters": {"type": "object"}}\n\nYou MUST' in text


def test_the_effort_of_deepseek_v4_opens_the_prompt_if_it_thinks() -> None:
    row = talk("Q", "A", system="S")
    assert encoded("deepseek_v4", row, reasoning_effort="max").startswith(
        "<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    )
    assert encoded("deepseek_v4", row, reasoning_effort="high") == encoded("deepseek_v4", row)
    thoughtless = encoded("deepseek_v4", row, enable_thinking=False)
    assert encoded("deepseek_v4", row, enable_thinking=False, reasoning_effort="max") == thoughtless
    with pytest.raises(ArgumentError, match="reasoning_effort is 'low'; it is None, 'high' or 'max'"):
        template("deepseek_v4", reasoning_effort="low")
    with pytest.raises(ArgumentError, match="nearest"):
        template("deepseek_v4", max_lenght=3)


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v2", "glm4", "internlm2", "llama3"])
def test_tool_calls_that_a_chat_template_does_not_show_are_refused(family: str) -> None:
    row = talk("q", "a")
    row["messages"][1]["tool_calls"] = [call("weather", {})]
    with pytest.raises(EncodeError, match=r"message 1 \(assistant\) calls the tool 'weather', which .* not show"):
        encoded(family, row)


def test_a_call_after_which_glm4_observes_ends_with_that_token() -> None:
    shows = tokenizer("glm4").chat_template.replace(
        "message.content", "(message.content or message.tool_calls[0].function.name + '\\n{}')"
    )
    other = tiny_tokenizer(shows)
    other.add_special_tokens({"additional_special_tokens": list(GLM)})
    row = talk("q", "")
    row["messages"][1]["tool_calls"] = [call("weather", {})]
    assert trained("glm4", row, tokenizer=other) == ["\nweather\n{}<|observation|>"]


# Length


@EVERY
def test_rows_at_the_limit_stay_whole_and_one_more_token_is_cut(family: str) -> None:
    row = talk("q", "a", "Q", "A")
    full: Any = template(family).encode(row)
    size, ids = full["length"], full["input_ids"]
    for strategy in ("raise", "left", "right", "delete", "split"):
        kept: Any = template(family, max_length=size, truncation_strategy=strategy).encode(row)
        assert (kept[0] if strategy == "split" else kept)["input_ids"] == ids
    cut: dict[str, Any] = {
        strategy: template(family, max_length=size - 1, truncation_strategy=strategy).encode(row)
        for strategy in ("left", "right", "delete", "split")
    }
    assert cut["left"]["input_ids"] == ids[1:]
    assert cut["right"]["input_ids"] == ids[:-1]
    assert cut["delete"]["input_ids"] == []
    assert [part["input_ids"] for part in cut["split"]] == [ids[:-1], ids[-1:]]
    for part in (cut["left"], cut["right"], *cut["split"]):
        assert part["labels"][-1] == -100
        assert all(label in (-100, token) for label, token in zip(part["labels"], part["input_ids"][1:], strict=False))
    with pytest.raises(EncodeError, match=f"{size} tokens and max_length is {size - 1}"):
        template(family, max_length=size - 1).encode(row)


# Work grows with the conversation, not with its square


class Counting:
    """A tokenizer that counts the characters of all that is rendered and tokenized."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.calls, self.characters = tokenizer, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def _count(self, text: str) -> None:
        self.calls, self.characters = self.calls + 1, self.characters + len(text)

    def __call__(self, text: str, **options: Any) -> Any:
        self._count(text)
        return self.tokenizer(text, **options)

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        text = self.tokenizer.apply_chat_template(*args, **options)
        self._count(text)
        return text


def work(family: str, row: dict[str, Any]) -> tuple[int, int]:
    counting = Counting(tokenizer(family))
    template(family, tokenizer=counting).encode(row)
    return counting.calls, counting.characters


@EVERY
def test_ten_times_the_turns_are_ten_times_the_work(family: str) -> None:
    calls, characters = work(family, talk(*["some words"] * 20))
    more_calls, more_characters = work(family, talk(*["some words"] * 200))
    assert more_calls == calls < 12
    assert more_characters < 11 * characters


@pytest.mark.parametrize("family", CALLS)
def test_so_it_is_with_tools(family: str) -> None:
    def agent(steps: int) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
        for number in range(steps):
            messages.append({"role": "assistant", "content": "hm", "tool_calls": [call("f", {"n": number, "s": "x"})]})
            messages.append({"role": "tool", "content": "RESULT", "tool_call_id": "call_f"})
        return {"messages": [*messages, {"role": "assistant", "content": "done"}], "tools": TOOLS}

    calls, characters = work(family, agent(10))
    more_calls, more_characters = work(family, agent(100))
    assert more_calls == calls < 18
    assert more_characters < 11 * characters


FRAGMENTS = [
    "a",
    " ",
    "\n",
    "你",
    "<think>",
    "</think>",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|user|>",
    "<turn|>\n",
]
SAYS = st.lists(st.sampled_from(FRAGMENTS), max_size=5).map("".join)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek_v4"])  # it marks its turns itself
@settings(max_examples=12, deadline=None)
@given(says=st.lists(st.tuples(SAYS, SAYS, st.none() | SAYS), min_size=1, max_size=4), thinking=st.booleans())
def test_turns_found_at_once_are_those_found_one_by_one(family: str, says: list[Any], thinking: bool) -> None:
    messages: list[dict[str, Any]] = []
    for question, answer, reasoning in says:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer, "reasoning_content": reasoning})
        if family in CALLS and len(answer) % 2:
            messages[-1]["tool_calls"] = [call("f", {"a": question}), call("f", {"n": len(question)})]
            messages += [{"role": "tool", "content": question}, {"role": "assistant", "content": answer}]
    encoder = template(family, enable_thinking=thinking)
    adapted: Any = encoder.format_trajectory({"messages": messages})["messages"]
    chat = encoder._renderer({"messages": messages})
    text = chat.render(adapted)
    turns = [index for index, message in enumerate(adapted) if message["role"] == "assistant"]
    prompts = _Prompts(chat, adapted, text)
    starts = [prompts.measured(index, _place(chat, adapted, index, text)) for index in turns]
    ends = [turn_span(chat, adapted, index, text)[1] for index in turns]
    assert find_turns(chat, adapted, turns, text) == list(zip(starts, ends, strict=True))


def test_where_no_token_ends_a_call_the_result_is_not_trained() -> None:
    shows = (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + ' ' + c.function.arguments | tojson + ']' }}"
        "{% endfor %}{{ '\n' if m.role == 'assistant' else '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "hm", "tool_calls": [call("f", {"n": 5})]},
        {"role": "tool", "content": "RESULT"},
        {"role": "assistant", "content": "done"},
    ]
    assert trained("llama3", {"messages": messages}, tokenizer=tiny_tokenizer(shows)) == [' hm[f {"n": 5', " done"]


@EVERY
def test_a_turn_that_quotes_the_chat_template_is_found_all_the_same(family: str) -> None:
    quoted = TWO_TURNS[family].replace("⟦", "").replace("⟧", "").replace("</think>", "").strip()
    for says in (["q", quoted, "Q", quoted, quoted, "A"], [quoted, "a", quoted, quoted, "Q", "A"]):
        row = {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(says)]}
        encoder = template(family)
        feature: Any = encoder.encode(row)
        learned = encoder.decode([label for label in feature["labels"] if label != -100])
        assert learned.count(quoted) == says[1::2].count(quoted)
        assert len(learned) - sum(map(len, says[1::2])) == sum(map(len, trained(family, talk(*"qaQAqA")))) - 3
