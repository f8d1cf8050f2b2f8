"""Questions about images: CLEVR and OlympiadBench."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from twinkle.errors import ArgumentError, DataError
from twinkle.preprocessor import Preprocessor
from twinkle_data.rows import Columns, optional_text, pairs, prompt, rows_with, shown, system_text, text_of

PLACEHOLDER = "<image>"
TAGGED = "Think first, inside <think> and </think>. Then give the answer alone, inside <answer> and </answer>."
BOXED = {
    "zh": "请逐步推理，把最终答案写在 \\boxed{} 中；答案不止一个时，用逗号分开。",
    "en": "Reason step by step, and write the final answer as \\boxed{...}; separate several answers by commas.",
}
UNIT = {"zh": "答案的单位是 {}，不要写出单位。", "en": "The unit of the answer is {}; leave it out."}

_TAGGED = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
_IMAGE = re.compile(r"image(?:_?\d+)?")
_NUMBERED = re.compile(r"<image_?(\d+)>")


class CLEVRProcessor(Preprocessor):
    """Turns `image`, `problem` and `solution` into a prompt with an image; `ground_truth` is the answer.

    The answer is the text between `<answer>` and `</answer>` in the solution, or the whole solution.

    Args:
        system: the system message; by default it requests these tags; "" means none.

    Returned columns: `messages`, `images` (a list with one), `user_data`.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system_text(system, type(self).__name__, TAGGED)

    def __call__(self, rows: Columns) -> dict[str, list[Any]]:
        """Return the prompts.

        Raises:
            DataError: a column is missing, a value is no text, or a row has no image; names column and row.
        """
        owner = type(self).__name__
        key = "images" if "images" in rows and "image" not in rows else "image"
        columns: dict[str, list[Any]] = {"messages": [], "images": [], "user_data": []}
        for number, row in enumerate(rows_with(rows, (key, "problem", "solution"), owner)):
            images = row[key] if isinstance(row[key], list | tuple) else [row[key]]
            if not images or any(image is None for image in images):
                raise DataError(f"{owner}, row {number} of the batch: column {key!r} holds no image")
            question = PLACEHOLDER * len(images) + text_of(row, "problem", number, owner)
            solution = text_of(row, "solution", number, owner)
            answer = _TAGGED.search(solution)
            columns["messages"].append(prompt(question, self.system))
            columns["images"].append(list(images))
            columns["user_data"].append(pairs(ground_truth=answer[1] if answer else solution.strip()))
        return columns


class OlympiadBenchProcessor(Preprocessor):
    """Turns `question` and `final_answer` into a prompt; `ground_truth` is the final answer, as one text.

    A column `context` stands before the question, a column `unit` after it. Images are taken from `images`, or from
    `image`, `image_1`, `image_2`, ... in the order of their numbers. An image goes where the text says `<image_1>`, or
    where it has a plain `<image>`; images without a place go first.

    Args:
        system: the system message; by default it requests the answer in a box; "" means none.
        language: of the default system message and of the sentence about the unit: `zh` or `en`.

    Returned columns: `messages`, `images` (a list, empty for questions of text alone), `user_data`.
    """

    def __init__(self, system: str | None = None, language: Literal["zh", "en"] = "zh") -> None:
        owner = type(self).__name__
        if language not in BOXED:
            raise ArgumentError(f"{owner}: language is {shown(language)}; it is 'zh' or 'en'")
        self.language = language
        self.system = system_text(system, owner, BOXED[language])

    def __call__(self, rows: Columns) -> dict[str, list[Any]]:
        """Return the prompts.

        Raises:
            DataError: a column is missing, a value is no text, or the text has more places than there are images;
                names column and row.
        """
        owner = type(self).__name__
        columns: dict[str, list[Any]] = {"messages": [], "images": [], "user_data": []}
        for number, row in enumerate(rows_with(rows, ("question", "final_answer"), owner)):
            where = f"{owner}, row {number} of the batch"
            text, images = _placed(self._question(row, number, owner), _images(row), where)
            columns["messages"].append(prompt(text, self.system))
            columns["images"].append(images)
            columns["user_data"].append(pairs(ground_truth=_answer(row, number, owner)))
        return columns

    def _question(self, row: Mapping[str, Any], number: int, owner: str) -> str:
        unit = optional_text(row, "unit", number, owner)
        parts = [
            optional_text(row, "context", number, owner),
            text_of(row, "question", number, owner),
            UNIT[self.language].format(unit) if unit else "",
        ]
        return "\n\n".join(part for part in parts if part)


def _images(row: Mapping[str, Any]) -> dict[int, Any]:
    """Return the images of a row by their numbers, from 1."""
    if row.get("images") is not None:
        return dict(enumerate(row["images"], 1))
    names = [name for name in row if _IMAGE.fullmatch(name) and row[name] is not None]
    return dict(sorted((int(re.sub(r"\D", "", name) or 1), row[name]) for name in names))


def _placed(text: str, images: Mapping[int, Any], where: str) -> tuple[str, list[Any]]:
    """Return the text with one placeholder for each image, and the images in the order of their placeholders."""
    numbers = [int(number) for number in _NUMBERED.findall(text)]
    if missing := [number for number in numbers if number not in images]:
        raise DataError(f"{where}: the text names image {missing[0]}, and the row has {_count(len(images), 'image')}")
    text = _NUMBERED.sub(PLACEHOLDER, text)
    ordered = [image for number, image in images.items() if number not in numbers]
    ordered += [images[number] for number in numbers]
    places = text.count(PLACEHOLDER)
    if places > len(ordered):
        raise DataError(
            f"{where}: the text has {_count(places, 'place')}, and the row has {_count(len(images), 'image')}"
        )
    return PLACEHOLDER * (len(ordered) - places) + text, ordered


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def _answer(row: Mapping[str, Any], number: int, owner: str) -> str:
    value = row["final_answer"]
    parts = value if isinstance(value, list | tuple) else [value]
    if not parts or not all(isinstance(part, str) and part.strip() for part in parts):
        raise DataError(
            f"{owner}, row {number} of the batch: column 'final_answer' is {shown(value)}; it is a text or a list of "
            "texts"
        )
    return ", ".join(part.strip() for part in parts)
