"""All turns of a conversation are found in work that grows with it, and just as if looked for one by one."""

from typing import Any

import pytest
from families import CALLS, EVERY, FAMILIES, TOOLS, TWO_TURNS, call, talk, template, tokenizer, trained
from hypothesis import example, given, settings
from hypothesis import strategies as st

from twinkle.testing import tiny_tokenizer
from twinkle_chat.turns import TurnStarts, _locate, _prompt, find_turns, turn_span

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


@pytest.mark.sample(2)
@EVERY
def test_ten_times_the_turns_are_ten_times_the_work(family: str) -> None:
    calls, characters = work(family, talk(*["some words"] * 20))
    more_calls, more_characters = work(family, talk(*["some words"] * 200))
    assert more_calls == calls < 12
    assert more_characters < 11 * characters


@pytest.mark.sample(2)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek_v4"])  # it marks its turns itself
@settings(max_examples=12, deadline=None)
@given(says=st.lists(st.tuples(SAYS, SAYS, st.none() | SAYS), min_size=1, max_size=4), thinking=st.booleans())
@example(says=[("", "<think>\na", None), ("", "", None)], thinking=True)
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
    chat = encoder.renderer({"messages": messages})
    text = chat.render(adapted)
    turns = [index for index, message in enumerate(adapted) if message["role"] == "assistant"]
    prompts = TurnStarts(chat, adapted, text)
    starts = [prompts.start_by_prompt(index, _locate(chat, adapted, index, text).first) for index in turns]
    ends = [turn_span(chat, adapted, index, text)[1] for index in turns]
    found = find_turns(chat, adapted, turns, text)
    assert [parts[-1][1] for parts in found] == ends
    for index, [(start, _), *_], alone in zip(turns, found, starts, strict=True):
        if start == alone:
            continue
        # Where a turn that follows changes how earlier ones are shown, the turn's own prompt is no beginning of the
        # text and says nothing; then what is left out must be the end of that prompt.
        prompt = _prompt(chat, adapted, index)
        assert prompt is not None
        assert not text.startswith(prompt)
        assert alone < start
        assert prompt.endswith(text[alone:start])


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
    assert trained("llama3", {"messages": messages}, tokenizer=tiny_tokenizer(shows)) == [' hm[f {"n": 5}]', " done"]


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
