"""Conversations: messages, tools, trajectories and their `user_data`."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

ROLES = ("system", "user", "assistant", "tool")
"""The roles of a message."""
_THINKING = re.compile(r"\s*<think>(.*?)</think>\s*(.*)", re.DOTALL)


class Function(TypedDict, total=False):
    """The function of a tool call: its name and its arguments (JSON text or a dict)."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(TypedDict, total=False):
    """One call that an assistant turn makes, in OpenAI's form."""

    id: str
    type: Literal["function"]
    function: Function


class FunctionSchema(TypedDict, total=False):
    """A callable tool: its name, description and the JSON schema of its parameters."""

    name: str
    description: str
    parameters: dict[str, Any]


class Tool(TypedDict, total=False):
    """A tool that the model may call, in OpenAI's form."""

    type: Literal["function"]
    function: FunctionSchema


class Message(TypedDict, total=False):
    """One turn. `content` is text or a list of OpenAI content parts.

    An assistant turn with `weight` 0 or `loss` false is not trained; the defaults are 1 and true. With a loss scale,
    `weight` is any number >= 0 and multiplies the weights of the loss scale.
    """

    role: Literal["system", "user", "assistant", "tool"]
    type: str
    content: str | list[dict[str, Any]]
    tool_calls: list[ToolCall]
    tool_call_id: str
    reasoning_content: str
    weight: float
    loss: bool


class Trajectory(TypedDict, total=False):
    """A conversation with its tools and metadata.

    `user_data` is a list of (key, text) pairs, or of dicts; see `user_data_get`.
    """

    messages: list[Message]
    tools: list[Tool]
    user_data: Sequence[tuple[str, str] | Mapping[str, Any]]
    images: list[Any] | None
    videos: list[Any] | None
    audios: list[Any] | None
    prompt: str | None


def pack_value(value: Any) -> str:
    """Return `value` as JSON text, the form in which `user_data` carries values other than text."""
    return json.dumps(value, ensure_ascii=False)


def user_data_get(items: Sequence[Any] | Mapping[str, Any] | None, key: str, default: Any = None) -> Any:
    """Return the value of `key` in `user_data`, decoded.

    Args:
        items: a list of (key, value) pairs, a list of dicts, or a dict; None is empty.
        key: the name to look for; the first match wins.
        default: what to return when the key is absent.

    Values that are JSON text are decoded, so the text `42` is returned as a number; other text is returned as it is.
    """
    if not items:
        return default
    if isinstance(items, Mapping):
        return _decode(items[key]) if key in items else default
    for item in items:
        if isinstance(item, Mapping):
            if key in item:
                return _decode(item[key])
        elif item[0] == key:
            return _decode(item[1])
    return default


def _decode(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def split_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Move a `<think>...</think>` block that opens an assistant's content to `reasoning_content`."""
    if message["role"] != "assistant" or "reasoning_content" in message:
        return message
    match = _THINKING.fullmatch(message["content"])
    if match is None:
        return message
    return {**message, "reasoning_content": match[1].strip("\n"), "content": match[2]}
