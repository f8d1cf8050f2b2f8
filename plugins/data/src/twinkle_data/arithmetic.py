"""The data set `builtin://arithmetic`: questions with one right answer, generated from a seed."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, TypeVar

from twinkle.errors import ArgumentError, DataError
from twinkle_data.expressions import LEVELS, SIGNS, Operation, draw, key, steps, value, written
from twinkle_data.numerals import chinese, english
from twinkle_data.rows import shown
from twinkle_data.texts import checked_count

T = TypeVar("T")

_WHAT = "builtin://arithmetic"
SPLITS = ("train", "test")
LANGUAGES = ("en", "zh")
FORMS = ("digits", "words", "story")
_PATIENCE = 2000
_STORY = 2

_NUMERALS: dict[str, Callable[[int], str]] = {"en": english, "zh": chinese}
_WORDS = {
    "en": {"+": " plus ", "-": " minus ", "*": " times ", "/": " divided by "},
    "zh": {"+": "加", "-": "减", "*": "乘以", "/": "除以"},
}
_BRACKETS = {"en": ("(", ")"), "zh": ("（", "）")}
QUESTIONS = {
    "en": ("What is {}?", "How much is {}?", "Calculate {}.", "Find the value of {}.", "Work out {}."),
    "zh": ("{}等于多少？", "{}是多少？", "请计算{}。", "请算出{}的结果。", "求{}的值。"),
}
_SO = {"en": "The answer is {}.", "zh": "答案是{}。"}
_NAMES = {
    "en": ("Anna", "Ben", "Chloe", "David", "Emma", "Farid", "Grace", "Hugo"),
    "zh": ("小明", "小红", "小刚", "小丽", "小华", "小芳", "小军", "小兰"),
}
_STORIES = {
    "en": {
        "+": (
            "{name} has {a} stamps and is given {b} more. How many stamps does {name} have now?",
            "A train carries {a} people, and {b} more get on. How many people are on the train?",
        ),
        "-": (
            "{name} has {a} marbles and loses {b} of them. How many marbles are left?",
            "A shop has {a} loaves of bread and sells {b}. How many loaves remain?",
        ),
        "*": (
            "{name} fills {a} boxes with {b} eggs each. How many eggs are there?",
            "A hall has {a} rows of {b} seats. How many seats does it have?",
        ),
        "/": (
            "{name} shares {a} nuts equally among {b} squirrels. How many nuts does each of them get?",
            "{a} pages are read in {b} days, the same number every day. How many pages are read in a day?",
        ),
    },
    "zh": {
        "+": (
            "{name}有{a}张邮票，又得到了{b}张。{name}现在有多少张邮票？",
            "车上有{a}个人，又上来{b}个人。车上现在有多少人？",
        ),
        "-": (
            "{name}有{a}颗弹珠，弄丢了{b}颗。还剩多少颗？",
            "店里有{a}个面包，卖掉了{b}个。还剩多少个？",
        ),
        "*": (
            "{name}装了{a}个盒子，每个盒子放{b}个鸡蛋。一共有多少个鸡蛋？",
            "礼堂有{a}排座位，每排{b}个。一共有多少个座位？",
        ),
        "/": (
            "{name}把{a}颗坚果平均分给{b}只松鼠。每只松鼠得到多少颗？",
            "一本书有{a}页，{b}天读完，每天读的页数相同。每天读多少页？",
        ),
    },
}


def arithmetic(
    split: str = "train",
    seed: int = 0,
    size: int = 1000,
    difficulty: int | Sequence[int] | None = None,
    operations: str | Sequence[str] | None = None,
    language: str | Sequence[str] | None = None,
    form: str | Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Return generated questions; no two of them have the same text.

    One problem in ten belongs to the split `test`, independent of seed, size and wording, so the splits never share a
    problem. With the same other options, a larger `size` begins with the same rows.

    Args:
        split: `train` or `test`.
        seed: seed of Python's random generator, which is the same on every machine.
        size: number of rows.
        difficulty: 1 (one operation, numbers to 9), 2 (numbers to 99), 3 (two operations), 4 (three operations, numbers
            to 999 and below 0), or several of these; None is all.
        operations: `add`, `subtract`, `multiply`, `divide`, or several; None is all.
        language: `en` or `zh`; None is both.
        form: `digits`, `words` or `story` (only for difficulty 1 and 2), or several; None is all.

    Returns:
        Rows of `messages` (question and worked answer), `question`, `answer` (digits), `expression` (as Python reads
        it), `difficulty`, `language` and `form`.

    Raises:
        ArgumentError: an option is outside its range.
        DataError: no such split, or fewer than `size` questions match the options.
    """
    if split not in SPLITS:
        raise DataError(f"{_WHAT} has no split {split!r}; it has {' and '.join(SPLITS)}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentError(f"{_WHAT}: seed is {shown(seed)}; it is a whole number")
    count = checked_count(size, "size", _WHAT, 1)
    levels = _choice("difficulty", difficulty, tuple(LEVELS))
    signs = [SIGNS[name] for name in _choice("operations", operations, tuple(SIGNS))]
    forms = _choice("form", form, FORMS)
    if forms == ["story"]:
        levels = [level for level in levels if level <= _STORY]
    if not levels:
        raise ArgumentError(f"{_WHAT}: stories have difficulty 1 or {_STORY}, and difficulty is {difficulty!r}")
    drawn = _drawn(Random(seed), levels, signs, _choice("language", language, LANGUAGES), forms)
    rows: dict[str, dict[str, Any]] = {}
    missed = 0
    for expression, row in drawn:
        if split_of(expression) == split and row["question"] not in rows:
            rows[row["question"]], missed = row, 0
        else:
            missed += 1
        if len(rows) == count:
            return list(rows.values())
        if missed == _PATIENCE:
            break
    raise DataError(
        f"{_WHAT}: size is {count}, and split {split!r} has hardly more than {len(rows)} questions of this sort; ask "
        "for fewer, or for more difficulties, operations, languages or forms"
    )


def split_of(expression: Operation) -> str:
    """Return the split of a problem, independent of the order of summands and factors."""
    digest = hashlib.blake2b(key(expression).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % 10 == 0 else "train"


def conclusion(result: int, language: str, form: str) -> str:
    """Return the last line of an answer, such as `The answer is 12.`, in words or digits."""
    number = _NUMERALS[language] if form == "words" else str
    return _SO[language].format(number(result))


def _drawn(
    random: Random, levels: Sequence[int], signs: Sequence[str], languages: Sequence[str], forms: Sequence[str]
) -> Iterator[tuple[Operation, dict[str, Any]]]:
    while True:
        level = _one(random, levels)
        expression = draw(random, LEVELS[level], signs)
        language = _one(random, languages)
        form = _one(random, [form for form in forms if form != "story" or level <= _STORY])
        if form == "story" and min(value(expression.left), value(expression.right)) < 2:
            continue  # "1 boxes"
        question = (
            _story(random, expression, language) if form == "story" else _question(random, expression, language, form)
        )
        answer = _answer(expression, language, form)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield (
            expression,
            {
                "messages": messages,
                "question": question,
                "answer": str(value(expression)),
                "expression": written(expression),
                "difficulty": level,
                "language": language,
                "form": form,
            },
        )


def _question(random: Random, expression: Operation, language: str, form: str) -> str:
    return _one(random, QUESTIONS[language]).format(_text(expression, language, form))


def _story(random: Random, expression: Operation, language: str) -> str:
    story = _one(random, _STORIES[language][expression.sign])
    name = _one(random, _NAMES[language])
    return story.format(name=name, a=expression.left, b=expression.right)


def _answer(expression: Operation, language: str, form: str) -> str:
    """Return the worked answer: one operation per line, then the result."""
    lines = [f"{written(step, _bracketed)} = {result}" for step, result in steps(expression)]
    return "\n".join([*lines, conclusion(value(expression), language, form)])


def _bracketed(number: int) -> str:
    return f"({number})" if number < 0 else str(number)


def _text(expression: Operation, language: str, form: str) -> str:
    if form == "words":
        return written(expression, _NUMERALS[language], _WORDS[language], _BRACKETS[language])
    return written(expression)


def _one(random: Random, of: Sequence[T]) -> T:
    return of[random.randrange(len(of))]


def _choice(name: str, given: Any, known: Sequence[Any]) -> list[Any]:
    """Return the values of an option that takes one value, several, or None for all, unique and in a fixed order."""
    if given is None:
        return list(known)
    asked = [given] if isinstance(given, str | int) else list(given) if isinstance(given, Sequence) else []
    if not asked or any(isinstance(value, bool) or value not in known for value in asked):
        raise ArgumentError(
            f"{_WHAT}: {name} is {shown(given)}; it is one or several of {', '.join(map(str, known))}, or None for all"
        )
    return [value for value in known if value in asked]
