"""Joins the results of tools to a row without touching a token that was sampled."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import DataError, EncodeError
from twinkle.template import append_tokens, turn_span

if TYPE_CHECKING:
    from twinkle.template import ChatRenderer, Template

_NO_THOUGHT = re.compile(r"<think>\s*</think>\s*|<\|channel>thought\n<channel\|>")  # some show it in the last turn only


def extend_with_bridge(
    pif: Mapping[str, Any], tool_messages: Sequence[Mapping[str, Any]], template: "Template"
) -> dict[str, Any] | None:
    """Append messages after a sampled turn, and the header of the next turn, as tokens that are not trained.

    The chat template renders the conversation with and without the messages; what is new after the sampled turn is the
    bridge. Its text alone is tokenized; of a template without a `renderer`, the two encoded conversations are compared.
    Where the turn did not end with the chat template's own token (it ended at a
    stop string), the bridge begins with that token.

    Args:
        pif: a row that ends with a sampled turn, as `concat_input_feature` makes it: `input_ids`, `labels`, `messages`
            of which the last is the assistant's.
        tool_messages: what follows, of any role but the assistant's.
        template: the one that encoded the row.

    Returns:
        A new row: the same tokens and those of the bridge, whose labels are -100, as is that of the last sampled token,
        for its target would be the first of the bridge; `completion_mask` and `loss_scale` are 0 there. `messages` has
        the new ones. None where the chat template cannot go on from here: it refuses the messages, or it shows what
        was before them differently once they follow.

    Raises:
        DataError: the row does not end with an assistant's turn, or there is no message to append.
    """
    messages = list(pif.get("messages") or ())
    if not messages or messages[-1]["role"] != "assistant" or not tool_messages:
        raise DataError("a bridge leads from an assistant's turn over at least one message to the next turn")
    extended: dict[str, Any] = {**pif, "messages": [*messages, *map(dict, tool_messages)]}
    try:
        if hasattr(template, "renderer"):
            closing, bridge = _texts(template.renderer(extended), template, extended, len(tool_messages))
            tokens = _tokens(template.tokenizer, pif["input_ids"], closing, bridge)
        else:
            tokens = _encoded_bridge(template, pif, extended)
    except EncodeError:
        return None
    return None if tokens is None else {**_untrained(pif, tokens), "messages": extended["messages"]}


def _texts(chat: "ChatRenderer", template: "Template", extended: Mapping[str, Any], added: int) -> tuple[str, str]:
    """Return the text of the token that ends the sampled turn (or ""), and the template's text after it.

    Raises:
        EncodeError: the chat template refuses, or what was before is shown differently.
    """
    messages: Any = template.format_trajectory(extended, add_default_system=True)["messages"]
    known = messages[:-added]
    turn, was, now = len(known) - 1, chat.render(known), chat.render(messages)
    prompt = chat.render(messages, add_generation_prompt=True)
    before, ended = _split(chat, was[: turn_span(chat, known, turn, was)[1]])
    after, closing = _split(chat, now[: turn_span(chat, messages, turn, now)[1]])
    same = _NO_THOUGHT.sub("", before) == _NO_THOUGHT.sub("", after) and bool(ended) == bool(closing)
    if not same or not prompt.startswith(after + closing):
        raise EncodeError("the chat template shows the turns before differently once others follow")
    return closing, prompt[len(after) + len(closing) :]


def _split(chat: "ChatRenderer", text: str) -> tuple[str, str]:
    """Return a text without the special token at its end, and that token."""
    found = max((token for token in chat.special_tokens if text.endswith(token)), key=len, default="")
    return text[: len(text) - len(found)], found


def _tokens(tokenizer: Any, ids: Sequence[int], closing: str, bridge: str) -> list[int] | None:
    """Return the bridge's tokens, with the closing one where the sampled turn lacks it."""
    found: list[int] = tokenizer(closing + bridge, add_special_tokens=False)["input_ids"]
    if not closing:
        return found
    end = tokenizer.convert_tokens_to_ids(closing)
    if not found or found[0] != end:
        return None
    ended = int(ids[-1]) in (end, tokenizer.eos_token_id)
    return found[1:] if ended else found


def _encoded_bridge(template: Any, pif: Mapping[str, Any], extended: Mapping[str, Any]) -> list[int] | None:
    """Return the bridge's tokens by the template's `encode` alone, of the conversation before and after."""
    known = {key: extended[key] for key in ("messages", "tools") if extended.get(key) is not None}
    before = _ids(template.encode({**known, "messages": list(pif["messages"])}))
    after = _ids(template.encode(known, add_generation_prompt=True))
    if after[: len(before)] != before or len(after) == len(before):
        return None
    ends = set(map(int, getattr(getattr(template, "tokenizer", None), "all_special_ids", None) or ()))
    last = int(pif["input_ids"][-1])
    end = next((place for place in reversed(range(len(before))) if before[place] in (ends or {last})), None)
    if end is None:
        return None
    return after[end + 1 :] if before[end] == last else after[end:]


def _ids(encoded: Mapping[str, Any]) -> list[int]:
    return list(map(int, encoded["input_ids"]))


def special_tokens(template: Any, row: Mapping[str, Any]) -> Collection[str]:
    """Return the special tokens of a template's tokenizer, as text."""
    if hasattr(template, "renderer"):
        found: Collection[str] = template.renderer(row).special_tokens
        return found
    return list(getattr(getattr(template, "tokenizer", None), "all_special_tokens", None) or ())


def _untrained(row: Mapping[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
    joined = append_tokens(row, tokens)
    kept = len(joined["labels"]) - len(tokens) - 1  # the last of the old positions never had a target
    joined["labels"] = [*joined["labels"][:kept], *[IGNORE_INDEX] * (len(tokens) + 1)]
    joined["completion_mask"] = [*joined["completion_mask"][:kept], *[0] * (len(tokens) + 1)]
    if joined.get("loss_scale") is not None:
        joined["loss_scale"] = [*joined["loss_scale"][:kept], *[0.0] * (len(tokens) + 1)]
    return joined
