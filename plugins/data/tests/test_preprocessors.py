"""Instructions and problems: raw columns become conversations and prompts, with `user_data` as published."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import twinkle.preprocessor
import twinkle.preprocessor.llm
from twinkle._registry import registry
from twinkle.data_format import user_data_get
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, DataError
from twinkle.preprocessor import (
    AlpacaProcessor,
    CLEVRProcessor,
    CompetitionMathGRPOProcessor,
    CompetitionMathProcessor,
    CountdownProcessor,
    EmojiDPOProcessor,
    GSM8KProcessor,
    OlympiadBenchProcessor,
    Preprocessor,
    QuestionProcessor,
    SelfCognitionProcessor,
)
from twinkle_data.math_problems import BOXED, EQUATION, ONLY_BOXED, THINKER

MATH = {"problem": ["1+1?", "2+2?"], "solution": ["It is \\boxed{2}.", "It is \\boxed{4}."]}
GSM8K = {"question": ["How many?"], "answer": ["1,000 + 5 = 1,005\n#### 1,005"]}
COUNTDOWN = {"nums": [[3, 4, 5]], "target": [17]}
PUBLISHED: dict[type[Preprocessor], dict[str, Any]] = {
    SelfCognitionProcessor: {"model_name": None, "model_author": None},
    AlpacaProcessor: {},
    CompetitionMathProcessor: {},
    CompetitionMathGRPOProcessor: {},
    CountdownProcessor: {},
    GSM8KProcessor: {"system": None, "add_assistant": False},
    EmojiDPOProcessor: {
        "system": None,
        "chosen_key": "answer_zh",
        "rejected_key": "answer_en",
        "prompt_key": "prompt",
    },
    CLEVRProcessor: {"system": None},
    OlympiadBenchProcessor: {"system": None, "language": "zh"},
}
WITH_TRUTH: list[tuple[Callable[[], Preprocessor], dict[str, list[Any]], dict[str, Any]]] = [
    (CompetitionMathGRPOProcessor, MATH, {"solution": "It is \\boxed{2}."}),
    (GSM8KProcessor, GSM8K, {"ground_truth": 1005}),
    (CountdownProcessor, COUNTDOWN, {"target": 17, "nums": [3, 4, 5]}),
    (QuestionProcessor, {"question": ["1+1"], "answer": ["[0, 1]"]}, {"ground_truth": "[0, 1]"}),
    (QuestionProcessor, {"question": ["1+1"], "answer": [2]}, {"ground_truth": 2}),
    (
        CLEVRProcessor,
        {"image": ["a.png"], "problem": ["?"], "solution": ["<answer> 3 </answer>"]},
        {"ground_truth": 3},
    ),
    (OlympiadBenchProcessor, {"question": ["?"], "final_answer": [["$7$"]]}, {"ground_truth": "$7$"}),
]


def said(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


@pytest.mark.parametrize(
    ("processor", "arguments"), PUBLISHED.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_the_published_constructors_are_there(processor: type[Preprocessor], arguments: dict[str, Any]) -> None:
    taken = {name: found.default for name, found in inspect.signature(processor).parameters.items()}
    assert list(taken)[: len(arguments)] == list(arguments)
    assert arguments.items() <= taken.items()
    assert inspect.Parameter.empty not in taken.values()
    assert getattr(twinkle.preprocessor.llm, processor.__name__) is processor
    assert registry().resolve(processor.__name__, "preprocessor") is processor


# Conversations


def test_alpaca_puts_the_input_below_the_instruction() -> None:
    columns = {"instruction": ["Add.", "Greet."], "input": ["1 and 2", ""], "output": ["3", "Hi"], "id": [1, 2]}
    made = AlpacaProcessor()(columns)
    assert set(made) == {"messages"}
    assert [said(messages) for messages in made["messages"]] == [
        [("user", "Add.\n1 and 2"), ("assistant", "3")],
        [("user", "Greet."), ("assistant", "Hi")],
    ]
    assert AlpacaProcessor()({"instruction": ["a"], "output": ["b"]})["messages"] == [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ]


def test_alpaca_reads_system_and_history() -> None:
    columns = {
        "instruction": ["third"], "input": [None], "output": ["c"], "system": ["Be brief."],
        "history": [[["first", "a"], ("second", "b")]],
    }  # fmt: skip
    assert [text for _, text in said(AlpacaProcessor()(columns)["messages"][0])] == [
        "Be brief.", "first", "a", "second", "b", "third", "c",
    ]  # fmt: skip
    with pytest.raises(DataError, match="row 0 of the batch: column 'history' holds 'x'; it is a list of"):
        AlpacaProcessor()(columns | {"history": ["xy"]})


def test_competition_math_is_a_question_and_its_solution() -> None:
    assert said(CompetitionMathProcessor()(MATH)["messages"][1]) == [
        ("user", "2+2?"),
        ("assistant", "It is \\boxed{4}."),
    ]


def test_prompts_end_with_the_user_and_say_how_to_answer() -> None:
    assert said(CompetitionMathGRPOProcessor()(MATH)["messages"][0]) == [("system", ONLY_BOXED), ("user", "1+1?")]
    assert said(CompetitionMathGRPOProcessor(system="")(MATH)["messages"][0]) == [("user", "1+1?")]
    assert said(GSM8KProcessor()(GSM8K)["messages"][0]) == [("system", BOXED), ("user", "How many?")]
    assert said(GSM8KProcessor("Be brief.")(GSM8K)["messages"][0])[0] == ("system", "Be brief.")
    system, question = CountdownProcessor()(COUNTDOWN)["messages"][0]
    assert system["content"] == THINKER
    assert question["content"] == EQUATION.format(target=17, nums="[3, 4, 5]")
    assert "<answer> (1 + 2) / 3 * 4 = 4 </answer>" in question["content"]
    assert "\\boxed{" in BOXED
    assert "\\boxed{" in ONLY_BOXED
    assert CountdownProcessor()({"nums": [[3, 4, 5]], "response": [17]}) == CountdownProcessor()(COUNTDOWN)


def test_the_worked_answer_follows_on_demand() -> None:
    assert said(GSM8KProcessor(add_assistant=True)(GSM8K)["messages"][0])[-1] == ("assistant", GSM8K["answer"][0])
    answers = QuestionProcessor("q", "a", add_assistant=True)({"q": ["1+1"], "a": [2]})
    assert said(answers["messages"][0]) == [("user", "1+1"), ("assistant", "2")]


@pytest.mark.parametrize(
    ("answer", "number"),
    [("#### 5", "5"), ("a #### 1\nb\n####  -1,234.5 \n", "-1234.5"), ("x ####2/3", "2/3")],
)
def test_gsm8k_takes_the_number_at_the_end(answer: str, number: str) -> None:
    made = GSM8KProcessor()({"question": ["q"], "answer": [answer]})
    assert made["user_data"] == [[("ground_truth", number)]]


# user_data


def test_values_are_stored_as_a_published_reward_compares_them() -> None:
    assert GSM8KProcessor()(GSM8K)["user_data"] == [[("ground_truth", "1005")]]
    assert CompetitionMathGRPOProcessor()(MATH)["user_data"][0] == [("solution", "It is \\boxed{2}.")]
    assert CountdownProcessor()(COUNTDOWN)["user_data"] == [[{"target": 17, "nums": [3, 4, 5]}]]
    data = Dataset(DatasetMeta(data=GSM8K))
    data.map(GSM8KProcessor())
    rewards = [float(value == "1005") for key, value in data[0]["user_data"] if key == "ground_truth"]
    assert rewards == [1.0]


@pytest.mark.parametrize(("processor", "columns", "truth"), WITH_TRUTH)
def test_user_data_can_be_read_also_after_a_data_set(
    processor: Callable[[], Preprocessor], columns: dict[str, list[Any]], truth: dict[str, Any]
) -> None:
    items = processor()(columns)["user_data"][0]
    data = Dataset(DatasetMeta(data=columns))
    data.map(processor())
    for found in (items, data[0]["user_data"]):
        assert {key: user_data_get(found, key) for key in truth} == truth


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip), min_size=1, max_size=5)
)
@settings(max_examples=50, deadline=None)
def test_any_text_comes_back_as_it_was(texts: list[str]) -> None:
    made = CompetitionMathGRPOProcessor()({"problem": texts, "solution": texts[::-1]})
    for items, text in zip(made["user_data"], texts[::-1], strict=True):
        found = user_data_get(items, "solution")
        assert found == text or items == [("solution", text)]
        assert isinstance(found, str | int | float)
    assert [messages[-1]["content"] for messages in made["messages"]] == texts


# Batches


@pytest.mark.parametrize("batch_size", [1, 2, 1000])
def test_the_batch_size_changes_nothing(batch_size: int) -> None:
    columns = {"question": [f"q{n}" for n in range(5)], "answer": [f"#### {n}" for n in range(5)], "other": [0] * 5}
    data = Dataset(DatasetMeta(data=columns))
    data.map("GSM8KProcessor", batch_size=batch_size, system="")
    assert [row["messages"][0]["content"] for row in data] == columns["question"]
    assert data.column_names == ["question", "answer", "other", "messages", "user_data"]


def test_other_columns_stay_unless_they_are_removed() -> None:
    data = Dataset(DatasetMeta(data=GSM8K | {"id": [7]}))
    data.map("GSM8KProcessor", remove_columns=["question", "answer"])
    assert data[0]["id"] == 7
    assert data.column_names == ["id", "messages", "user_data"]


@pytest.mark.parametrize(
    ("processor", "columns"),
    [(type(made()), {name: [] for name in columns}) for made, columns, _ in WITH_TRUTH]
    + [
        (AlpacaProcessor, {"instruction": [], "output": []}),
        (CompetitionMathProcessor, {"problem": [], "solution": []}),
    ],
)
def test_no_rows_give_no_rows(processor: type[Preprocessor], columns: dict[str, list[Any]]) -> None:
    made = processor()(columns)
    assert "messages" in made
    assert all(values == [] for values in made.values())


# Errors


@pytest.mark.parametrize(
    ("processor", "columns", "message"),
    [
        (
            AlpacaProcessor,
            {"instructions": ["a"], "output": ["b"]},
            r"needs the column 'instruction' \(nearest: 'instructions'\); there are: instructions, output",
        ),
        (CompetitionMathProcessor, {"text": ["a"]}, "needs the column 'problem'; there are: text"),
        (GSM8KProcessor, {}, "needs the column 'question'; there are: no columns"),
        (QuestionProcessor, {"question": ["a"]}, "needs the column 'answer'"),
        (
            CompetitionMathProcessor,
            MATH | {"solution": ["x", None]},
            "CompetitionMathProcessor, row 1 of the batch: column 'solution' is None; it must be text",
        ),
        (AlpacaProcessor, {"instruction": [" "], "output": ["b"]}, "column 'instruction' is ' '; it must be text"),
        (
            AlpacaProcessor,
            {"instruction": ["a"], "input": [5], "output": ["b"]},
            "column 'input' is 5; it must be text",
        ),
        (GSM8KProcessor, {"question": ["a"], "answer": ["42"]}, "row 0 .*'answer' does not end in '#### number': '42'"),
        (GSM8KProcessor, {"question": ["a"], "answer": ["#### 4\nso"]}, "does not end in '#### number'"),
        (
            CountdownProcessor,
            {"nums": [[1, 2.5]], "target": [3]},
            "column 'nums' is a list: .*; it is a list of integers",
        ),
        (CountdownProcessor, {"nums": [[1]], "target": ["3"]}, "column 'target' is '3'; it is an integer"),
        (QuestionProcessor, {"question": ["a"], "answer": [True]}, "column 'answer' is True; it must be text"),
    ],
)
def test_what_is_missing_is_named(processor: type[Preprocessor], columns: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        processor()(columns)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GSM8KProcessor(system=3), "GSM8KProcessor: system is 3; it is a text"),
        (lambda: GSM8KProcessor(add_assistant="no"), "add_assistant is 'no'; it is True or False"),
        (lambda: QuestionProcessor(question_key=""), "question_key is ''; it is the name of a column"),
        (lambda: registry().build("AlpacaProcessor", "preprocessor", system="x"), "unknown argument 'system'"),
    ],
)
def test_arguments_are_checked(make: Callable[[], Preprocessor], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
