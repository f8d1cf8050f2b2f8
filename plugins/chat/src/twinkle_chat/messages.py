"""Validates a conversation and normalizes its messages to the form that chat templates expect."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle.data_format import ROLES
from twinkle.errors import EncodeError

_MEDIA = ("images", "videos", "audios")


def plain_messages(trajectory: Mapping[str, Any], any_weight: bool = False) -> list[dict[str, Any]]:
    """Return the messages of a trajectory, checked: no None-valued keys, and `content` always text.

    Args:
        trajectory: the row.
        any_weight: accept any `weight` >= 0, for use with a loss scale, which multiplies by it.

    Raises:
        EncodeError: there is no usable conversation; the text names the invalid message and the remedy.
    """
    messages = trajectory.get("messages")
    if messages is None:
        # Rows of a table have all columns; columns that only other rows use are None.
        filled = ", ".join(str(key) for key, value in trajectory.items() if value is not None)
        raise EncodeError(
            f"the row has no 'messages' (its keys: {filled or 'none'}); convert other columns with a preprocessor, "
            "such as QuestionProcessor (question_key=, answer_key=; add_assistant=True trains the "
            "answer). In a script: dataset.map('QuestionProcessor', ...); in a recipe: data.preprocessor and "
            "data.preprocessor_args. To list them: twinkle plugins list preprocessor"
        )
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise EncodeError(
            f"'messages' must be a list of {{'role': ..., 'content': ...}}, got {type(messages).__name__}"
        )
    if not messages:
        raise EncodeError("'messages' is empty; drop the row, or give it at least one message")
    for key in _MEDIA:
        if any(item is not None for item in trajectory.get(key) or ()):
            raise EncodeError(f"the row has {key}, but this template reads text only; use a multimodal template")
    return [_plain_message(message, f"message {index}", any_weight) for index, message in enumerate(messages)]


def _plain_message(message: Any, where: str, any_weight: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise EncodeError(f"{where} must be {{'role': ..., 'content': ...}}, got {type(message).__name__}")
    plain = {key: without_none(value) for key, value in message.items() if value is not None}
    role = plain.get("role")
    if role not in ROLES:
        raise EncodeError(f"{where} {_role_problem(role, plain)}; the role must be one of {', '.join(ROLES)}")
    plain["content"] = _text(plain, where)
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)
    elif not isinstance(plain["tool_calls"], list) or not all(_is_call(call) for call in plain["tool_calls"]):
        raise EncodeError(
            f"{where} ({role}): tool_calls is {plain['tool_calls']!r}; it must be a list of "
            "{'type': 'function', 'function': {'name': ..., 'arguments': ...}}"
        )
    is_trained(plain, f"{where} ({role})", any_weight)
    for key in ("content", "reasoning_content"):
        _require_text(plain.get(key, ""), f"{where} ({role}): {key}")
    return plain


def is_trained(message: Mapping[str, Any], where: str, any_weight: bool = False) -> bool | None:
    """Return whether a message is trained, by OpenAI's `weight` (0 or 1) or by `loss` (true or false).

    Returns:
        None if it has neither key.

    Raises:
        EncodeError: a value is invalid, or the two contradict each other.
    """
    weight, loss = message.get("weight"), message.get("loss")
    if weight is not None and any_weight and not _is_weight(weight):
        raise EncodeError(f"{where} has weight {weight!r}; with a loss scale it must be a finite number >= 0")
    if weight is not None and not any_weight and (isinstance(weight, bool) or weight not in (0, 1)):
        way_out = "; other weights need a loss scale: loss_scale='MessageWeightLossScale'" if _is_weight(weight) else ""
        raise EncodeError(f"{where} has weight {weight!r}; it must be 0 (not trained) or 1 (trained){way_out}")
    if loss is not None and not isinstance(loss, bool):
        raise EncodeError(f"{where} has loss {loss!r}; it must be true (trained) or false (not trained)")
    if None not in (weight, loss) and bool(weight) != loss:
        raise EncodeError(f"{where} has weight {weight!r} and loss {loss!r}, which contradict each other; drop one")
    return loss if weight is None else bool(weight)


def _is_weight(weight: Any) -> bool:
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    return number and weight >= 0 and math.isfinite(weight)


def plain_tools(trajectory: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools of a trajectory without None-valued keys; None if it has no tools.

    Raises:
        EncodeError: they are not a list of JSON schemas.
    """
    tools = trajectory.get("tools")
    if not tools:
        return None
    if isinstance(tools, str | Mapping) or not all(isinstance(tool, Mapping) for tool in tools):
        raise EncodeError(
            f"tools must be a list of {{'type': 'function', 'function': {{'name': ..., 'description': ..., "
            f"'parameters': ...}}}}, got {type(tools).__name__}"
        )
    return [without_none(tool) for tool in tools]


def _is_call(call: Any) -> bool:
    """Return whether this is a tool call, in OpenAI's form or flat."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _role_problem(role: Any, message: Mapping[str, Any]) -> str:
    if role is None:
        return f"has no role (its keys: {', '.join(map(str, message)) or 'none'})"
    from twinkle_registry import nearest

    near = nearest(role, ROLES) if isinstance(role, str) else []
    return f"has the role {role!r}" + (f", nearest: {near[0]!r}" if near else "")


def _text(message: Mapping[str, Any], where: str) -> Any:
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant" and message.get("tool_calls"):
            return ""
        raise EncodeError(
            f"{where} ({message['role']}) has no content; add text (only messages with tool_calls may omit it)"
        )
    if isinstance(content, list | tuple):
        return "".join(_part(part, where) for part in content)
    return content


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise EncodeError(f"{where} has a content part of type {kind!r}, but this template reads text only")
    text = part.get("text")
    _require_text(text, f"{where}: the text of a content part")
    return str(text)


def _require_text(text: Any, name: str) -> None:
    if not isinstance(text, str):
        raise EncodeError(f"{name} must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EncodeError(f"{name} is not valid Unicode: a lone surrogate at character {error.start}") from error


def without_none(value: Any) -> Any:
    """Return `value` without the None-valued keys of its mappings, at any depth: Arrow adds them to align rows."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_none(item) for item in value]
    return value


def inline_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Move `reasoning_content` into the content, for chat templates that would drop it."""
    if not message.get("reasoning_content"):
        return message
    inlined = f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content']}"
    return {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": inlined}


def function_of(call: Any) -> Mapping[str, Any]:
    """Return the function of a tool call, in OpenAI's form or flat."""
    function: Mapping[str, Any] = call.get("function", call)
    return function


def silent(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with content None in turns that only call tools."""
    return [
        {**message, "content": None} if message.get("tool_calls") and not message["content"] else message
        for message in messages
    ]


def parse_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Convert tool-call arguments from JSON text to dicts; other text is unchanged."""
    return _with_arguments(message, _parsed)


def dump_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Convert tool-call arguments from dicts to JSON text."""
    return _with_arguments(
        message, lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


def _with_arguments(message: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_call_arguments(call, convert) for call in message["tool_calls"]]}


def _with_call_arguments(call: Any, convert: Callable[[Any], Any]) -> Any:
    function = function_of(call)
    if "arguments" not in function:
        return call
    changed = {**function, "arguments": convert(function["arguments"])}
    return {**call, "function": changed} if "function" in call else changed


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except json.JSONDecodeError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
