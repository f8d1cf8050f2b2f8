"""Qwen3's chat templates: turns that mention </think>, and conversations without a question."""

from typing import Any

import pytest

from twinkle.errors import EncodeError, PatchError
from twinkle.patch import Qwen3AllowToolTailTemplate, Qwen3ChatTemplate, apply_context, apply_patch, undo_patch
from twinkle.template import Template
from twinkle.testing import CHATML, tiny_tokenizer

# The lines that Qwen3's and Qwen3.5's templates have in common, around them as little as renders a conversation.
HEAD = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
"""
GUARD = """{%- if ns.multi_step_tool %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
"""
TURNS = """{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
PARSE
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- 'A[' + reasoning_content + ']' + content }}
        {%- else %}
            {{- 'A' + content }}
        {%- endif %}
    {%- else %}
        {{- message.role[0]|upper + content }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}"""
_READ = "split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n')"
CONTENT = """            {%- if '</think>' in content %}
                {%- set reasoning_content = content.READ %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}"""
MESSAGE = """            {%- if '</think>' in message.content %}
                {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
                {%- set reasoning_content = message.content.READ %}
            {%- endif %}"""
TEMPLATES = {
    "qwen3": HEAD + TURNS.replace("PARSE", MESSAGE.replace("READ", _READ)),
    "qwen3_5": HEAD + GUARD + TURNS.replace("PARSE", CONTENT.replace("READ", _READ)),
}
THOUGHT = "<think>\nhm\n</think>\n\nyes"
EVERY = pytest.mark.parametrize("family", TEMPLATES)


def tokenizer(family: str) -> Any:
    return tiny_tokenizer(TEMPLATES[family])


def render(made: Any, *turns: tuple[str, str]) -> str:
    roles = {"U": "user", "A": "assistant", "T": "tool", "S": "system"}
    messages = [{"role": roles[role], "content": text} for role, text in turns]
    return str(made.apply_chat_template(messages, tokenize=False))


class TestThoughts:
    @EVERY
    def test_a_thought_at_the_beginning_is_read_as_before(self, family: str) -> None:
        made = tokenizer(family)
        before = render(made, ("U", "q"), ("A", THOUGHT))
        with apply_context(made, Qwen3ChatTemplate):
            assert render(made, ("U", "q"), ("A", THOUGHT)) == before == "Uq\nA[hm]yes\n"

    @EVERY
    @pytest.mark.parametrize("text", ["write </think> to end it", "a </think> b </think> c", "`<think>` and </think>"])
    def test_a_turn_that_mentions_the_tag_is_whole(self, family: str, text: str) -> None:
        made = tokenizer(family)
        talk = [("U", "q"), ("A", text), ("U", "Q"), ("A", text)]
        assert text not in render(made, *talk)
        with apply_context(made, Qwen3ChatTemplate):
            assert render(made, *talk) == f"Uq\nA{text}\nUQ\nA[]{text}\n"

    @EVERY
    def test_a_thought_ends_at_the_first_tag(self, family: str) -> None:
        made = tokenizer(family)
        text = "<think>hm</think>say </think> aloud"
        assert "say" not in render(made, ("U", "q"), ("A", text))
        with apply_context(made, Qwen3ChatTemplate):
            assert render(made, ("U", "q"), ("A", text)) == "Uq\nA[hm]say </think> aloud\n"

    def test_an_unfinished_thought_is_text(self) -> None:
        made = tokenizer("qwen3_5")
        with apply_context(made, Qwen3ChatTemplate):
            assert render(made, ("U", "q"), ("A", "<think>hm")) == "Uq\nA[]<think>hm\n"


class TestToolTail:
    TALK = (("A", THOUGHT), ("T", "42"), ("A", "so"), ("T", "43"))

    def test_it_is_refused_without_the_patch(self) -> None:
        with pytest.raises(Exception, match="No user query found"):
            render(tokenizer("qwen3_5"), *self.TALK)

    def test_it_is_shown_as_behind_its_question(self) -> None:
        made = tokenizer("qwen3_5")
        whole = render(made, ("U", "q"), *self.TALK)
        with apply_context(made, Qwen3AllowToolTailTemplate):
            assert render(made, *self.TALK) == whole.removeprefix("Uq\n")
            assert render(made, ("U", "q"), *self.TALK) == whole

    def test_qwen3_which_refuses_nothing_stays(self) -> None:
        made = tokenizer("qwen3")
        before = made.chat_template
        with apply_context(made, Qwen3AllowToolTailTemplate):
            assert made.chat_template == before


class TestWhere:
    @pytest.mark.parametrize("first", ["Qwen3ChatTemplate", "Qwen3AllowToolTailTemplate"])
    def test_both_go_together_and_each_is_undone_alone(self, first: str) -> None:
        made = tokenizer("qwen3_5")
        before = made.chat_template
        for name in ("Qwen3ChatTemplate", "Qwen3AllowToolTailTemplate", "Qwen3ChatTemplate"):
            apply_patch(made, name)
        undo_patch(made, first)
        text = "a </think> b"
        assert (text in render(made, ("U", "q"), ("A", text))) == (first != "Qwen3ChatTemplate")
        undo_patch(made, ({"Qwen3ChatTemplate", "Qwen3AllowToolTailTemplate"} - {first}).pop())
        assert made.chat_template is before

    def test_a_template_of_ours_renders_with_it(self) -> None:
        made = tokenizer("qwen3_5")
        template = Template(tokenizer=made, max_length=None)
        row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a </think> b"}]}
        with pytest.raises(EncodeError, match="cannot be located in the rendered conversation"):
            template.encode(row)
        with apply_context(template, Qwen3ChatTemplate):
            assert "a </think> b" in template.decode(template.encode(row)["input_ids"])

    def test_a_processor_and_its_tokenizer_both_get_it(self) -> None:
        class Processor:
            def __init__(self) -> None:
                self.tokenizer = tokenizer("qwen3")
                self.chat_template = TEMPLATES["qwen3_5"]

        processor = Processor()
        before = processor.tokenizer.chat_template, processor.chat_template
        with apply_context(processor, Qwen3ChatTemplate):
            assert "split" not in processor.chat_template
            assert "split" not in processor.tokenizer.chat_template
        assert (processor.tokenizer.chat_template, processor.chat_template) == before

    @EVERY
    def test_a_saved_tokenizer_with_the_patch_takes_it_again(self, family: str) -> None:
        made = tokenizer(family)
        apply_patch(made, Qwen3ChatTemplate)
        other = tiny_tokenizer(made.chat_template)
        undo_patch(made, Qwen3ChatTemplate)
        before = other.chat_template
        with apply_context(other, Qwen3ChatTemplate):
            assert other.chat_template == before

    @pytest.mark.parametrize("patch", [Qwen3ChatTemplate, Qwen3AllowToolTailTemplate])
    def test_other_models_templates_are_refused(self, patch: Any) -> None:
        made = tiny_tokenizer(CHATML)
        with pytest.raises(PatchError, match="it is another model's, or one that needs no patch"):
            apply_patch(made, patch)
        assert made.chat_template == CHATML

    def test_no_template_is_an_error(self) -> None:
        with pytest.raises(PatchError, match="has no chat template; give a tokenizer"):
            apply_patch(tiny_tokenizer(None), Qwen3ChatTemplate)

    def test_several_templates_are_an_error(self) -> None:
        made = tiny_tokenizer(None)
        made.chat_template = {"default": TEMPLATES["qwen3"], "tool_use": TEMPLATES["qwen3"]}
        with pytest.raises(PatchError, match=r"several chat templates \(default, tool_use\)"):
            apply_patch(made, Qwen3ChatTemplate)
