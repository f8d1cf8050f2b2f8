"""Filters by the structure of a conversation: order of roles, trivial questions, refusals."""

import re
from typing import Any

from twinkle.data_format import ROLES, split_reasoning
from twinkle_agentic.preprocessor.base import Row, RowFilter, of_role, text_of

_GREETING = re.compile(
    r"(?:hello|hi|hey|good (?:morning|afternoon|evening)|how are you|你好|您好|嗨|早上好|晚上好)\W*", re.I
)
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]")
_REFUSAL = re.compile(
    r"\s*(?:(?:i'?m|i am) (?:really |very |truly )?sorry|sorry|i apologi[sz]e|unfortunately)?[\s,.!]*(?:but )?"
    r"(?:i (?:can'?t|cannot|can ?not|am unable to|am not able to|won'?t|will not)|as an ai(?: language)? model)\b"
    r"|\s*(?:很?抱歉|对不起)[，,。!！\s]*我?(?:无法|不能)|\s*作为(?:一个|一名)?(?:AI|人工智能)",
    re.IGNORECASE,
)


class HardFilter(RowFilter):
    """Drops conversations of one question that is trivial, or that has a short answer without reasoning.

    A question is trivial if it is a greeting, or has fewer than 10 characters (6 in Chinese, Japanese or Korean). An
    answer is short with fewer than 80 characters. Rows without a message of the user are dropped.

    Args:
        allow_incomplete_role: keep rows without a message of the user.
    """

    def __init__(self, allow_incomplete_role: bool = False) -> None:
        self.allow_incomplete_role = allow_incomplete_role

    def judge(self, row: Row) -> Row | str:
        """Return the row, or why it is trivial."""
        asked, answers = of_role(row, "user"), of_role(row, "assistant")
        if not asked:
            return row if self.allow_incomplete_role else "no user message"
        if len(asked) > 1:
            return row
        question = text_of(asked[0]).strip()
        if len(question) < (6 if _CJK.search(question) else 10) or _GREETING.fullmatch(question):
            return "trivial question"
        if len(answers) == 1 and len(text_of(answers[0]).strip()) < 80 and not answers[0].get("reasoning_content"):
            return "short answer without reasoning"
        return row


class RefuseFilter(RowFilter):
    """Drops conversations whose last answer begins with a refusal, in English or Chinese."""

    def judge(self, row: Row) -> Row | str:
        """Return the row, or that it ends in a refusal."""
        answers = of_role(row, "assistant")
        return "refusal" if answers and _REFUSAL.match(text_of(answers[-1])) else row


class MessageNormalizer(RowFilter):
    """Brings messages to one form: known roles, text without spaces at its ends, and reasoning under its own key.

    The roles `human`, `gpt`, `bot`, `model` and `function` become `user`, `assistant` and `tool`. `<think>...</think>`
    at the beginning of an answer, and the key `thinking`, become `reasoning_content`.
    """

    def judge(self, row: Row) -> Row | str:
        """Return the row in this form."""
        return {**row, "messages": [_normal(message) for message in row["messages"]]}


class MessageSanityFilter(RowFilter):
    """Drops conversations that no chat template shows rightly.

    Args:
        check_role_order: a system message is the first one only; the user does not follow the user, nor the assistant
            the assistant; a tool follows a turn of the assistant with calls, or a tool.
        check_tool_matching: the `tool_call_id` of a tool message is that of a call before it.
        check_content_integrity: roles are known, and each message has text, or calls tools.
        trim_to_assistant: remove the messages after the last answer; a row without an answer is dropped.
        extra_sensitive_words: rows in which one of these texts occurs are dropped; case does not count.
    """

    def __init__(
        self,
        check_role_order: bool = True,
        check_tool_matching: bool = True,
        check_content_integrity: bool = True,
        trim_to_assistant: bool = True,
        extra_sensitive_words: list[str] | None = None,
    ) -> None:
        self.check_role_order, self.check_tool_matching = check_role_order, check_tool_matching
        self.check_content_integrity, self.trim_to_assistant = check_content_integrity, trim_to_assistant
        self.sensitive_words = [word.lower() for word in extra_sensitive_words or () if word]

    def judge(self, row: Row) -> Row | str:
        """Return the row, or what is wrong with it."""
        messages = list(row["messages"])
        if self.trim_to_assistant:
            while messages and messages[-1].get("role") != "assistant":
                messages.pop()
            if not messages:
                return "no answer"
        if self.check_content_integrity and not all(map(_has_content, messages)):
            return "empty message"
        if self.check_role_order and not _in_order(messages):
            return "order of roles"
        if self.check_tool_matching and not _calls_match(messages):
            return "result without call"
        said = "\n".join(map(text_of, messages)).lower()
        if any(word in said for word in self.sensitive_words):
            return "sensitive words"
        return {**row, "messages": messages}


_ROLE_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}


def _normal(message: Any) -> dict[str, Any]:
    role = str(message.get("role") or "").strip().lower()
    normal = {**message, "role": _ROLE_NAMES.get(role, role)}
    if isinstance(thought := normal.pop("thinking", None), str) and thought.strip():
        normal.setdefault("reasoning_content", thought)
    if isinstance(normal.get("content"), str):
        normal["content"] = normal["content"].strip()
        normal = split_reasoning(normal)
    return normal


def _has_content(message: Any) -> bool:
    return message.get("role") in ROLES and bool(text_of(message).strip() or message.get("tool_calls"))


def _in_order(messages: list[Any]) -> bool:
    before: Any = None
    for place, message in enumerate(messages):
        role = message.get("role")
        last = None if before is None else before.get("role")
        follows_call = last == "tool" or (last == "assistant" and bool(before.get("tool_calls")))
        if (role == "system" and place) or (role == "tool" and not follows_call):
            return False
        if role in ("user", "assistant") and role == last:
            return False
        before = message
    return True


def _calls_match(messages: list[Any]) -> bool:
    known: set[Any] = set()
    for message in messages:
        if message.get("role") == "tool" and message.get("tool_call_id") and message["tool_call_id"] not in known:
            return False
        known |= {call.get("id") for call in message.get("tool_calls") or ()}
    return True
