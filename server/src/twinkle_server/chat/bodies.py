"""Bodies of OpenAI's requests. Fields that would change the meaning of a request and are not supported are refused."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StrictInt

from twinkle_server.requests import Body, Seed, Text

Token = Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Stop | Annotated[list[Stop], Field(max_length=16)]
Biases = dict[
    Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


def _unsupported(value: Any) -> Any:
    if value is not None:
        raise ValueError("this parameter is not supported; leave it out")
    return value


def _false(value: Any) -> Any:
    if value:
        raise ValueError("this parameter is not supported; leave it out")
    return value


Unsupported = Annotated[Any, AfterValidator(_unsupported)]
"""A field that is only accepted as null."""
Off = Annotated[bool | None, AfterValidator(_false)]
"""A field that is only accepted as false or null."""


class Form(Body):
    """A body whose unknown fields are refused, because they may change its meaning."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), frozen=True)


class Ignored(Form):
    """Fields that do not change the response.

    Attributes:
        user: of the client's own users.
        metadata: for the client's own dashboard.
        service_tier: only "auto" and "default" exist here.
        store: nothing is stored.
    """

    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Off = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class StreamOptions(Form):
    """See OpenAI's `stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class Sampled(Ignored):
    """Sampling parameters of chat and completions; those after `logit_bias` are not OpenAI's, but vLLM's."""

    model: Text
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=2**20)] | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    logit_bias: Biases | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    structured_outputs: dict[str, Any] | None = None


class TextPart(Form):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    cache_control: Any = None


Content = str | Annotated[list[TextPart], Field(max_length=4096)]


class FunctionCall(Form):
    """The function of a tool call in a message."""

    name: Text
    arguments: str


class ToolCall(Form):
    """A tool call in a message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """A message; fields of responses that clients send back, such as `refusal`, are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=1024)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Unsupported = None
    audio: Unsupported = None


class Function(Form):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Form):
    """A tool; only functions exist."""

    type: Literal["function"]
    function: Function
    cache_control: Any = None


class NamedFunction(Form):
    """The name in `tool_choice`."""

    name: Name


class NamedTool(Form):
    """A tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ToolSet(Form):
    """The tools in `tool_choice`."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128)]


class AllowedTools(Form):
    """Tools that may be called; the model does not see the others."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSet


class JsonSchema(Form):
    """The schema of `response_format`."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Form):
    """See OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TemplateOptions(Form):
    """Options of the chat template, as in vLLM."""

    enable_thinking: bool = True


class ChatBody(Sampled):
    """See `POST /v1/chat/completions`; the last two parameters that are supported are not OpenAI's, but vLLM's."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=65536)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateOptions | None = None
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None


class CompletionBody(Sampled):
    """See `POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=4096)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1, max_length=4096)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=2**20)] | None = None
    suffix: Unsupported = None


class EmbeddingsBody(Ignored):
    """See `POST /v1/embeddings`."""

    model: Text
    input: (
        str
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=2048)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1, max_length=2048)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**20)] | None = None
