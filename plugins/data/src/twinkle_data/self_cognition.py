"""Self-cognition data: replaces the placeholders for name and author."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import ArgumentError, DataError
from twinkle.preprocessor import Preprocessor

Name = str | Sequence[str] | None

_PLACEHOLDER = re.compile(r"\{\{\s*(NAME|AUTHOR)\s*\}\}")
_ARGUMENT = {"NAME": "model_name", "AUTHOR": "model_author"}
_LANGUAGE_COLUMNS = ("language", "tag")
_USED = {"query", "response", "messages"}
_SYSTEM = "You are a helpful assistant."


class SelfCognitionProcessor(Preprocessor):
    """Replaces `{{NAME}}` and `{{AUTHOR}}` everywhere in the conversations.

    Rows have a column `messages`, or `query` and `response`, which become a user and an assistant message after a
    system message. Other columns stay as they are.

    Args:
        model_name: the model's name; or a pair (Chinese, English), of which each row takes the one of its column
            `language` (or `tag`): texts that start with `zh` or `en`.
        model_author: author of the model, in the same form.

    Raises:
        ArgumentError: neither a text nor a pair of texts.
    """

    def __init__(self, model_name: Name = None, model_author: Name = None) -> None:
        self.model_name, self.model_author = model_name, model_author
        self._names = {"NAME": _pair("model_name", model_name), "AUTHOR": _pair("model_author", model_author)}

    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return the columns with `messages`, all placeholders filled.

        Raises:
            DataError: there are no conversations, a placeholder has no name to fill in, or a row has no language that a
                pair could be chosen by.
        """
        columns = {name: list(values) for name, values in rows.items() if name not in _USED}
        columns["messages"] = [self._fill(row) for row in self.map_col_to_row(rows)]
        return columns

    def _fill(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [self._filled(message, row) for message in _messages(row)]

    def _filled(self, value: Any, row: Mapping[str, Any]) -> Any:
        if isinstance(value, str):
            return _PLACEHOLDER.sub(lambda found: self._value(found[1], row), value)
        if isinstance(value, Mapping):
            return {key: self._filled(item, row) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._filled(item, row) for item in value]
        return value

    def _value(self, placeholder: str, row: Mapping[str, Any]) -> str:
        pair = self._names[placeholder]
        if pair is None:
            argument = _ARGUMENT[placeholder]
            raise DataError(
                f"SelfCognitionProcessor: a row has {{{{{placeholder}}}}}, but no name for it; give {argument}="
            )
        chinese, english = pair
        if chinese == english:
            return chinese
        language = next((row[name] for name in _LANGUAGE_COLUMNS if row.get(name)), None)
        if isinstance(language, str) and language.lower().startswith(("zh", "en")):
            return chinese if language.lower().startswith("zh") else english
        raise DataError(
            f"{_ARGUMENT[placeholder]} is a pair (Chinese, English), but a row has the language {language!r}; give its "
            "column 'language' the value 'zh' or 'en', or give one text for all rows"
        )


def _pair(argument: str, value: Name) -> tuple[str, str] | None:
    if value is None:
        return None
    texts = (value, value) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
    if len(texts) != 2 or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ArgumentError(f"{argument} is {value!r}; give a text, or a pair of texts (Chinese, English)")
    return texts[0], texts[1]


def _messages(row: Mapping[str, Any]) -> list[Any]:
    if row.get("messages"):
        return list(row["messages"])
    query, response = row.get("query"), row.get("response")
    if isinstance(query, str) and isinstance(response, str):
        turns = (("system", _SYSTEM), ("user", query), ("assistant", response))
        return [{"role": role, "content": content} for role, content in turns]
    raise DataError(
        f"SelfCognitionProcessor needs 'messages', or texts 'query' and 'response'; a row has {', '.join(row)}"
    )
