"""Anthropic's API: messages, and their number of tokens."""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import Field

from twinkle_server.app_state import app_state_of, caller_of
from twinkle_server.chat.bodies import Form, Name, Off, Stop, Unsupported
from twinkle_server.chat.errors import InvalidParameter, ThreadsUnsupported
from twinkle_server.chat.exchange import Delta, Exchange, Usage
from twinkle_server.chat.models import resolve
from twinkle_server.chat.openai import error_event, respond
from twinkle_server.chat.preparing import Conversation, filters, render, start
from twinkle_server.error_forms import PREFIX
from twinkle_server.errors import ServiceError
from twinkle_server.openapi import EVENTS, returns
from twinkle_server.requests import Body, Text, body_schema, json_response, read

router = APIRouter()
_PATH = f"{PREFIX}/messages"
_APART = ("tool_result", "tool_use", "thinking", "redacted_thinking")
"""Types of blocks that are not part of a message's text."""
_FINISHES = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Block(Body):
    """A part of a message's content: `text`, `tool_use`, `tool_result`, `thinking` or `redacted_thinking`."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    thinking: str | None = None


class Message(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=4096)]


class Tool(Form):
    """A tool of the client; hints for caching and for streaming are ignored."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    defer_loading: Off = None
    input_examples: Unsupported = None


class ToolChoice(Form):
    """Which tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Form):
    """Whether the model thinks before it answers, where its chat template has this option."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class JsonFormat(Form):
    """The schema of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Form):
    """Options of the answer."""

    format: JsonFormat | None = None
    effort: Unsupported = None


class Counted(Form):
    """See `POST /v1/messages/count_tokens`."""

    model: Text
    messages: Annotated[list[Message], Field(min_length=1, max_length=65536)]
    system: str | Annotated[list[Block], Field(max_length=4096)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: Any = None
    mcp_servers: Unsupported = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    thread: Any = None


class MessagesBody(Counted):
    """See `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Unsupported = None
    context_management: Unsupported = None


@router.post("/messages", openapi_extra=body_schema(MessagesBody) | returns(EVENTS))
async def messages(request: Request) -> Any:
    """Continue a conversation."""
    state = app_state_of(request)
    body = await read(request, MessagesBody)
    target = await resolve(state, caller_of(request), body.model)
    prompt = await render(state, _conversation(body))
    params = filters(body.temperature, body.top_p, body.top_k)
    params |= {"num_samples": 1, "max_tokens": body.max_tokens}
    exchange = await start(state, caller_of(request), target, [prompt], params, body.stop_sequences or ())
    return await respond(request, exchange, MessageWriter(body.model, len(prompt.tokens)), bool(body.stream))


@router.post("/messages/count_tokens", openapi_extra=body_schema(Counted))
async def count_tokens(request: Request) -> Response:
    """Return the number of tokens of a conversation."""
    state = app_state_of(request)
    body = await read(request, Counted)
    await resolve(state, caller_of(request), body.model)
    prompt = await render(state, _conversation(body))
    return json_response({"input_tokens": len(prompt.tokens)})


def _conversation(body: Counted) -> Conversation:
    if body.thread is not None:
        raise ThreadsUnsupported
    plain: list[dict[str, Any]] = []
    if body.system:
        plain.append({"role": "system", "content": _text(body.system, "system")})
    for message in body.messages:
        plain += _plain(message)
    tools = [
        {"type": "function", "function": {"name": tool.name, "description": tool.description or "",
                                          "parameters": tool.input_schema}}
        for tool in body.tools or ()
    ]  # fmt: skip
    choice = body.tool_choice or ToolChoice(type="auto")
    if choice.type in ("any", "tool") and not tools:
        raise InvalidParameter("tool_choice", f"tool_choice of type {choice.type!r} requires tools")
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidParameter("tool_choice", "tool_choice has a name if and only if its type is 'tool'")
    if choice.name in ("auto", "none", "required"):
        raise InvalidParameter("tool_choice", f"a tool that must be called cannot have the name {choice.name!r}")
    name = choice.name or {"any": "required"}.get(choice.type, choice.type)
    thinking = body.thinking is None or body.thinking.type != "disabled"
    return Conversation(
        plain, tools, name, not choice.disable_parallel_tool_use, _structure(body), thinking,
        strict=any(tool.strict for tool in body.tools or ()), param="output_config", continued=_continue(plain),
    )  # fmt: skip


def _structure(body: Counted) -> Mapping[str, Any] | None:
    formats = [each for each in (body.output_format, body.output_config and body.output_config.format) if each]
    if len(formats) > 1:
        raise InvalidParameter("output_format", "output_format and output_config.format are the same; give one of them")
    return {"json": formats[0].schema_} if formats else None


def _continue(plain: list[dict[str, Any]]) -> bool:
    """Return whether the answer continues the last message; an empty one of the assistant is removed.

    Raises:
        InvalidParameter: the text of the last message ends with white space, or there is no other message than it.
    """
    last = plain[-1]
    if last["role"] != "assistant":
        return False
    if last["content"] or last.get("tool_calls") or last.get("reasoning_content"):
        if last["content"] != last["content"].rstrip():
            raise InvalidParameter("messages", "a last message of the assistant cannot end with white space")
        return True
    plain.pop()
    if not plain:
        raise InvalidParameter("messages", "messages must have at least one message of the user")
    return False


def _plain(message: Message) -> list[dict[str, Any]]:
    """Return a message in OpenAI's form; each tool result becomes a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "system":
        return [{"role": "system", "content": _text(message.content, "messages")}]
    results = [block for block in message.content if block.type == "tool_result"]
    uses = [block for block in message.content if block.type == "tool_use"]
    if results and message.role != "user":
        raise InvalidParameter("messages", "a tool_result belongs to a message of the user")
    if uses and message.role != "assistant":
        raise InvalidParameter("messages", "a tool_use belongs to a message of the assistant")
    plain = [
        {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": _text(block.content or "", "messages")}
        for block in results
    ]
    rest = [block for block in message.content if block.type not in _APART]
    text = _text(rest, "messages")
    if message.role == "assistant":
        own: dict[str, Any] = {"role": "assistant", "content": text}
        if uses:
            own["tool_calls"] = [_call(block) for block in uses]
        if thoughts := "".join(block.thinking or "" for block in message.content if block.type == "thinking"):
            own["reasoning_content"] = thoughts
        return [own]
    return [*plain, {"role": "user", "content": text}] if rest or not plain else plain


def _call(block: Block) -> dict[str, Any]:
    if not block.name:
        raise InvalidParameter("messages", "a tool_use requires a name")
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    return {"id": block.id or "", "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(param, f"content must be text or a list of blocks, got {type(content).__name__}")
    texts = []
    for block in content:
        kind, text = (block.get("type"), block.get("text")) if isinstance(block, dict) else _kind(block)
        if kind != "text" or not isinstance(text, str):
            raise InvalidParameter(param, f"blocks of the type {str(kind)[:80]!r} are not supported here; send text")
        texts.append(text)
    return "".join(texts)


def _kind(block: Any) -> tuple[Any, Any]:
    return getattr(block, "type", type(block).__name__), getattr(block, "text", None)


class MessageWriter:
    """Writes `message` objects and their events.

    Args:
        model: as named by the client.
        prompt: number of tokens of the prompt.
    """

    def __init__(self, model: str, prompt: int) -> None:
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}
        self._prompt = prompt
        self._block = -1
        self._open: str | None = None
        self._end: dict[str, Any] = {}

    def start(self) -> bytes:
        """Return the beginning of the message."""
        usage = _usage(Usage(self._prompt))
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event("message_start", message=message)

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Return the events of new text and calls."""
        return b"".join(map(self._delta, deltas))

    def _delta(self, delta: Delta) -> bytes:
        out = b""
        if delta.text:
            if self._open != "text":
                out += self._begin("text", text="")
            out += self._change(type="text_delta", text=delta.text)
        for call in delta.calls:
            out += self._begin("tool_use", id=_tool_id(call.id), name=call.name, input={})
            out += self._change(type="input_json_delta", partial_json=call.arguments)
        if delta.finish is not None:
            self._end = _ending(delta)
        return out

    def _begin(self, kind: str, **fields: Any) -> bytes:
        out = self._finish_block()
        self._block, self._open = self._block + 1, kind
        block = {"type": kind, **fields}
        return out + _event("content_block_start", index=self._block, content_block=block)

    def _change(self, **delta: Any) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)

    def _finish_block(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._block)

    def end(self, usage: Usage) -> bytes:
        """Return the end of the message."""
        last = _event("message_delta", delta=self._end, usage=_usage(usage))
        return self._finish_block() + last + _event("message_stop")

    def error(self, error: ServiceError) -> bytes:
        """Return the event of an error."""
        return b"event: error\ndata: " + error_event(error, _PATH) + b"\n\n"

    def whole(self, deltas: Sequence[Delta], exchange: Exchange) -> dict[str, Any]:
        """Return the message as one object."""
        content: list[dict[str, Any]] = []
        text = "".join(delta.text for delta in deltas)
        calls = [call for delta in deltas for call in delta.calls]
        if calls:
            text = text.strip()
        if text or not calls:
            content.append({"type": "text", "text": text})
        for call in calls:
            block = {"type": "tool_use", "id": _tool_id(call.id), "name": call.name}
            content.append({**block, "input": _arguments(call.arguments)})
        ending = next(_ending(delta) for delta in deltas if delta.finish)
        return {**self._head, "content": content, **ending, "usage": _usage(exchange.usage)}


def _tool_id(call: str) -> str:
    return "toolu_" + call.removeprefix("call_")


def _arguments(text: str) -> Any:
    try:
        value = orjson.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _ending(delta: Delta) -> dict[str, Any]:
    reason = "stop_sequence" if delta.stop is not None and delta.finish == "stop" else _FINISHES[delta.finish or "stop"]
    return {"stop_reason": reason, "stop_sequence": delta.stop if reason == "stop_sequence" else None}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt, "output_tokens": usage.completion,
        "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
    }  # fmt: skip


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **fields}) + b"\n\n"
