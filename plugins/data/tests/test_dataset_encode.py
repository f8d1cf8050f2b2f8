"""Encoding and checking by a template: what is dropped, and how a bad row is named."""

import logging
from pathlib import Path

import pytest

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, ComponentTypeError, DataError, EncodeError, ModelLoadError, TrainingStateError
from twinkle.preprocessor import Preprocessor


class LengthTemplate:
    """Counts characters: token n stands for the n-th one. Text 'bad' cannot be encoded, empty text has no tokens."""

    def __init__(self, truncation_strategy: str = "raise") -> None:
        self.truncation_strategy = truncation_strategy
        self.prompts: list[bool] = []

    def batch_encode(self, trajectories, add_generation_prompt=False):
        self.prompts.append(add_generation_prompt)
        rows = Preprocessor.map_col_to_row(trajectories)
        return Preprocessor.map_row_to_col([self._encode(number, row) for number, row in enumerate(rows)])

    def batch_check(self, trajectories):
        return [row if row["messages"][0]["content"] != "bad" else None for row in trajectories]

    def _encode(self, number, row):
        text = row["messages"][0]["content"]
        if text == "bad":
            raise EncodeError(f"row {number}: the text is bad")
        if text == "bug":
            raise KeyError("missing")
        return {**row, "input_ids": list(range(len(text))), "length": len(text)}


def conversations(*texts: str) -> Dataset:
    return Dataset(DatasetMeta(data=[{"messages": [{"role": "user", "content": text}]} for text in texts]))


def test_encode_adds_tokens_and_lets_the_rest_ride_along() -> None:
    dataset = conversations("abc", "a")
    template = LengthTemplate()
    dataset.set_template(template)
    dataset.encode(add_generation_prompt=True, batch_size=1)
    assert dataset[0] == {"messages": [{"role": "user", "content": "abc"}], "input_ids": [0, 1, 2], "length": 3}
    assert dataset["length"] == [3, 1]


def test_rows_without_tokens_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    dataset = conversations("", "ab", "", "c")
    dataset.set_template(LengthTemplate())
    with caplog.at_level(logging.INFO):
        dataset.encode(batch_size=1)
    assert dataset["length"] == [2, 1]
    assert "encode dropped 2 of 4 rows" in caplog.text


def test_when_no_row_has_tokens_it_is_an_error_and_nothing_changes() -> None:
    dataset = conversations("", "")
    dataset.set_template(LengthTemplate())
    with pytest.raises(DataError, match="has no rows after encode"):
        dataset.encode()
    assert dataset.column_names == ["messages"]


@pytest.mark.parametrize("num_proc", [None, 2])
def test_a_row_that_cannot_be_encoded_is_named_by_its_place_in_the_data_set(num_proc: int | None) -> None:
    dataset = conversations(*["ok"] * 5, "bad", "ok")
    dataset.set_template(LengthTemplate())
    with pytest.raises(EncodeError, match=r"^row 5: the text is bad$"):
        dataset.encode(batch_size=2, num_proc=num_proc)
    assert dataset.column_names == ["messages"]


def test_an_unexpected_error_names_the_row_and_keeps_its_cause() -> None:
    dataset = conversations("ok", "bug")
    dataset.set_template(LengthTemplate(truncation_strategy="delete"))
    with pytest.raises(EncodeError, match="row 1: KeyError: 'missing'") as caught:
        dataset.encode()
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("strategy", ["raise", "delete"])
@pytest.mark.parametrize("made", [None, "config.json", "tokenizer.json"])
def test_a_problem_of_the_templates_model_is_no_problem_of_a_row(
    strategy: str, made: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    if made:
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}', "utf-8")
        (folder / made).write_text('{"model_type": "llama"}', "utf-8")
    dataset = conversations("ok", "fine")
    dataset.set_template("Template", model_id=str(folder), truncation_strategy=strategy)
    for action in (dataset.encode, dataset.check):
        with pytest.raises(ModelLoadError, match=r"^model '.*model'"):
            action()


def test_with_strategy_delete_a_bad_row_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    dataset = conversations("abc", "bad", "", "a")
    dataset.set_template(LengthTemplate(truncation_strategy="delete"))
    with caplog.at_level(logging.INFO):
        dataset.encode()
    assert dataset["length"] == [3, 1]
    assert "encode dropped 2 of 4 rows" in caplog.text


def test_a_whole_batch_of_bad_rows_may_go_too() -> None:
    dataset = conversations("bad", "bad", "ok")
    dataset.set_template(LengthTemplate(truncation_strategy="delete"))
    dataset.encode(batch_size=2)
    assert dataset["length"] == [2]


def test_pairs_without_tokens_on_one_side_are_dropped() -> None:
    class Pairs:
        def batch_encode(self, columns, add_generation_prompt=False):
            sides = {side: [{"input_ids": [1] * n} for n in columns[side]] for side in ("positive", "negative")}
            return sides

    dataset = Dataset(DatasetMeta(data={"positive": [1, 0, 2], "negative": [1, 1, 1]}))
    dataset.set_template(Pairs())
    dataset.encode()
    assert list(dataset) == [
        {"positive": {"input_ids": [1]}, "negative": {"input_ids": [1]}},
        {"positive": {"input_ids": [1, 1]}, "negative": {"input_ids": [1]}},
    ]


def test_a_template_may_make_more_rows() -> None:
    class Halves:
        def batch_encode(self, columns, add_generation_prompt=False):
            return {"input_ids": [[n] for n in range(2 * len(columns["messages"]))]}

    dataset = conversations("a", "b")
    dataset.set_template(Halves())
    dataset.encode()
    assert dataset["input_ids"] == [[0], [1], [2], [3]]


def test_check_keeps_what_can_be_encoded_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    dataset = conversations("bad", "a", "bad", "b")
    dataset.set_template(LengthTemplate())
    with caplog.at_level(logging.INFO):
        dataset.check(batch_size=1)
    assert [row["messages"][0]["content"] for row in dataset] == ["a", "b"]
    assert "check dropped 2 of 4 rows" in caplog.text


def test_encode_and_check_need_a_template() -> None:
    with pytest.raises(TrainingStateError, match="encode needs a template; call set_template"):
        conversations("a").encode()
    with pytest.raises(TrainingStateError, match="check needs a template"):
        conversations("a").check()


def test_what_is_no_template_is_refused() -> None:
    dataset = conversations("a")
    with pytest.raises(ComponentTypeError, match="template_func is a dict without a method batch_encode"):
        dataset.set_template({})
    with pytest.raises(ComponentTypeError):
        dataset.set_template(dict)
    with pytest.raises(ArgumentError, match=r"already an instance .*'max_length' would be ignored"):
        dataset.set_template(LengthTemplate(), max_length=3)


def test_a_template_that_returns_no_tokens_is_named() -> None:
    class Wrong:
        def batch_encode(self, columns, add_generation_prompt=False):
            return {"tokens": [[1]]}

    dataset = conversations("a")
    dataset.set_template(Wrong())
    with pytest.raises(
        EncodeError, match=r"Wrong.batch_encode returned no column input_ids for columns; it returned tokens"
    ):
        dataset.encode()
    with pytest.raises(ComponentTypeError, match="Wrong has no method batch_check"):
        dataset.check()


@pytest.mark.parametrize("method", ["encode", "check"])
def test_unknown_keywords_are_refused(method: str) -> None:
    dataset = conversations("a")
    dataset.set_template(LengthTemplate())
    for name, nearest in (("num_procs", "num_proc"), ("remove_columns", "")):
        with pytest.raises(ArgumentError, match=f"unknown argument '{name}'.*{nearest}"):
            getattr(dataset, method)(**{name: 2})


class CutTemplate:
    """Labels as many tokens as `max_length` allows; the first two are the question."""

    max_length, truncation_strategy = 3, "right"

    def batch_encode(self, trajectories, add_generation_prompt=False):
        sizes = [len(messages[0]["content"]) for messages in trajectories["messages"]]
        labels = [[*[-100, -100, *[7] * size][: self.max_length - 1], -100] for size in sizes]
        return {"input_ids": [[1] * len(row) for row in labels], "labels": labels}


@pytest.mark.parametrize("num_proc", [None, 2])
def test_rows_of_which_no_token_is_trained_are_counted(num_proc: int | None, caplog: pytest.LogCaptureFixture) -> None:
    template = CutTemplate()
    for length, told in ((5, None), (4, "2 of 5"), (3, "5 of 5")):
        template.max_length = length
        dataset = conversations("", "abc", "ab", "", "a")
        if length == 5:
            dataset.filter(lambda row: row["messages"][0]["content"] != "")
        dataset.set_template(template)
        caplog.clear()
        dataset.encode(batch_size=2, num_proc=num_proc)
        expected = sum(all(label == -100 for label in row["labels"]) for row in dataset)
        if told is None:
            assert expected == 0
            assert "no token is trained" not in caplog.text
        else:
            assert told == f"{expected} of {len(dataset)}"
            assert f"no token is trained in {told} rows" in caplog.text
            assert f"max_length {length} (truncation_strategy: right)" in caplog.text


def test_prompts_need_no_trained_token(caplog: pytest.LogCaptureFixture) -> None:
    dataset = conversations("abc")
    dataset.set_template(CutTemplate())
    dataset.encode(add_generation_prompt=True)
    assert "no token is trained" not in caplog.text
