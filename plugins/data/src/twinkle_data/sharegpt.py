"""Conversations in ShareGPT's form: a list of `{"from": ..., "value": ...}`."""

import json
from collections.abc import Mapping
from typing import Any

from twinkle.errors import DataError
from twinkle.preprocessor import Preprocessor
from twinkle_data.rows import Columns, key_text, optional_text, rows_with, shown, system_text

_OWNER = "ShareGPTProcessor"
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "function_call",
    "tool_call": "function_call",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_KEPT = ("weight", "loss", "tool_calls", "tool_call_id", "reasoning_content")


class ShareGPTProcessor(Preprocessor):
    """Turns ShareGPT's conversations into messages.

    A turn says who speaks in `from` (human, gpt, system, function_call, observation, ...) and what in `value`; `role`
    and `content` are read likewise. What `function_call` says, JSON of one call or a list of them, becomes
    `tool_calls`. A column `system` is the system message of its row, and a column `tools`, JSON or a list, its tools.

    Args:
        conversations_key: the column of the conversations; by default `conversations`, `conversation` or `messages`,
            whichever there is.
        system: a system message for conversations that have none.

    Returned columns: `messages`, and `tools` where that column is there.
    """

    def __init__(self, conversations_key: str | None = None, system: str | None = None) -> None:
        self.conversations_key = (
            None if conversations_key is None else key_text(conversations_key, "conversations_key", _OWNER)
        )
        self.system = system_text(system, _OWNER)

    def __call__(self, rows: Columns) -> dict[str, list[Any]]:
        """Return the conversations.

        Raises:
            DataError: there is no column of conversations, or a turn has another form; names row and turn.
        """
        key = self.conversations_key or next(
            (name for name in ("conversations", "conversation", "messages") if name in rows), None
        )
        complete = rows_with(rows, (key or "conversations",), _OWNER)
        columns = {"messages": [self._messages(row, key or "", number) for number, row in enumerate(complete)]}
        if "tools" in rows:
            columns["tools"] = [_tools(row["tools"], number) for number, row in enumerate(complete)]
        return columns

    def _messages(self, row: Mapping[str, Any], key: str, number: int) -> list[dict[str, Any]]:
        turns = row[key]
        if isinstance(turns, str | Mapping) or not isinstance(turns, list | tuple) or not turns:
            raise DataError(
                f"{_OWNER}, row {number} of the batch: column {key!r} is {shown(turns)}; it is a list of turns "
                "{'from': ..., 'value': ...}"
            )
        messages = [
            _message(turn, f"{_OWNER}, row {number} of the batch, turn {place}") for place, turn in enumerate(turns)
        ]
        system = optional_text(row, "system", number, _OWNER) or self.system
        if system and messages[0]["role"] != "system":
            return [{"role": "system", "content": system}, *messages]
        return messages


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise DataError(f"{where} is {shown(turn)}; it is {{'from': ..., 'value': ...}}")
    speaker, text = _either(turn, "from", "role"), _either(turn, "value", "content")
    role = _SPEAKERS.get(speaker.strip().lower()) if isinstance(speaker, str) else None
    if role is None:
        raise DataError(f"{where} {_unknown(speaker, turn)}")
    if text is None and not turn.get("tool_calls"):
        raise DataError(f"{where} has no value; its keys are {', '.join(map(str, turn))}")
    other_keys = {key: turn[key] for key in _KEPT if turn.get(key) is not None}
    if role == "function_call":
        calls = other_keys.get("tool_calls") or _calls(text, where)
        return {**other_keys, "role": "assistant", "content": "", "tool_calls": calls}
    return {"role": role, "content": "" if text is None else text, **other_keys}


def _either(turn: Mapping[str, Any], first: str, second: str) -> Any:
    return turn.get(second) if turn.get(first) is None else turn[first]


def _unknown(speaker: Any, turn: Mapping[str, Any]) -> str:
    from twinkle_registry import nearest

    if speaker is None:
        return f"does not say who speaks; its keys are {', '.join(map(str, turn)) or 'none'}, and 'from' is needed"
    close = nearest(speaker, _SPEAKERS, 1) if isinstance(speaker, str) else []
    hint = f" (nearest: {close[0]!r})" if close else ""
    return f"is from {speaker!r}{hint}; known are {', '.join(_SPEAKERS)}"


def _calls(text: Any, where: str) -> list[dict[str, Any]]:
    calls = _json(text, where)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(
            f"{where} calls {shown(text)}; it is JSON {{'name': ..., 'arguments': {{...}}}}, or a list of it"
        )
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]


def _tools(value: Any, number: int) -> Any:
    """Return tools in OpenAI's form: each function under `function`, as templates expect it."""
    where = f"{_OWNER}, row {number} of the batch, column 'tools'"
    tools = _json(value, where) if isinstance(value, str) and value.strip() else value
    if not tools:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{where} is {shown(value)}; it is a list of tools, or JSON of one")
    return [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools]


def _json(text: Any, where: str) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} holds no JSON ({error}): {shown(text)}") from error
