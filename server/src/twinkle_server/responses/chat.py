"""Responses in OpenAI's and Anthropic's form, `/v1`."""

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from twinkle_server.responses.base import Answer, Time


class ChatModel(Answer):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ChatModels(Answer):
    """The base model, and the caller's models and checkpoints."""

    object: Literal["list"]
    data: list[ChatModel]


class ClaudeModel(Answer):
    """A model in Anthropic's form."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: Time
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ClaudeModels(Answer):
    """A page of models in Anthropic's form."""

    data: list[ClaudeModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ListedModels(RootModel[ChatModels | ClaudeModels]):
    """The base model, and the caller's models and checkpoints; with `anthropic-version` a page in Anthropic's form."""


class DescribedModel(RootModel[ChatModel | ClaudeModel]):
    """A model; with `anthropic-version` in Anthropic's form."""


class CachedTokens(Answer):
    """Tokens of the prompt that came from a cache."""

    cached_tokens: int


class ChatUsage(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TokenScore(Answer):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TokenScore):
    """A sampled token, with the most probable ones."""

    top_logprobs: list[TokenScore]


class ChatScores(Answer):
    """Log-probabilities of a choice."""

    content: list[ScoredToken]
    refusal: None


class CalledFunction(Answer):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


class FunctionUse(Answer):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class FunctionUseChunk(FunctionUse):
    """A tool call of a stream."""

    index: int


class ChatAnswer(Answer):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[FunctionUse] | None = None


Finish = Literal["stop", "length", "tool_calls"]


class ChatChoice(Answer):
    """A choice."""

    index: int
    message: ChatAnswer
    logprobs: ChatScores | None
    finish_reason: Finish


class ChatCompletion(Answer):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


class ChatDelta(Answer):
    """What a choice has gained."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[FunctionUseChunk] | None = None


class ChatChunkChoice(Answer):
    """A choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatScores | None
    finish_reason: Finish | None


class ChatChunk(Answer):
    """A chunk of a stream; `usage` is in the last one, if requested."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: ChatUsage | None = None


class OpenAIProblem(Answer):
    """An error."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIStreamError(Answer):
    """Why a stream cannot go on."""

    error: OpenAIProblem


class ChatEvent(RootModel[ChatChunk | OpenAIStreamError]):
    """An event of a chat completion; the last one is `[DONE]` instead."""


class CompletionScores(Answer):
    """Log-probabilities of a completion, in the older form."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """A choice."""

    index: int
    text: str
    logprobs: CompletionScores | None
    finish_reason: Finish | None


class Completion(Answer):
    """A completion, or a chunk of its stream, whose last one has the `usage` if requested."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChatUsage | None = None


class CompletionEvent(RootModel[Completion | OpenAIStreamError]):
    """An event of a completion; the last one is `[DONE]` instead."""


class Embedding(Answer):
    """A vector of length 1: numbers, or float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Answer):
    """A vector for each text."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TextBlock(Answer):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ToolUseBlock(Answer):
    """A tool call of a message."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    """Tokens of a request."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


Block = Annotated[TextBlock | ToolUseBlock, Field(discriminator="type")]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicMessage(Answer):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(Answer):
    """The beginning of a message."""

    type: Literal["message_start"]
    message: AnthropicMessage


class BlockStart(Answer):
    """The beginning of a block."""

    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextDelta(Answer):
    """More text."""

    type: Literal["text_delta"]
    text: str


class InputDelta(Answer):
    """More of the input of a tool."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Answer):
    """What a block has gained."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | InputDelta


class BlockStop(Answer):
    """The end of a block."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnding(Answer):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Answer):
    """The end of the content of a message."""

    type: Literal["message_delta"]
    delta: MessageEnding
    usage: MessageUsage


class MessageStop(Answer):
    """The end of a message."""

    type: Literal["message_stop"]


class AnthropicProblem(Answer):
    """An error."""

    type: str
    message: str


class AnthropicStreamError(Answer):
    """Why a stream cannot go on."""

    type: Literal["error"]
    error: AnthropicProblem


class MessageEvent(
    RootModel[
        MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | AnthropicStreamError
    ]
):  # fmt: skip
    """An event of a message."""


class TokenCount(Answer):
    """The number of tokens of a conversation."""

    input_tokens: int
