"""OpenAI's API: models, chat completions and completions."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Request, Response

from twinkle_server.app_state import AppState, app_state_of, caller_of
from twinkle_server.chat.bodies import (
    AllowedTools,
    ChatBody,
    ChatMessage,
    CompletionBody,
    ResponseFormat,
    Sampled,
    Tool,
)
from twinkle_server.chat.decoding import TextDecoder, TokenTexts
from twinkle_server.chat.errors import InvalidParameter
from twinkle_server.chat.exchange import (
    Delta,
    Disconnected,
    EventStream,
    Exchange,
    Frames,
    Score,
    Usage,
    while_connected,
)
from twinkle_server.chat.models import anthropic_form, anthropic_page, describe, list_models, resolve
from twinkle_server.chat.preparing import (
    Conversation,
    Prompt,
    check_length,
    check_structure,
    filters,
    render,
    renderer_of,
    start,
)
from twinkle_server.chat.tools import Call
from twinkle_server.error_forms import PREFIX, form, is_anthropic, status_of
from twinkle_server.errors import ServiceError
from twinkle_server.openapi import EVENTS, returns
from twinkle_server.requests import body_schema, json_response, read

router = APIRouter()
GONE = 499
"""Status of a response that nobody reads, because the client has disconnected."""
_MOST_LISTED = 1000
_PAGE: Any = {
    "parameters": [
        {"name": "anthropic-version", "in": "header", "schema": {"type": "string"},
         "description": "answer in Anthropic's form; the other parameters have no effect without it"},
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": _MOST_LISTED}},
        {"name": "after_id", "in": "query", "schema": {"type": "string"}},
        {"name": "before_id", "in": "query", "schema": {"type": "string"}},
    ]
}  # fmt: skip


@router.get("/models", openapi_extra=_PAGE)
async def models(request: Request) -> Response:
    """List the base model, and the caller's models and checkpoints; in Anthropic's form for clients of its API."""
    caller, state = caller_of(request), app_state_of(request)
    entries = await list_models(state, caller)
    if not is_anthropic(request.scope):
        return json_response({"object": "list", "data": entries})
    given = request.query_params
    limit = given.get("limit", "20")
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MOST_LISTED:
        raise InvalidParameter("limit", f"limit must be a number from 1 to {_MOST_LISTED}, got {limit[:80]!r}")
    own = [anthropic_form(entry, state.service.info.context) for entry in entries]
    return json_response(anthropic_page(own, int(limit), given.get("after_id"), given.get("before_id")))


@router.get("/models/{model:path}")
async def model(request: Request, model: str) -> Response:
    """Describe a model; in Anthropic's form for clients of its API."""
    state = app_state_of(request)
    entry = await describe(state, caller_of(request), model)
    own = is_anthropic(request.scope)
    return json_response(anthropic_form(entry, state.service.info.context) if own else entry)


@router.post("/chat/completions", openapi_extra=body_schema(ChatBody) | returns(EVENTS))
async def chat_completions(request: Request) -> Any:
    """Continue a conversation."""
    state = app_state_of(request)
    body = await read(request, ChatBody)
    target = await resolve(state, caller_of(request), body.model)
    prompt = await render(state, _conversation(body))
    params = _params(state, body, _most_tokens(body))
    if body.logprobs:
        params |= {"logprobs": 1, "topk_logprobs": body.top_logprobs or 0}
    elif body.top_logprobs:
        raise InvalidParameter("top_logprobs", "top_logprobs requires logprobs=true")
    exchange = await start(state, caller_of(request), target, [prompt], params, _stops(body))
    texts = TokenTexts((await renderer_of(state).text()).tokenizer)
    writer = ChatWriter(body.model, texts, params["num_samples"], bool(body.logprobs), _with_usage(body))
    return await respond(request, exchange, writer, bool(body.stream))


@router.post("/completions", openapi_extra=body_schema(CompletionBody) | returns(EVENTS))
async def completions(request: Request) -> Any:
    """Continue texts, or token ids."""
    state = app_state_of(request)
    body = await read(request, CompletionBody)
    target = await resolve(state, caller_of(request), body.model)
    if body.best_of not in (None, body.n or 1):
        raise InvalidParameter("best_of", f"best_of must equal n ({body.n or 1}), got {body.best_of}; leave it out")
    if body.echo and body.stream:
        raise InvalidParameter("echo", "echo cannot be combined with stream; add the prompt in the client")
    most = 16 if body.max_tokens is None else body.max_tokens
    if most == 0 and not body.echo:
        raise InvalidParameter("max_tokens", "max_tokens must be at least 1, or 0 together with echo")
    params = _params(state, body, most)
    if body.logprobs is not None:
        params |= {"logprobs": 1, "topk_logprobs": body.logprobs}
        if body.echo:
            params |= {"prompt_logprobs": max(1, body.logprobs)}
    prompts = await _prompts(state, body)
    if len(prompts) * params["num_samples"] > state.settings.limits.samples:
        raise InvalidParameter("prompt", f"prompts times n must be at most {state.settings.limits.samples}")
    exchange = await start(state, caller_of(request), target, prompts, params, _stops(body))
    writer = CompletionWriter(body, TokenTexts((await renderer_of(state).text()).tokenizer), prompts, _with_usage(body))
    return await respond(request, exchange, writer, bool(body.stream))


def _conversation(body: ChatBody) -> Conversation:
    choice, given = body.tool_choice, body.tools or []
    if choice is None:
        choice = "auto"
    elif not given and choice != "none":
        raise InvalidParameter("tool_choice", "tool_choice requires tools")
    if isinstance(choice, AllowedTools):
        given = _allowed(choice, given)
        choice = choice.allowed_tools.mode
    structure = _structure(body.response_format)
    if body.structured_outputs is not None:
        if structure is not None:
            raise InvalidParameter("structured_outputs", "give one of response_format and structured_outputs")
        structure = body.structured_outputs
    thinking = body.chat_template_kwargs is None or body.chat_template_kwargs.enable_thinking
    name = choice if isinstance(choice, str) else choice.function.name
    if not isinstance(choice, str) and name in ("auto", "none", "required"):
        raise InvalidParameter("tool_choice", f"a tool that must be called cannot have the name {name!r}")
    return Conversation(
        [plain_message(each) for each in body.messages], [_plain_tool(tool) for tool in given], name,
        body.parallel_tool_calls is not False, structure, thinking, any(tool.function.strict for tool in given),
        param="response_format" if body.structured_outputs is None else "structured_outputs",
        continued=_continued(body),
    )  # fmt: skip


def _allowed(choice: AllowedTools, tools: Sequence[Tool]) -> list[Tool]:
    names = {tool.function.name for tool in tools}
    allowed = {tool.function.name for tool in choice.allowed_tools.tools}
    if unknown := sorted(allowed - names):
        raise InvalidParameter("tool_choice", f"no tool has the name {unknown[0]!r}")
    return [tool for tool in tools if tool.function.name in allowed]


def _continued(body: ChatBody) -> bool:
    """Return whether the answer continues the last message.

    Raises:
        InvalidParameter: it should, but is not of the assistant; or the other way around.
    """
    continued, role = bool(body.continue_final_message), body.messages[-1].role
    if body.add_generation_prompt not in (None, not continued):
        raise InvalidParameter(
            "add_generation_prompt",
            "add_generation_prompt must be the opposite of continue_final_message; leave it out",
        )
    if continued and role != "assistant":
        raise InvalidParameter(
            "continue_final_message", f"continue_final_message requires a last message of the assistant, got {role!r}"
        )
    if role == "assistant" and not continued:
        raise InvalidParameter(
            "messages", "the last message is of the assistant; add a message of the user, or set "
            "continue_final_message=true to continue it"
        )  # fmt: skip
    return continued


def _structure(wanted: ResponseFormat | None) -> Mapping[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None:
        raise InvalidParameter("response_format", "response_format of type json_schema requires json_schema")
    return {"json": wanted.json_schema.schema_}


def plain_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message in the form that templates read.

    Raises:
        InvalidParameter: it has content other than text.
    """
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message)}
    if message.tool_calls:
        plain["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def _content(message: ChatMessage) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise InvalidParameter("messages", f"a message of the role {message.role!r} requires content")
    if other := [part.type for part in content if part.type != "text" or part.text is None]:
        raise InvalidParameter("messages", f"content parts must be of type 'text', got {other[0][:80]!r}")
    return "".join(part.text or "" for part in content)


def _plain_tool(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}


def _params(state: AppState, body: Sampled, max_tokens: int | None) -> dict[str, Any]:
    count, most = body.n or 1, state.settings.limits.samples
    if count > most:
        raise InvalidParameter("n", f"n must be at most {most}, got {count}")
    if body.stream_options is not None and not body.stream:
        raise InvalidParameter("stream_options", "stream_options requires stream=true")
    given = {
        **filters(body.temperature, body.top_p, body.top_k), "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty, "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty, "logit_bias": body.logit_bias or None, "seed": body.seed,
    }  # fmt: skip
    for token in body.logit_bias or ():
        if int(token) >= state.service.info.vocabulary:
            raise InvalidParameter(
                "logit_bias", f"token ids of logit_bias must be below {state.service.info.vocabulary}, got {token}"
            )
    params = {name: value for name, value in given.items() if value is not None}
    return {**params, "num_samples": count, "max_tokens": max_tokens}


def _most_tokens(body: ChatBody) -> int | None:
    if body.max_tokens == 0:
        raise InvalidParameter("max_tokens", "max_tokens must be at least 1")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidParameter("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
    return body.max_completion_tokens or body.max_tokens


def _stops(body: Sampled) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else list(body.stop or ())


def _with_usage(body: Sampled) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


async def _prompts(state: AppState, body: CompletionBody) -> list[Prompt]:
    given: Any = body.prompt
    rows = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    renderer, structure = renderer_of(state), body.structured_outputs
    if structure is not None:
        await check_structure(renderer, structure, "structured_outputs")
    if isinstance(rows[0], str):
        check_length(state, sum(map(len, rows)), "prompt")
        rows = await renderer.texts(rows)
        if not all(rows):
            raise InvalidParameter("prompt", "prompt has no tokens; give at least one")
    vocabulary = state.service.info.vocabulary
    if wrong := [token for row in rows for token in row if token >= vocabulary]:
        raise InvalidParameter("prompt", f"token ids must be below {vocabulary}, got {wrong[0]}")
    return [Prompt(row, structure=structure, param="prompt") for row in rows]


async def respond(request: Request, exchange: Exchange, writer: Any, stream: bool) -> Any:
    """Return the response to a request that was sent to the engine.

    Args:
        request: of the client; the response starts when the engine has answered.
        exchange: the request to the engine.
        writer: of the response: `Frames`, and `whole(deltas, exchange)` for a response that is not a stream.
        stream: whether to stream.
    """
    deltas = exchange.deltas()
    try:
        if stream:
            first = await while_connected(request, anext(deltas, []))
            return EventStream(exchange, deltas, first, writer)
        found = await while_connected(request, _all(deltas))
        return json_response(writer.whole(found, exchange))
    except Disconnected:
        exchange.cancel()
        return Response(status_code=GONE)
    except BaseException:
        exchange.cancel()
        raise


async def _all(deltas: Any) -> list[Delta]:
    return [delta async for found in deltas for delta in found]


def error_event(error: ServiceError, path: str) -> bytes:
    """Return an error in the form of a path, as JSON."""
    return orjson.dumps(form(path, status_of(path, error.status), error.message, error))


def _data(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return the usage in OpenAI's form."""
    return {
        "prompt_tokens": usage.prompt, "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion, "prompt_tokens_details": {"cached_tokens": usage.cached},
    }  # fmt: skip


class _Writer(Frames):
    """What the responses of chat and completions have in common."""

    kind: Literal["chat.completion.chunk", "text_completion"]

    def __init__(self, prefix: str, model: str, with_usage: bool) -> None:
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._with_usage = with_usage

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        more = {"usage": usage} if self._with_usage else {}
        return _data({**self._head, "object": self.kind, "choices": choices, **more})

    def end(self, usage: Usage) -> bytes:
        """Return the usage if requested, and the end mark."""
        last = self._chunk([], usage_json(usage)) if self._with_usage else b""
        return last + b"data: [DONE]\n\n"

    def error(self, error: ServiceError) -> bytes:
        """Return the event of an error."""
        return b"data: " + error_event(error, PREFIX) + b"\n\n"


class ChatWriter(_Writer):
    """Writes `chat.completion` objects.

    Args:
        model: as named by the client.
        texts: of tokens.
        count: number of choices.
        scored: whether log-probabilities were requested.
        with_usage: whether a stream ends with the usage.
    """

    kind = "chat.completion.chunk"

    def __init__(self, model: str, texts: TokenTexts, count: int, scored: bool, with_usage: bool) -> None:
        super().__init__("chatcmpl", model, with_usage)
        self._texts, self._count, self._scored = texts, count, scored
        self._calls = [0] * count

    def start(self) -> bytes:
        """Return the role of each choice."""
        opening = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk([{"index": index, "delta": opening, "logprobs": None, "finish_reason": None}])
            for index in range(self._count)
        )

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Return a chunk for each choice that has gained something."""
        return b"".join(map(self._delta, deltas))

    def _delta(self, delta: Delta) -> bytes:
        fields: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.calls:
            fields["tool_calls"] = [self._call(delta.index, call) for call in delta.calls]
        scores = self._scores(delta.scores) if self._scored else None
        choice = {"index": delta.index, "delta": fields, "logprobs": scores, "finish_reason": None}
        if delta.finish is None:
            return self._chunk([choice])
        last = {"index": delta.index, "delta": {}, "logprobs": None, "finish_reason": delta.finish}
        return (self._chunk([choice]) if fields or delta.scores else b"") + self._chunk([last])

    def _call(self, index: int, call: Call) -> dict[str, Any]:
        number = self._calls[index]
        self._calls[index] += 1
        return {"index": number, **_call_json(call)}

    def _scores(self, scores: Sequence[Score]) -> dict[str, Any]:
        content = [
            {**self._token(score.token, score.logprob), "top_logprobs": [self._token(*other) for other in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._texts[token]
        return {"token": text.text, "logprob": logprob, "bytes": text.data}

    def whole(self, deltas: Sequence[Delta], exchange: Exchange) -> dict[str, Any]:
        """Return the response as one object."""
        choices = []
        for index in range(self._count):
            own = [delta for delta in deltas if delta.index == index]
            text, calls = "".join(delta.text for delta in own), [call for delta in own for call in delta.calls]
            message: dict[str, Any] = {"role": "assistant", "content": text or None, "refusal": None}
            if calls:
                message |= {"content": text.strip() or None, "tool_calls": [_call_json(call) for call in calls]}
            elif not text:
                message["content"] = ""
            scores = [score for delta in own for score in delta.scores]
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._scores(scores) if self._scored else None,
                    "finish_reason": next(delta.finish for delta in own if delta.finish),
                }
            )
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage_json(exchange.usage)}


def _call_json(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class Offsets:
    """Where each token of a sequence begins in its text.

    Args:
        decoder: of the sequence.
    """

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder, self._place = decoder, 0

    def add(self, token: int) -> int:
        """Add a token; return the number of whole characters before it."""
        place = self._place
        self._place += len(self._decoder.add([token]))
        return place


class CompletionWriter(_Writer):
    """Writes `text_completion` objects.

    Args:
        body: of the request.
        texts: of tokens.
        prompts: of the request.
        with_usage: whether a stream ends with the usage.
    """

    kind = "text_completion"

    def __init__(self, body: CompletionBody, texts: TokenTexts, prompts: Sequence[Prompt], with_usage: bool) -> None:
        super().__init__("cmpl", body.model, with_usage)
        self._texts, self._prompts, self._count = texts, prompts, body.n or 1
        self._scored, self._most, self._echo = body.logprobs is not None, body.logprobs or 0, bool(body.echo)
        self._offsets = [Offsets(texts.decoder()) for _ in range(len(prompts) * self._count)]

    def start(self) -> bytes:
        """Return nothing: completions have no role."""
        return b""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Return a chunk for each choice that has gained something."""
        return b"".join(
            self._chunk([self._choice(delta.index, delta.text, delta.scores, delta.finish)]) for delta in deltas
        )

    def _choice(self, index: int, text: str, scores: Sequence[Score], finish: str | None) -> dict[str, Any]:
        logprobs = self._scores(index, scores) if self._scored else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _scores(self, index: int, scores: Sequence[Score | int]) -> dict[str, Any]:
        """Return log-probabilities in the older form; a token id stands for a token without one."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for score in scores:
            token = score if isinstance(score, int) else score.token
            text = self._texts[token]
            lists["tokens"].append(text.name)
            lists["token_logprobs"].append(None if isinstance(score, int) else score.logprob)
            lists["top_logprobs"].append(None if isinstance(score, int) else self._top(score))
            lists["text_offset"].append(self._offsets[index].add(token))
        return lists

    def _top(self, score: Score) -> dict[str, float]:
        """Return the most probable tokens, and the sampled one, which may be none of them."""
        top = {self._texts[other].name: value for other, value in score.top}
        return top | {self._texts[score.token].name: score.logprob}

    def whole(self, deltas: Sequence[Delta], exchange: Exchange) -> dict[str, Any]:
        """Return the response as one object."""
        choices = []
        for index in range(len(self._offsets)):
            own = [delta for delta in deltas if delta.index == index]
            scores: list[Any] = [score for delta in own for score in delta.scores]
            text = "".join(delta.text for delta in own)
            if self._echo:
                number = index // self._count
                text = self._texts.whole(self._prompts[number].tokens) + text
                scores = self._prompt_scores(number, exchange) + scores
            finish = next((delta.finish for delta in own if delta.finish), "length")
            choices.append(self._choice(index, text, scores, finish))
        return {**self._head, "object": "text_completion", "choices": choices, "usage": usage_json(exchange.usage)}

    def _prompt_scores(self, number: int, exchange: Exchange) -> list[Score | int]:
        tokens, end = self._prompts[number].tokens, exchange.generations[number].end or {}
        logprobs, top = end.get("prompt_logprobs"), end.get("topk_prompt_logprobs")
        if logprobs is None:
            return []
        scores: list[Score | int] = []
        for place, token in enumerate(tokens):
            best = ((top[place] if top else None) or [])[: self._most]
            value = logprobs[place]
            scores.append(token if value is None else Score(token, value, [(int(a), float(b)) for a, b in best]))
        return scores
