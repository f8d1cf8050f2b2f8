"""Preference data: a prompt with a better and a worse answer becomes a `positive` and a `negative` conversation."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import DataError
from twinkle.preprocessor import Preprocessor
from twinkle_data.rows import Columns, key_text, prompt, rows_with, shown, system_text, text_of


class EmojiDPOProcessor(Preprocessor):
    """Converts a prompt and two answers, all strings, to a pair of conversations.

    Args:
        system: the system message, if any.
        chosen_key: the column of the better answers.
        rejected_key: the column of the worse answers.
        prompt_key: the column of the prompts.

    Returned columns: `positive` and `negative`, each with `messages`.
    """

    def __init__(
        self,
        system: str | None = None,
        chosen_key: str = "answer_zh",
        rejected_key: str = "answer_en",
        prompt_key: str = "prompt",
    ) -> None:
        owner = type(self).__name__
        self.system = system_text(system, owner)
        self.chosen_key = key_text(chosen_key, "chosen_key", owner)
        self.rejected_key = key_text(rejected_key, "rejected_key", owner)
        self.prompt_key = key_text(prompt_key, "prompt_key", owner)

    def __call__(self, rows: Columns) -> dict[str, list[Any]]:
        """Return the pairs.

        Raises:
            DataError: a column is missing or a value is no text; names column and row.
        """
        owner = type(self).__name__
        sides: dict[str, list[Any]] = {"positive": [], "negative": []}
        keys = {"positive": self.chosen_key, "negative": self.rejected_key}
        for number, row in enumerate(rows_with(rows, (self.prompt_key, *keys.values()), owner)):
            question = prompt(text_of(row, self.prompt_key, number, owner), self.system)
            for side, key in keys.items():
                answer = {"role": "assistant", "content": text_of(row, key, number, owner)}
                sides[side].append({"messages": [*question, answer]})
        return sides


class PreferenceProcessor(Preprocessor):
    """Converts prompt, chosen and rejected, in the usual forms of preference data, to a pair of conversations.

    The prompt is a text or a list of messages; an answer is a text, a message, or a list of messages. Where there is no
    prompt, or the answers repeat it, they are whole conversations, which must begin alike.

    Args:
        system: a system message for conversations that have none.
        prompt_key: the column of the prompts, which may be missing.
        chosen_key: the column of the better answers.
        rejected_key: the column of the worse answers.

    Returned columns: `positive` and `negative`, each with `messages`.
    """

    def __init__(
        self,
        system: str | None = None,
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
    ) -> None:
        owner = type(self).__name__
        self.system = system_text(system, owner)
        self.prompt_key = key_text(prompt_key, "prompt_key", owner)
        self.chosen_key = key_text(chosen_key, "chosen_key", owner)
        self.rejected_key = key_text(rejected_key, "rejected_key", owner)

    def __call__(self, rows: Columns) -> dict[str, list[Any]]:
        """Return the pairs.

        Raises:
            DataError: a column is missing, a value has none of the forms, an answer does not end with the assistant's
                words, or two whole conversations begin differently; names column and row.
        """
        owner = type(self).__name__
        sides: dict[str, list[Any]] = {"positive": [], "negative": []}
        for number, row in enumerate(rows_with(rows, (self.chosen_key, self.rejected_key), owner)):
            where = f"{owner}, row {number} of the batch"
            chosen = self._conversation(row, self.chosen_key, where)
            rejected = self._conversation(row, self.rejected_key, where)
            if chosen[0] != rejected[0]:
                raise DataError(
                    f"{where}: {self.chosen_key!r} and {self.rejected_key!r} begin with different messages; a pair "
                    f"answers one prompt (give it in the column {self.prompt_key!r})"
                )
            sides["positive"].append({"messages": chosen})
            sides["negative"].append({"messages": rejected})
        return sides

    def _conversation(self, row: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
        question = _messages(row.get(self.prompt_key), "user", f"{where}: column {self.prompt_key!r}")
        answer = _messages(row[key], "assistant", f"{where}: column {key!r}")
        messages = _joined(question, answer)
        if messages is None:
            raise DataError(
                f"{where}: column {key!r} is a whole conversation that does not begin with the prompt of the column "
                f"{self.prompt_key!r}; give the answer alone, or name no such column (prompt_key)"
            )
        if len(messages) < 2 or messages[-1].get("role") != "assistant":
            raise DataError(
                f"{where}: column {key!r} gives a conversation of {_roles(messages)}; it needs a prompt and an answer "
                "of the assistant"
            )
        if self.system and messages[0].get("role") != "system":
            return [{"role": "system", "content": self.system}, *messages]
        return messages


def _messages(value: Any, role: str, where: str) -> list[dict[str, Any]]:
    """Return a text as a message of `role`, a list of messages unchanged, and None for other values."""
    if value is None:
        return []
    if isinstance(value, str) and value.strip():
        return [{"role": role, "content": value}]
    items: Sequence[Any] = [value] if isinstance(value, Mapping) else value
    if isinstance(items, list | tuple) and items and all(isinstance(m, Mapping) and "role" in m for m in items):
        return [dict(message) for message in items]
    raise DataError(f"{where} is {shown(value)}; it is a text, or messages {{'role': ..., 'content': ...}}")


def _joined(asked: list[dict[str, Any]], answer: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the full conversation: prompt and answer; if the answer begins with a prompt, it must be the same."""
    start = 1 if answer[:1] and answer[0]["role"] == "system" and asked[:1] and asked[0]["role"] != "system" else 0
    if not asked or answer[start : start + len(asked)] == asked:
        return answer
    return None if answer and answer[0]["role"] in ("system", "user") else [*asked, *answer]


def _roles(messages: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(message.get("role")) for message in messages) or "no messages"
