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
        split: as in `arithmetic`, like all following arguments except the last.
        seed: seed of Python's random generator.
        size: number of rows.
        difficulty: 1 to 4, or several.
        operations: `add`, `subtract`, `multiply`, `divide`, or several.
        language: `en` or `zh`, or both.
        form: `digits`, `words`, `story`, or several.
        flaw: flaw of the rejected answer: a `guess` states a wrong number without steps, a `slip` has the right steps
            and a wrong number in its last line.

    Returns:
        Rows of `prompt`, `chosen` (the worked answer), `rejected` and `expression`; `PreferenceProcessor` reads them.

    Raises:
        ArgumentError: an option is outside its range.
        DataError: no such split, or fewer than `size` questions match the options.
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
    """Return questions in two wordings, with a different question in the wording of the second.

    Args:
        split: as in `arithmetic`, like all following arguments.
        seed: seed of Python's random generator.
        size: number of rows.
        difficulty: 1 to 4, or several.
        operations: `add`, `subtract`, `multiply`, `divide`, or several.
        language: `en` or `zh`, or both.

    Returns:
        Rows of `anchor`, `positive` (the same problem) and `negative` (another problem), all text; and `expression`.

    Raises:
        ArgumentError: an option is outside its range.
        DataError: no such split, or fewer than `size` questions match the options.
    """
    rows = arithmetic(split, seed, size, difficulty, operations, language, "digits")
    expressions = [row["expression"] for row in rows]
    return [_paraphrase(row, _other(expressions, number), seed) for number, row in enumerate(rows)]


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
    random, expression = Random(f"{seed}:{row['question']}"), row["expression"]
    wordings = [words for words in QUESTIONS[row["language"]] if words.format(expression) != row["question"]]
    wording = wordings[random.randrange(len(wordings))]
    return {
        "anchor": row["question"],
        "positive": wording.format(expression),
        "negative": wording.format(other),
        "expression": expression,
    }
