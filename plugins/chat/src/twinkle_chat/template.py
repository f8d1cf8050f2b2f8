"""The template: encodes conversations to tokens and labels, and decodes tokens to text and tool calls."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinkle._arguments import refuse_unknown
from twinkle.data_format import IGNORE_INDEX, InputFeature, ToolCall, Trajectory, user_data_get
from twinkle.errors import ArgumentError, DataError, EncodeError, ModelLoadError, Unsupported
from twinkle.preprocessor.base import Preprocessor
from twinkle.runtime import remote_class
from twinkle_chat.encoding import (
    STRATEGIES,
    MarkedTokens,
    Strategy,
    conversation_tokens,
    feature_of,
    prompt_tokens,
    text_tokens,
    truncate,
    turn_weights,
)
from twinkle_chat.media import TextOnly
from twinkle_chat.messages import plain_messages, plain_tools
from twinkle_chat.rendering import ChatRenderer, special_tokens
from twinkle_chat.tool_parsers.finding import detect_first

if TYPE_CHECKING:
    from twinkle.mesh import DeviceMesh


_PAIR = ("positive", "negative")


def _built(loss_scale: Any) -> Any:
    from twinkle._registry import registry

    return registry().build(loss_scale, "loss_scale")


@remote_class()
class Template(TextOnly):
    """Encodes conversations by the chat template of a model's tokenizer.

    Labels cover what the assistant writes: its text and the token that ends each turn. `labels[i]` is the target of
    position `i`, -100 is not trained, and the last position is always -100. The key `key_rounds` of `user_data` (a
    message index or a list of them) restricts them to some turns, and a turn with `"weight": 0` or `"loss": false` is
    never trained. Reasoning in `<think>...</think>` at the start of a turn and `reasoning_content` are the same thing;
    the chat template determines where it is shown.

    Pickling drops a loaded tokenizer, which is loaded again on use; one passed as `tokenizer=` is pickled.
    """

    def __init__(
        self,
        model_id: str = "",
        use_chat_template: bool = True,
        max_length: int | None = 8192,
        truncation_strategy: Strategy = "raise",
        default_system: str | None = None,
        enable_thinking: bool = True,
        *,
        loss_scale: Any = None,
        tokenizer: Any = None,
        device_mesh: "DeviceMesh | None" = None,
        **kwargs: Any,
    ) -> None:
        """Store the options; the tokenizer is loaded on first use.

        Args:
            model_id: a folder or a hub id whose tokenizer is used.
            use_chat_template: False encodes the text of a single message without a template, and trains all of it.
            max_length: in tokens; None is no limit.
            truncation_strategy: for longer rows: `raise`; truncate on the `left` or `right`; `split` into several rows;
                `delete` (an empty row, which data sets drop).
            default_system: a system message for conversations that have none.
            enable_thinking: the chat template's variable of that name.
            loss_scale: weights the tokens of a conversation, in any form of component argument (`"RoleLossScale"`);
                encoded rows then carry `loss_scale`, see `twinkle.loss_scale.LossScale`.
            tokenizer: a transformers tokenizer to use instead of loading `model_id`'s.
            device_mesh: mesh that uses the rows; encoding does not depend on it.
            **kwargs: none; an unknown name is an error.

        Raises:
            ArgumentError: an argument is unknown, missing, or outside its range.
        """
        refuse_unknown(Template.__init__, kwargs, what=type(self).__name__)
        if truncation_strategy not in STRATEGIES:
            raise ArgumentError(
                f"truncation_strategy must be one of {', '.join(STRATEGIES)}, got {truncation_strategy!r}"
            )
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise ArgumentError(f"max_length must be a number of tokens >= 1, or None for no limit, got {max_length!r}")
        if default_system is not None and not use_chat_template:
            raise ArgumentError("default_system cannot be combined with use_chat_template=False; drop one of the two")
        if loss_scale is not None and not use_chat_template:
            raise ArgumentError(
                "loss_scale cannot be combined with use_chat_template=False, which has no turns; drop one of the two"
            )
        if not model_id and tokenizer is None:
            raise ArgumentError("a template requires model_id= (a folder or a hub id) or tokenizer=")
        self.model_id = model_id
        self.use_chat_template = use_chat_template
        self.max_length = max_length
        self.truncation_strategy = truncation_strategy
        self.default_system = default_system
        self.enable_thinking = enable_thinking
        self.loss_scale = None if loss_scale is None else _built(loss_scale)
        self.device_mesh = device_mesh
        self._passed_tokenizer, self._loaded_tokenizer = tokenizer, None
        self._special: tuple[int, frozenset[str]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded_tokenizer": None, "_special": None}

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, loaded on first use and cached.

        Raises:
            ModelLoadError: there is no such model, or its tokenizer is missing or corrupt.
        """
        if self._passed_tokenizer is not None:
            return self._passed_tokenizer
        if self._loaded_tokenizer is None:
            from transformers import AutoTokenizer

            from twinkle.hub import local_model

            folder = local_model(self.model_id)
            try:
                self._loaded_tokenizer = AutoTokenizer.from_pretrained(folder)
            except Exception as error:  # the tokenizers library raises bare Exceptions
                raise ModelLoadError(
                    f"model {self.model_id!r}: the tokenizer in {folder} cannot be loaded: {error}"
                ) from error
        return self._loaded_tokenizer

    @property
    def processor(self) -> Any:
        """The processor of raw input: for text, the tokenizer."""
        return self.tokenizer

    # Encoding

    def encode(
        self, trajectory: Mapping[str, Any], add_generation_prompt: bool = False, **kwargs: Any
    ) -> InputFeature | list[InputFeature]:
        """Encode one conversation, or one pair `{"positive": ..., "negative": ...}` to a pair of features.

        Args:
            trajectory: `messages` and optionally `tools`; all other keys are passed through.
            add_generation_prompt: end with the header of an assistant turn, for sampling; then nothing is trained.
            **kwargs: none; an unknown name is an error.

        Returns:
            `input_ids`, `labels`, `attention_mask` (ones) and `position_ids` as lists of int `[T]`, `length`, with a
            loss scale `loss_scale` as a list of float `[T]`, and the keys of the trajectory. A list of such features
            with `truncation_strategy="split"`.

        Raises:
            EncodeError: the conversation cannot be encoded; the text has the reason and the remedy.
        """
        refuse_unknown(self.encode, kwargs, what=f"{type(self).__name__}.encode")
        if not isinstance(trajectory, Mapping):
            raise EncodeError(f"a row must be a dict with 'messages', got {type(trajectory).__name__}")
        if "messages" not in trajectory and all(side in trajectory for side in _PAIR):
            return self._encode_pair(trajectory, add_generation_prompt)
        tokens, trained = self._tokenize(trajectory, add_generation_prompt)
        parts = truncate(tokens, trained, self.max_length, self.truncation_strategy, add_generation_prompt)
        features: list[Any] = [feature_of(trajectory, part, self.loss_scale is not None) for part in parts]
        return features if self.truncation_strategy == "split" else features[0]

    def batch_encode(
        self,
        trajectories: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> list[InputFeature] | dict[str, list[Any]]:
        """Encode many rows: a list returns a list, columns return columns. With `split` there may be more rows.

        Raises:
            EncodeError: a row cannot be encoded; the text has its number.
        """
        refuse_unknown(self.batch_encode, kwargs, what=f"{type(self).__name__}.batch_encode")
        rows: Any = self.map_col_to_row(trajectories) if isinstance(trajectories, Mapping) else trajectories
        features: list[Any] = []
        for number, row in enumerate(rows):
            try:
                encoded = self.encode(row, add_generation_prompt=add_generation_prompt)
            except EncodeError as error:
                raise EncodeError(f"row {number}: {error}") from error
            features.extend(encoded if isinstance(encoded, list) else [encoded])
        return self.map_row_to_col(features) if isinstance(trajectories, Mapping) else features

    def check(self, trajectory: Mapping[str, Any], **kwargs: Any) -> Mapping[str, Any] | None:
        """Return the row if it can be encoded, else None."""
        refuse_unknown(self.check, kwargs, what=f"{type(self).__name__}.check")
        try:
            encoded: Any = self.encode(trajectory)
        except EncodeError:
            return None
        parts = encoded if isinstance(encoded, list) else [encoded.get(_PAIR[0], encoded)]
        return trajectory if all(part["input_ids"] for part in parts) else None

    def batch_check(
        self, trajectories: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> list[Mapping[str, Any] | None]:
        """Return `check` of each row."""
        rows: Any = self.map_col_to_row(trajectories) if isinstance(trajectories, Mapping) else trajectories
        return [self.check(row, **kwargs) for row in rows]

    def format_trajectory(self, trajectory: Mapping[str, Any], add_default_system: bool = False) -> Trajectory:
        """Return a copy of the conversation in the form that the chat template reads.

        None-valued keys are dropped, text parts joined, and reasoning and tool arguments normalized.

        Args:
            trajectory: the conversation.
            add_default_system: add `default_system` if there is no system message.
        """
        messages = plain_messages(trajectory, any_weight=self.loss_scale is not None)
        if add_default_system and self.default_system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.default_system}, *messages]
        if self.use_chat_template:
            messages = self.renderer(trajectory).adapt(messages)
        formatted: Any = {**trajectory, "messages": messages}
        return formatted  # type: ignore[no-any-return]

    def renderer(self, trajectory: Mapping[str, Any]) -> ChatRenderer:
        """Return the renderer of a conversation, with its tools."""
        tokenizer, tools = self.tokenizer, plain_tools(trajectory)
        if self._special is None or self._special[0] != len(tokenizer):
            self._special = len(tokenizer), special_tokens(tokenizer)
        return self._chat(
            tokenizer=tokenizer, tools=tools, enable_thinking=self.enable_thinking, special_tokens=self._special[1]
        )

    def _chat(self, **options: Any) -> ChatRenderer:
        """Create the renderer; overridden for models whose chat template is unsuitable for training."""
        return ChatRenderer(**options)

    def _encode_pair(self, pair: Mapping[str, Any], add_generation_prompt: bool) -> InputFeature:
        if self.truncation_strategy == "split":
            raise EncodeError(
                "a preference pair cannot be split; choose truncation_strategy='delete', 'left' or 'right'"
            )
        encoded: Any = dict(pair)
        for side in _PAIR:
            try:
                encoded[side] = self.encode(pair[side], add_generation_prompt=add_generation_prompt)
            except EncodeError as error:
                raise EncodeError(f"{side}: {error}") from error
        if any(not encoded[side]["input_ids"] for side in _PAIR):
            for side in _PAIR:  # half a pair is useless
                encoded[side] = feature_of(pair[side], ((), ()), self.loss_scale is not None)
        return encoded  # type: ignore[no-any-return]

    def _tokenize(self, trajectory: Mapping[str, Any], add_generation_prompt: bool) -> MarkedTokens:
        formatted: Any = self.format_trajectory(trajectory, add_default_system=True)
        if not self.use_chat_template:
            return text_tokens(self.tokenizer, formatted, trained=not add_generation_prompt)
        chat, messages = self.renderer(trajectory), formatted["messages"]
        if add_generation_prompt:
            return prompt_tokens(chat, messages)
        rounds = user_data_get(trajectory.get("user_data"), "key_rounds")
        added = len(messages) - len(trajectory["messages"])  # 1 with the default system
        weights = None if self.loss_scale is None else turn_weights(self.loss_scale, trajectory, rounds)
        return conversation_tokens(chat, messages, rounds, added, weights)

    # Decoding

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        """Return the text of one sequence of token ids."""
        refuse_unknown(Template.decode, kwargs, what=f"{type(self).__name__}.decode")
        return str(self.tokenizer.decode(plain_list(token_ids), skip_special_tokens=skip_special_tokens))

    def batch_decode(self, token_ids: Sequence[Any], **kwargs: Any) -> list[str]:
        """Return `decode` of each sequence."""
        return [self.decode(ids, **kwargs) for ids in token_ids]

    def parse_tool_call(self, decoded: str) -> list[ToolCall]:
        """Return the tool calls in generated text, parsed by the first installed parser that detects its format."""
        parser = detect_first(decoded)
        return parser.parse(decoded) if parser else []

    def clean_tool_call(self, decoded: str) -> str:
        """Return generated text without its tool calls."""
        parser = detect_first(decoded)
        return parser.clean(decoded) if parser else decoded

    def concat_input_feature(self, prompt_input_feature: Mapping[str, Any], new_tokens: Sequence[int]) -> InputFeature:
        """Append sampled tokens to their prompt as trained targets; the prompt's tokens are not changed.

        Args:
            prompt_input_feature: one encoded row; if it has `messages`, the new assistant turn is appended to them.
            new_tokens: the sampled token ids.

        Returns:
            A new row: `labels` and `completion_mask` cover the new tokens, `messages` has the new turn (with
            `tool_calls` if `parse_tool_call` finds any, and without their markup).

        Raises:
            Unsupported: with `truncation_strategy="split"`, since a row then has no single continuation.
            DataError: the prompt is not one encoded row.
        """
        if self.truncation_strategy == "split":
            raise Unsupported("concat_input_feature with truncation_strategy='split'; choose another strategy")
        joined: Any = append_tokens(prompt_input_feature, new_tokens)
        if joined.get("messages"):
            joined["messages"] = [*joined["messages"], self._assistant_message(new_tokens)]
        return joined  # type: ignore[no-any-return]

    def _assistant_message(self, new_tokens: Sequence[int]) -> dict[str, Any]:
        text = self.decode(new_tokens, skip_special_tokens=True)
        calls = self.parse_tool_call(text)
        if not calls:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": self.clean_tool_call(text), "tool_calls": calls}

    # Rows and columns

    map_col_to_row = staticmethod(Preprocessor.map_col_to_row)
    map_row_to_col = staticmethod(Preprocessor.map_row_to_col)


def append_tokens(prompt: Mapping[str, Any], new_tokens: Sequence[int]) -> dict[str, Any]:
    """Return `prompt` with `new_tokens` appended as trained targets.

    Args:
        prompt: one encoded row, `input_ids` `[T]`; its labels and `completion_mask` (earlier turns) are kept.
        new_tokens: the sampled token ids `[N]`.

    Returns:
        A new row of `T + N` tokens: the last prompt position is labelled with the first new token, and so on; the last
        position is -100. `completion_mask` is 1 where the target was sampled.

    Raises:
        DataError: the prompt is not an encoded row, or its sequences differ in length.
    """
    ids = _sequence(prompt, "input_ids", None, None)
    if not ids:
        raise DataError("the prompt has no tokens; encode it with add_generation_prompt=True first")
    tokens, size = plain_list(new_tokens), len(ids)
    joined: dict[str, Any] = dict(prompt)
    labels = _sequence(prompt, "labels", size, IGNORE_INDEX)
    sampled = _sequence(prompt, "completion_mask", size, 0)
    joined["input_ids"] = ids + tokens
    if tokens:
        labels = [*labels[:-1], *tokens, IGNORE_INDEX]
        sampled = [*sampled[:-1], *[1] * len(tokens), 0]
    joined["labels"], joined["completion_mask"] = labels, sampled
    joined["attention_mask"] = _sequence(prompt, "attention_mask", size, 1) + [1] * len(tokens)
    positions = _sequence(prompt, "position_ids", size, None) or list(range(size))
    joined["position_ids"] = positions + list(range(positions[-1] + 1, positions[-1] + 1 + len(tokens)))
    if prompt.get("loss_scale") is not None and tokens:
        scale = _sequence(prompt, "loss_scale", size, 1.0)
        joined["loss_scale"] = [*scale[:-1], *[1.0] * len(tokens), scale[-1]]
    joined["length"] = size + len(tokens)
    return joined


def _sequence(row: Mapping[str, Any], key: str, size: int | None, default: Any) -> list[Any]:
    value = row.get(key)
    if value is None:
        return [] if default is None else [default] * (size or 0)
    values = plain_list(value)
    if values and isinstance(values[0], list):
        raise DataError(f"{key} of the prompt is a batch; pass one row at a time")
    if size is not None and len(values) != size:
        raise DataError(f"{key} of the prompt has {len(values)} values for {size} tokens")
    return values


def plain_list(value: Any) -> list[Any]:
    """Return a list, NumPy array or tensor as a plain list."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple | range) else [value]
