"""Problems with an answer that can be checked: competition mathematics, GSM8K, Countdown, and plain questions."""

import re
from collections.abc import Mapping
from typing import Any

from twinkle.errors import DataError
from twinkle.preprocessor import Preprocessor
from twinkle_data.rows import Columns, flag, key_text, pairs, prompt, rows_with, shown, system_text, text_of

BOXED = "Solve the mathematics problem step by step, and write the final answer as \\boxed{...}."
ONLY_BOXED = "Answer the mathematics problem with the final answer alone, as \\boxed{...}, and write nothing else."
THINKER = "You are a helpful assistant. Reason about the problem first, and give the answer after that."
EQUATION = (
    "Find an equation that equals {target} with the numbers {nums}. Use only +, -, * and /, and each number once. "
    "Write your reasoning inside <think> </think>, and then the equation with its result inside <answer> </answer>, "
    "for example <answer> (1 + 2) / 3 * 4 = 4 </answer>."
)

_FINAL = re.compile(r"####\s*(.+?)\s*$")


class CompetitionMathProcessor(Preprocessor):
    """Turns `problem` and `solution` into a question and its worked answer.

    Returned columns: `messages`.
    """

    def __call__(self, rows: Columns) -> dict[str, list[Any]]:
        """Return the conversations.

        Raises:
            DataError: a column is missing or a value is no text; names column and row.
        """
        owner = type(self).__name__
        messages = []
        for number, row in enumerate(rows_with(rows, ("problem", "solution"), owner)):
            answer = {"role": "assistant", "content": text_of(row, "solution", number, owner)}
            messages.append([*prompt(text_of(row, "problem", number, owner), ""), answer])
        return {"messages": messages}


class CompetitionMathGRPOProcessor(Preprocessor):
    """Turns `problem` and `solution` into a prompt; `user_data` has the whole `solution`, for a reward to compare with.

    Args:
        system: the system message; by default it requests the answer in a box and nothing else; "" means none.

    Returned columns: `messages`, `user_data`.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system_text(system, type(self).__name__, ONLY_BOXED)

    def __call__(self, rows: Columns) -> dict[str, list[Any]]:
        """Return the prompts.

        Raises:
            DataError: a column is missing or a value is no text; names column and row.
        """
        owner = type(self).__name__
        complete = rows_with(rows, ("problem", "solution"), owner)
        return {
            "messages": [prompt(text_of(row, "problem", n, owner), self.system) for n, row in enumerate(complete)],
            "user_data": [pairs(solution=text_of(row, "solution", n, owner)) for n, row in enumerate(complete)],
        }


class GSM8KProcessor(Preprocessor):
    """Turns `question` and `answer`, which ends in `#### number`, into a prompt with that number as `ground_truth`.

    Args:
        system: the system message; by default it requests the number in a box; "" means none.
        add_assistant: let the worked answer follow, for supervised training.

    Returned columns: `messages`, `user_data`.
    """

    def __init__(self, system: str | None = None, add_assistant: bool = False) -> None:
        self.system = system_text(system, type(self).__name__, BOXED)
        self.add_assistant = flag(add_assistant, "add_assistant", type(self).__name__)

    def __call__(self, rows: Columns) -> dict[str, list[Any]]:
        """Return the prompts, or conversations.

        Raises:
            DataError: a column is missing, a value is no text, or an answer has no `####`; names column and row.
        """
        owner = type(self).__name__
        messages, user_data = [], []
        for number, row in enumerate(rows_with(rows, ("question", "answer"), owner)):
            answer = text_of(row, "answer", number, owner)
            if (final := _FINAL.search(answer)) is None:
                raise DataError(
                    f"{owner}, row {number} of the batch: column 'answer' does not end in '#### number': "
                    f"{shown(answer[-60:])}"
                )
            question = prompt(text_of(row, "question", number, owner), self.system)
            messages.append([*question, {"role": "assistant", "content": answer}] if self.add_assistant else question)
            user_data.append(pairs(ground_truth=final[1].replace(",", "")))
        return {"messages": messages, "user_data": user_data}


class CountdownProcessor(Preprocessor):
    """Turns `nums` and `target` into a prompt to reach the target with the numbers, each used once.

    The target may also be in a column `response`, which is read first. The question describes the format of the answer.

    Args:
        system: the system message; by default it requests reasoning before the answer; "" means none.

    Returned columns: `messages`, `user_data`: a list of one dict with `target` (a number) and `nums` (a list).
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system_text(system, type(self).__name__, THINKER)

    def __call__(self, rows: Columns) -> dict[str, list[Any]]:
        """Return the prompts.

        Raises:
            DataError: a column is missing, or holds no whole numbers; names column and row.
        """
        owner = type(self).__name__
        messages, user_data = [], []
        key = "response" if "response" in rows else "target"
        for number, row in enumerate(rows_with(rows, ("nums", key), owner)):
            nums, target = _numbers(row, key, number, owner)
            messages.append(prompt(EQUATION.format(target=target, nums=nums), self.system))
            user_data.append([{"target": target, "nums": nums}])
        return {"messages": messages, "user_data": user_data}


class QuestionProcessor(Preprocessor):
    """Turns a question and an answer, under any column names, into a prompt with the answer as `ground_truth`.

    Args:
        question_key: the column of the questions.
        answer_key: the column of the answers: text or numbers.
        system: the system message, if any.
        add_assistant: let the answer follow, for supervised training.

    Returned columns: `messages`, `user_data`.
    """

    def __init__(
        self,
        question_key: str = "question",
        answer_key: str = "answer",
        system: str | None = None,
        add_assistant: bool = False,
    ) -> None:
        owner = type(self).__name__
        self.question_key = key_text(question_key, "question_key", owner)
        self.answer_key = key_text(answer_key, "answer_key", owner)
        self.system = system_text(system, owner)
        self.add_assistant = flag(add_assistant, "add_assistant", owner)

    def __call__(self, rows: Columns) -> dict[str, list[Any]]:
        """Return the prompts, or conversations.

        Raises:
            DataError: a column is missing, or a value is neither text nor a number; names column and row.
        """
        owner = type(self).__name__
        messages, user_data = [], []
        for number, row in enumerate(rows_with(rows, (self.question_key, self.answer_key), owner)):
            answer = row[self.answer_key]
            if isinstance(answer, bool) or not isinstance(answer, int | float):
                answer = text_of(row, self.answer_key, number, owner)
            asked = prompt(text_of(row, self.question_key, number, owner), self.system)
            answer_turn = {"role": "assistant", "content": str(answer)}
            messages.append([*asked, answer_turn] if self.add_assistant else asked)
            user_data.append(pairs(ground_truth=answer))
        return {"messages": messages, "user_data": user_data}


def _numbers(row: Mapping[str, Any], key: str, number: int, owner: str) -> tuple[list[int], int]:
    nums, target = row["nums"], row[key]
    if not isinstance(nums, list | tuple) or not nums or not all(map(_is_whole, nums)):
        raise DataError(f"{owner}, row {number} of the batch: column 'nums' is {shown(nums)}; it is a list of integers")
    if not _is_whole(target):
        raise DataError(f"{owner}, row {number} of the batch: column {key!r} is {shown(target)}; it is an integer")
    return list(nums), target


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
