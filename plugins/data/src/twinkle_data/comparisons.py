"""Generated comparisons of arithmetic: `builtin://arithmetic-preferences` and `builtin://arithmetic-paraphrases`."""

from collections.abc import Sequence
from random import Random
from typing import Any

from twinkle.errors import ArgumentError
from twinkle_data.arithmetic import QUESTIONS, arithmetic, conclusion
from twinkle_data.rows import shown

FLAWS = ("guess", "slip")
_OFF = (-10, -2, -1, 1, 2, 10)


def preferences(
    split: str = "train",
    seed: int = 0,
    size: int = 1000,
    difficulty: int | Sequence[int] | None = None,
    operations: str | Sequence[str] | None = None,
    language: str | Sequence[str] | None = None,
    form: str | Sequence[str] | None = None,
    flaw: str = "guess",
) -> list[dict[str, Any]]:
    """Return questions of `arithmetic` with a right and a wrong answer.

    Args:
        split: as of `arithmetic`, like all that follow but the last.
        seed: of Python's own generator.
        size: how many rows.
        difficulty: 1 to 4, or several.
        operations: `add`, `subtract`, `multiply`, `divide`, or several.
        language: `en` or `zh`, or both.
        form: `digits`, `words`, `story`, or several.
        flaw: what is wrong with the rejected answer: a `guess` states a wrong number without any working, a `slip` has
            the right working and a wrong number in its last line.

    Returns:
        Rows of `prompt`, `chosen` (the worked answer), `rejected` and `expression`; `PreferenceProcessor` reads them.

    Raises:
        ArgumentError: an option is outside its range.
        DataError: no such split, or there are fewer questions of this sort than `size`.
    """
    if flaw not in FLAWS:
        raise ArgumentError(f"builtin://arithmetic-preferences: flaw is {shown(flaw)}; it is one of {', '.join(FLAWS)}")
    rows = arithmetic(split, seed, size, difficulty, operations, language, form)
    return [_preference(row, flaw, seed) for row in rows]


def paraphrases(
    split: str = "train",
    seed: int = 0,
    size: int = 1000,
    difficulty: int | Sequence[int] | None = None,
    operations: str | Sequence[str] | None = None,
    language: str | Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Return questions in two wordings, with another question that is worded like the second.

    Args:
        split: as of `arithmetic`, like all that follow.
        seed: of Python's own generator.
        size: how many rows.
        difficulty: 1 to 4, or several.
        operations: `add`, `subtract`, `multiply`, `divide`, or several.
        language: `en` or `zh`, or both.

    Returns:
        Rows of `anchor`, `positive` (the same problem) and `negative` (another problem), all text; and `expression`.

    Raises:
        ArgumentError: an option is outside its range.
        DataError: no such split, or there are fewer questions of this sort than `size`.
    """
    rows = arithmetic(split, seed, size, difficulty, operations, language, "digits")
    asked = [row["expression"] for row in rows]
    return [_paraphrase(row, _other(asked, number), seed) for number, row in enumerate(rows)]


def _preference(row: dict[str, Any], flaw: str, seed: int) -> dict[str, Any]:
    random = Random(f"{seed}:{row['question']}")
    question, answer = (message["content"] for message in row["messages"])
    wrong = conclusion(int(row["answer"]) + _OFF[random.randrange(len(_OFF))], row["language"], row["form"])
    working = answer.split("\n")[:-1] if flaw == "slip" else []
    rejected = "\n".join([*working, wrong])
    return {"prompt": question, "chosen": answer, "rejected": rejected, "expression": row["expression"]}


def _other(asked: Sequence[str], number: int) -> str:
    """Return the next problem that is not the one of this number."""
    following = (asked[(number + step) % len(asked)] for step in range(1, len(asked)))
    other = next((problem for problem in following if problem != asked[number]), None)
    if other is None:
        raise ArgumentError("builtin://arithmetic-paraphrases: size is 1; a negative needs a second problem, ask for 2")
    return other


def _paraphrase(row: dict[str, Any], other: str, seed: int) -> dict[str, Any]:
    random, asked = Random(f"{seed}:{row['question']}"), row["expression"]
    wordings = [words for words in QUESTIONS[row["language"]] if words.format(asked) != row["question"]]
    wording = wordings[random.randrange(len(wordings))]
    return {
        "anchor": row["question"],
        "positive": wording.format(asked),
        "negative": wording.format(other),
        "expression": asked,
    }
