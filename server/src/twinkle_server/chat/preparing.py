"""From the request of a client to requests for the engine: the same for OpenAI's and Anthropic's API."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle.data_format import SamplingParams
from twinkle_server.app_state import AppState, Caller
from twinkle_server.chat.decoding import TextDecoder
from twinkle_server.chat.errors import InvalidParameter
from twinkle_server.chat.exchange import Choice, Exchange
from twinkle_server.chat.models import Target
from twinkle_server.chat.render import Renderer, Text, ToolFormat
from twinkle_server.chat.tools import (
    ToolReader,
    build_parser,
    check_parameters,
    forced_grammar,
    schema_of,
    strict_grammar,
)
from twinkle_server.errors import BadRequest, ServiceError, Unavailable
from twinkle_server.operations import Generate

_SEEDS = 2**63
_CHARACTERS = 64
"""Most characters of text for each token of the context; longer text cannot fit, and is not tokenized."""
TEXT = "text"


@dataclass(slots=True)
class Conversation:
    """A conversation to continue.

    Attributes:
        messages: in OpenAI's form, with content as text.
        tools: in OpenAI's form.
        choice: "auto", "none", "required", or the name of a tool.
        several: whether more than one call may be forced.
        structure: `SamplingParams.structured_outputs` of the answer.
        thinking: option of the chat template.
        strict: whether the arguments of calls must match their schemas; they always do if `choice` forces calls.
        param: name of the parameter that `structure` came from, for errors.
        continued: whether the answer continues the text of the last message, which is the assistant's.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    choice: str = "auto"
    several: bool = True
    structure: Mapping[str, Any] | None = None
    thinking: bool = True
    strict: bool = False
    param: str = "response_format"
    continued: bool = False


@dataclass(slots=True)
class Prompt:
    """A prompt, and how its continuation is read.

    Attributes:
        tokens: of the prompt.
        tools: whether tool calls are read from the text.
        forced: whether the text is nothing but calls.
        structure: `SamplingParams.structured_outputs` of the text.
        param: name of the parameter that it came from, for errors.
        continued: whether the text continues that of the prompt's last tokens.
    """

    tokens: list[int]
    tools: bool = False
    forced: bool = False
    structure: Mapping[str, Any] | None = None
    param: str = "messages"
    continued: bool = False


def renderer_of(state: AppState) -> Renderer:
    """Return the renderer of the application.

    Raises:
        Unavailable: the engine is not ready.
        BadRequest: the model has no tokenizer.
    """
    if not state.service.info.context:
        raise Unavailable("the engine is starting; retry in a few seconds", retry_after=2.0)
    if state.renderer is None or not state.service.info.tokenizer:
        raise BadRequest("the folder of the served model has no tokenizer, so it cannot be used with text")
    return state.renderer


async def render(state: AppState, conversation: Conversation) -> Prompt:
    """Return the prompt of a conversation.

    Raises:
        BadRequest: the conversation, its tools or the schema cannot be used.
    """
    renderer = renderer_of(state)
    check_length(state, sum(map(_size, conversation.messages)))
    tools = conversation.tools if conversation.choice != "none" else []
    prompt = Prompt([], bool(tools), structure=conversation.structure, continued=conversation.continued)
    if prompt.continued:
        _check_continued(conversation)
    if tools:
        prompt.forced, prompt.structure = await _tool_grammar(renderer, conversation)
    elif prompt.structure is not None:
        await check_structure(renderer, prompt.structure, conversation.param)
    prompt.tokens = await renderer.chat(
        conversation.messages, tools or None, conversation.thinking, conversation.continued
    )
    return prompt


def _check_continued(conversation: Conversation) -> None:
    if conversation.messages[-1].get("tool_calls"):
        raise InvalidParameter("messages", "the last message calls tools; add a result of each call after it")
    if conversation.structure is not None:
        raise InvalidParameter(
            conversation.param,
            f"{conversation.param} restricts the whole answer, so it cannot be combined with a last message of the "
            "assistant; remove that message",
        )


def _size(message: Mapping[str, Any]) -> int:
    calls = message.get("tool_calls") or ()
    return len(message.get("content") or "") + sum(len(call["function"]["arguments"]) for call in calls)


async def _tool_grammar(renderer: Renderer, conversation: Conversation) -> tuple[bool, Mapping[str, Any] | None]:
    form = (await renderer.text()).tools
    if form is None:
        raise InvalidParameter("tools", "the chat template of this model has no tool calls; leave out tools")
    if conversation.structure is not None:
        raise InvalidParameter(
            conversation.param, f"{conversation.param} cannot be combined with tools; use tool_choice 'none'"
        )
    for tool in conversation.tools:
        check_parameters(tool)
    if conversation.choice == "auto" and not conversation.strict:
        return False, None
    forced, grammar, tools = _call_grammar(form, conversation)
    await _check_tools(renderer, grammar, tools)
    return forced, {"grammar": grammar}


def _call_grammar(form: ToolFormat, conversation: Conversation) -> tuple[bool, str, list[dict[str, Any]]]:
    """Return whether the answer is nothing but calls, the grammar of the answer, and the tools in the grammar."""
    if conversation.choice == "auto":
        return False, strict_grammar(form, build_parser(form), conversation.tools), conversation.tools
    chosen = [tool for tool in conversation.tools if conversation.choice in ("required", tool["function"]["name"])]
    if not chosen:
        raise InvalidParameter("tool_choice", f"no tool has the name {conversation.choice!r}")
    several = conversation.several and conversation.choice == "required"
    return True, forced_grammar(form, build_parser(form), chosen, several), chosen


async def _check_tools(renderer: Renderer, grammar: str, tools: Sequence[dict[str, Any]]) -> None:
    """Check the grammar of calls before the engine compiles it; an error names the tool, not the grammar."""
    try:
        await renderer.check_grammar({"grammar": grammar})
    except BadRequest as error:
        for tool in tools:
            await _check_tool(renderer, tool["function"])
        raise InvalidParameter("tools", f"the schemas of the tools cannot be used together: {error}") from error


async def _check_tool(renderer: Renderer, function: Mapping[str, Any]) -> None:
    try:
        await renderer.check_grammar({"json": schema_of(function)})
    except BadRequest as error:
        name, reason = function["name"], str(error).removeprefix("the schema cannot be used: ")
        raise InvalidParameter("tools", f"the parameters of the tool {name!r} cannot be used: {reason}") from error


async def check_structure(renderer: Renderer, structure: Mapping[str, Any], param: str = "response_format") -> None:
    """Check a schema or grammar before the engine compiles it.

    Args:
        renderer: checks it.
        structure: `SamplingParams.structured_outputs`.
        param: name of the parameter that it came from.

    Raises:
        BadRequest: it is invalid or too complex.
    """
    try:
        SamplingParams(structured_outputs=structure)
        await renderer.check_grammar(structure)
    except (ValueError, BadRequest) as error:
        raise InvalidParameter(param, str(error).replace("SamplingParams.structured_outputs", param)) from error


def check_length(state: AppState, characters: int, param: str = "messages") -> None:
    """Refuse text that cannot fit into the context.

    Raises:
        BadRequest: it is too long.
    """
    most = state.service.info.context * _CHARACTERS
    if characters > most:
        raise InvalidParameter(
            param, f"the text has {characters} characters; the model's context of {state.service.info.context} "
            f"tokens cannot have more than {most}", "context_length_exceeded",
        )  # fmt: skip


def filters(temperature: float | None, top_p: float | None, top_k: int | None) -> dict[str, Any]:
    """Return fields of `SamplingParams`; `top_p=0` is the most probable token, and `top_k=0` is no limit."""
    if top_p == 0:
        top_p, top_k = None, 1
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k or None}
    return {name: value for name, value in given.items() if value is not None}


def seeds(seed: int | None, count: int) -> list[int]:
    """Return the seeds of the sequences of a request."""
    first = secrets.randbits(48) if seed is None else seed
    return [(first + number) % _SEEDS for number in range(count)]


async def start(
    state: AppState,
    caller: Caller,
    target: Target,
    prompts: Sequence[Prompt],
    params: Mapping[str, Any],
    stops: Sequence[str],
) -> Exchange:
    """Send prompts to the engine.

    Args:
        state: of the application.
        caller: the caller.
        target: the weights.
        prompts: the prompts.
        params: fields of `SamplingParams`; `max_tokens` is limited by the context, and `seed` has the first one.
        stops: strings that end the text.

    Raises:
        BadRequest: a prompt or a parameter is invalid.
        ServiceError: the service cannot take the requests at the moment.
    """
    text = await renderer_of(state).text()
    count = params.get("num_samples", 1)
    generations: list[Any] = []
    choices = []
    try:
        for number, prompt in enumerate(prompts):
            ends = () if prompt.forced else stops  # stop strings end text, and here is none
            fields = {
                **params, "stop": list(ends) or None, "max_tokens": _room(state, prompt, params.get("max_tokens")),
                "seed": seeds(params.get("seed"), count), "structured_outputs": prompt.structure,
            }  # fmt: skip
            _check(fields)
            generate = Generate(prompt.tokens, fields, target.source, target.model)
            generations.append(await state.service.generate(caller.tenant, generate))
            choices.append([_choice(text, prompt, ends, number * count + sample) for sample in range(count)])
    except ServiceError:
        for generation in generations:
            generation.cancel()
        raise
    return Exchange(generations, choices)


def _check(fields: Mapping[str, Any]) -> None:
    try:
        SamplingParams.from_dict(fields)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def _room(state: AppState, prompt: Prompt, most: int | None) -> int | None:
    context, length = state.service.info.context, len(prompt.tokens)
    if length >= context:
        raise InvalidParameter(
            prompt.param, f"the prompt has {length} tokens; the model's context is {context}", "context_length_exceeded"
        )
    return most if most is None else min(most, context - length)


def _choice(text: Text, prompt: Prompt, stops: Sequence[str], index: int) -> Choice:
    reader = ToolReader(build_parser(text.tools)) if prompt.tools and text.tools is not None else None
    before = prompt.tokens if prompt.continued else ()
    return Choice(index, TextDecoder(text.tokenizer, stops, before), reader, prompt.forced)
