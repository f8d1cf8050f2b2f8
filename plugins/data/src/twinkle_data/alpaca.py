"""Instructions in Alpaca's form: `instruction`, `input`, `output`."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import DataError
from twinkle.preprocessor import Preprocessor
from twinkle_data.rows import Columns, optional_text, prompt, rows_with, shown, text_of

_OWNER = "AlpacaProcessor"


class AlpacaProcessor(Preprocessor):
    """Turns `instruction`, `input` and `output` into messages.

    The input, if any, follows the instruction on a new line. Columns `system` (text) and
    `history` (a list of [question, answer]), which some data sets have, become the turns before.

    Returned columns: `messages`.
    """

    def __call__(self, rows: Columns) -> dict[str, list[Any]]:
        """Return the conversations.

        Raises:
            DataError: `instruction` or `output` is missing, or a value is not a string; names column and row.
        """
        complete = rows_with(rows, ("instruction", "output"), _OWNER)
        return {"messages": [_messages(row, number) for number, row in enumerate(complete)]}


def _messages(row: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    instruction = text_of(row, "instruction", number, _OWNER)
    extra = optional_text(row, "input", number, _OWNER)
    question = f"{instruction}\n{extra}" if extra else instruction
    system = optional_text(row, "system", number, _OWNER)
    turns = [*_history(row.get("history"), number), (question, text_of(row, "output", number, _OWNER))]
    (first, answer), *later = turns
    messages = [*prompt(first, system), {"role": "assistant", "content": answer}]
    for old_question, old_answer in later:
        messages += [{"role": "user", "content": old_question}, {"role": "assistant", "content": old_answer}]
    return messages


def _history(value: Any, number: int) -> Sequence[tuple[str, str]]:
    rounds = value or []
    for pair in rounds:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(
                f"{_OWNER}, row {number} of the batch: column 'history' holds {shown(pair)}; it is a list of "
                "[question, answer]"
            )
    return [(question, answer) for question, answer in rounds]
