"""Questions about images: where the images go, and what the answer is."""

from typing import Any

import pytest

from twinkle.data_format import user_data_get
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, DataError
from twinkle.preprocessor import CLEVRProcessor, OlympiadBenchProcessor
from twinkle_data.vision import BOXED, TAGGED

CLEVR = {"image": ["a.png"], "problem": ["How many?"], "solution": ["<think>x</think><answer> 3 </answer>"]}


def test_clevr_puts_the_image_before_the_question() -> None:
    made = CLEVRProcessor()(CLEVR)
    assert [message["content"] for message in made["messages"][0]] == [TAGGED, "<image>How many?"]
    assert made["images"] == [["a.png"]]
    assert made["user_data"] == [[("ground_truth", "3")]]


def test_clevr_reads_several_images_and_bare_answers() -> None:
    made = CLEVRProcessor("")({"images": [["a.png", "b.png"]], "problem": ["?"], "solution": [" yes "]})
    assert made["messages"] == [[{"role": "user", "content": "<image><image>?"}]]
    assert user_data_get(made["user_data"][0], "ground_truth") == "yes"


def test_images_pass_through_a_data_set() -> None:
    image = pytest.importorskip("PIL.Image")
    columns = {"image": [image.new("RGB", (2, 2), color) for color in ("red", "blue")]}
    columns |= {"problem": ["a", "b"], "solution": ["1", "2"]}
    data = Dataset(DatasetMeta(data=columns))
    data.map("CLEVRProcessor", batch_size=1)
    assert [row["images"][0].getpixel((0, 0)) for row in data] == [(255, 0, 0), (0, 0, 255)]


def olympiad(**columns: Any) -> tuple[str, list[Any]]:
    made = OlympiadBenchProcessor()({"final_answer": [["1"]], **{name: [value] for name, value in columns.items()}})
    return made["messages"][0][-1]["content"], made["images"][0]


def test_olympiad_questions_have_context_unit_and_a_wish_for_a_box() -> None:
    columns = {"context": ["Given x."], "question": ["Find y."], "unit": ["cm"], "final_answer": [["3", " 4"]]}
    zh, en = (OlympiadBenchProcessor(language=language)(columns) for language in ("zh", "en"))
    assert [message["content"] for message in en["messages"][0]] == [
        BOXED["en"],
        "Given x.\n\nFind y.\n\nThe unit of the answer is cm; leave it out.",
    ]
    assert zh["messages"][0][0] == {"role": "system", "content": BOXED["zh"]}
    assert all("\\boxed{" in text for text in BOXED.values())
    assert user_data_get(en["user_data"][0], "ground_truth") == "3, 4"
    assert [message["role"] for message in OlympiadBenchProcessor("")(columns)["messages"][0]] == ["user"]
    assert OlympiadBenchProcessor("Hi")(columns)["messages"][0][0] == {"role": "system", "content": "Hi"}


def test_olympiad_images_go_where_the_text_names_them() -> None:
    text, images = olympiad(question="See <image_2>, then <image_1>.", image_1="a", image_2="b", image_3=None)
    assert text.startswith("See <image>, then <image>.")
    assert images == ["b", "a"]
    text, images = olympiad(question="See <image_2>.", image_1="a", image_2="b", image_10="c")
    assert text.startswith("<image><image>See <image>.")
    assert images == ["a", "c", "b"]


def test_olympiad_images_without_a_place_go_first() -> None:
    assert olympiad(question="Here: <image> Why?", images=["a", "b"])[0].startswith("<image>Here: <image> Why?")
    assert olympiad(question="Why?", image="a")[1] == ["a"]
    assert olympiad(question="Why?")[1] == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": "a <image_2>", "image_1": "x"}, "the text names image 2, and the row has 1 image$"),
        ({"question": "a <image>"}, "the text has 1 place, and the row has 0 images"),
        ({"text": "a"}, "needs the column 'question'"),
    ],
)
def test_images_that_are_missing_are_named(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        olympiad(**columns)


def test_answers_and_images_are_checked() -> None:
    with pytest.raises(DataError, match=r"column 'final_answer' is a list: .*; it is a text or a list of texts"):
        OlympiadBenchProcessor()({"question": ["a"], "final_answer": [[1]]})
    with pytest.raises(DataError, match="row 0 of the batch: column 'image' holds no image"):
        CLEVRProcessor()(CLEVR | {"image": [None]})
    with pytest.raises(DataError, match="needs the column 'image'; there are: problem"):
        CLEVRProcessor()({"problem": ["a"]})
    with pytest.raises(ArgumentError, match="language is 'fr'; it is 'zh' or 'en'"):
        OlympiadBenchProcessor(language="fr")
