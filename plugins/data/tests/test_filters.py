"""Filters: what stays, what goes, and that they say so with a plain True or False."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import twinkle.filter
import twinkle.preprocessor
from twinkle._registry import registry
from twinkle.dataset import Dataset, DatasetMeta, IterableDataset
from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle.filter import (
    CharacterFilter,
    ConversationFilter,
    DataFilter,
    DeduplicationFilter,
    Filter,
    LengthFilter,
    RepetitionFilter,
)
from twinkle.preprocessor import Preprocessor
from twinkle.template import Template
from twinkle.testing import tiny_model, tiny_tokenizer

TEMPLATE = Template(tokenizer=tiny_tokenizer(), max_length=40)
CUT = Template(tokenizer=tiny_tokenizer(), max_length=3, truncation_strategy="split")
LONG = "A text of some hundred characters, in which nothing is said twice; it only serves to be long enough here."


def talk(*turns: str) -> dict[str, Any]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return {"messages": [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]}


def qa(question: str, answer: str) -> dict[str, Any]:
    return talk(f"u:{question}", f"a:{answer}")


# The contract


def test_both_published_names_are_one_contract() -> None:
    assert DataFilter is Filter is twinkle.preprocessor.DataFilter is twinkle.preprocessor.Filter


@pytest.mark.parametrize("name", registry().names("filter"))
def test_a_filter_is_no_preprocessor_and_answers_true_or_false(name: str) -> None:
    found = registry().resolve(f"twinkle-data/{name}", "filter")
    assert getattr(twinkle.filter, name) is found
    assert issubclass(found, Filter)
    assert not issubclass(found, Preprocessor)
    built = found(max_length=99, unit="characters") if found is LengthFilter else found()
    assert built(qa("Hi", "Hello")) is True
    assert built.reset() is None


def test_data_sets_take_them_by_name_with_arguments() -> None:
    rows = [qa("Hi", "x" * n) for n in (1, 5, 9)]
    for way in (
        lambda data: data.filter("LengthFilter", init_args={"max_length": 7, "unit": "characters"}),
        lambda data: data.filter("LengthFilter", max_length=7, unit="characters"),
        lambda data: data.filter(LengthFilter(7, unit="characters")),
    ):
        data = Dataset(DatasetMeta(data=rows))
        way(data)
        assert list(data) == rows[:2]
    with pytest.raises(ArgumentError, match="unknown argument 'max_lenght', nearest: 'max_length'"):
        Dataset(DatasetMeta(data=rows)).filter("LengthFilter", max_lenght=3)


# Length


def test_characters_are_those_of_all_messages() -> None:
    row = talk("s:ab", "u:cd", "a:efg")
    assert LengthFilter(7, 7, "characters")(row) is True
    assert LengthFilter(6, unit="characters")(row) is False
    assert LengthFilter(min_length=8, unit="characters")(row) is False
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "image"}]}]}
    assert LengthFilter(2, 2, "characters")(parts) is True


@given(st.integers(0, 30), st.integers(0, 30), st.text("abc ", max_size=30))
@settings(max_examples=100, deadline=None)
def test_limits_are_included(least: int, more: int, text: str) -> None:
    found = LengthFilter(least + more, least, "characters", column="text") if least + more else None
    assert found is None or found({"text": text}) is (least <= len(text) <= least + more)


@pytest.mark.parametrize("limit", range(21, 27))
def test_tokens_are_those_of_the_encoded_row(limit: int) -> None:
    row = qa("Hi", "x")
    size = len(TEMPLATE.encode(row)["input_ids"])
    assert 21 < size < 26
    assert LengthFilter(limit, template=TEMPLATE)(row) is (size <= limit)
    assert LengthFilter(limit)(TEMPLATE.encode(row)) is (size <= limit)


def test_a_model_counts_what_its_own_template_would_not_take(tmp_path: Any) -> None:
    folder = str(tiny_model(tmp_path / "tiny"))
    rows = [qa("Hi", "x" * n) for n in (1, 200)]
    data = Dataset(DatasetMeta(data=rows))
    data.filter("LengthFilter", max_length=100, model_id=folder)
    assert list(data) == rows[:1]
    for template in ({"template": "Template", "model_id": folder}, {"template": CUT}):
        assert LengthFilter(10**6, 10_000, **template)(qa("Hi", "x" * 10_000)) is True
        assert LengthFilter(10_000, **template)(qa("Hi", "x" * 10_000)) is False


def test_tokens_of_a_column_are_those_of_its_text() -> None:
    assert LengthFilter(3, 3, column="text", template=TEMPLATE)({"text": "abc"}) is True
    assert LengthFilter(2, column="text", template=TEMPLATE)({"text": "abc"}) is False


def test_both_sides_of_a_pair_must_fit() -> None:
    pair = {"positive": qa("Hi", "xx"), "negative": qa("Hi", "xxxx")}
    assert LengthFilter(6, 4, "characters")(pair) is True
    assert LengthFilter(5, unit="characters")(pair) is False
    assert LengthFilter(9, 5, "characters")(pair) is False
    lengths = [side["length"] for side in (TEMPLATE.encode(pair)[name] for name in pair)]
    assert LengthFilter(max(lengths), min(lengths))(TEMPLATE.encode(pair)) is True
    assert LengthFilter(max(lengths) - 1, template=TEMPLATE)(pair) is False


def test_it_works_in_several_processes() -> None:
    found = pickle.loads(pickle.dumps(LengthFilter(24, template=TEMPLATE)))
    assert found(qa("Hi", "x")) is LengthFilter(24, template=TEMPLATE)(qa("Hi", "x"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LengthFilter(), "needs max_length or min_length"),
        (lambda: LengthFilter(3, 4), "max_length 3 is below min_length 4"),
        (lambda: LengthFilter(-1), "max_length is -1; it is a whole number from 0"),
        (lambda: LengthFilter(True), "max_length is True"),
        (lambda: LengthFilter(5, unit="words"), "unit is 'words'; it is 'tokens' or 'characters'"),
        (lambda: LengthFilter(5, unit="characters", model_id="x"), "characters are counted without a model"),
        (lambda: LengthFilter(5, template=TEMPLATE, model_id="x"), "template is an instance already"),
        (lambda: LengthFilter(5)(qa("a", "b")), "the rows are not encoded: give model_id= or template="),
    ],
)
def test_arguments_of_length_are_checked(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_rows_without_a_text_are_named() -> None:
    with pytest.raises(DataError, match=r"LengthFilter finds no conversation in a row \(it has: text\); name a column"):
        LengthFilter(5, unit="characters")({"text": "a"})
    with pytest.raises(DataError, match=r"no column 'txt' \(nearest: 'text'\); it has: text"):
        LengthFilter(5, unit="characters", column="txt")({"text": "a"})
    with pytest.raises(DataError, match="column 'n' of a row is 3; it must be text"):
        RepetitionFilter(column="n")({"n": 3})
    with pytest.raises(DataError, match="'messages' of a row is 'a'; it is a list of messages"):
        ConversationFilter()({"messages": "a"})


# Duplicates


def kept(found: Filter, rows: list[dict[str, Any]]) -> list[int]:
    return [number for number, row in enumerate(rows) if found(row)]


@given(st.lists(st.sampled_from(["a", "b", "ab", "c c", ""]), max_size=12))
@settings(max_examples=100, deadline=None)
def test_the_first_of_equal_texts_stays(texts: list[str]) -> None:
    first = [number for number, text in enumerate(texts) if text not in texts[:number]]
    assert kept(DeduplicationFilter(column="text"), [{"text": text} for text in texts]) == first


def test_messages_are_compared_with_roles_and_borders() -> None:
    rows = [qa("ab", "c"), qa("a", "bc"), qa("ab", "c"), talk("u:ab", "u:c"), talk("u:ab"), talk("u:ab", "a:c", "u:")]
    assert kept(DeduplicationFilter(), rows) == [0, 1, 3, 4, 5]
    assert kept(DeduplicationFilter(roles="user"), rows) == [0, 1, 3, 5]
    calls = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name}}]} for name in "fgf"]
    assert kept(DeduplicationFilter(), [{"messages": [call]} for call in calls]) == [0, 1]
    pairs = [{"chosen": qa("a", "b")["messages"], "rejected": qa("a", c)["messages"]} for c in "xyx"]
    assert kept(DeduplicationFilter(), pairs) == [0, 1]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Hello, world!", "hello   world", True),
        ("ＡＢＣ１", "abc1", True),
        ("你好，世界！", "你好 世界", True),
        ("It is 1.5", "It is 15", False),
        ("5 - 3", "53", False),
        ("x + y", "x - y", False),
        ("STRASSE", "straße", True),
        ("a b", "ab", False),
    ],
)
def test_normalized_texts_forgive_case_space_and_marks(one: str, other: str, same: bool) -> None:
    rows = [{"text": one}, {"text": other}]
    assert kept(DeduplicationFilter("normalized", column="text"), rows) == ([0] if same else [0, 1])
    assert kept(DeduplicationFilter("exact", column="text"), rows) == [0, 1]


def test_a_data_set_of_repetitions_is_thinned_and_each_pass_begins_anew() -> None:
    rows = [{"text": text} for text in "abacb"]
    found = DeduplicationFilter(column="text")
    for _ in range(2):
        data = Dataset(DatasetMeta(data=rows))
        data.filter(found, batch_size=2)
        assert [row["text"] for row in data] == ["a", "b", "c"]
    assert kept(found, rows) == []
    found.reset()
    assert kept(found, rows) == [0, 1, 3]


def test_a_stream_is_thinned_in_every_epoch() -> None:
    stream = IterableDataset(DatasetMeta(data=[{"text": text} for text in "abacb" * 40]))
    stream.filter("DeduplicationFilter", column="text")
    for _ in range(2):
        assert [row["text"] for row in stream] == ["a", "b", "c"]


def test_several_processes_are_refused_for_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    found = DeduplicationFilter(column="text")
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(Unsupported, match=r"compares each row with all before it, .* leave num_proc out"):
        found({"text": "a"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"match": "fuzzy"}, "match is 'fuzzy'; it is 'exact' or 'normalized'"),
        ({"column": "a", "roles": "user"}, "a column has no roles"),
        ({"roles": ["usr"]}, "roles has 'usr'; a role is one of system, user, assistant, tool"),
    ],
)
def test_arguments_of_duplicates_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DeduplicationFilter(**arguments)


# Repetition


@given(st.text("ab", max_size=40), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_repetition_is_the_share_of_runs_seen_before(text: str, size: int) -> None:
    runs = [text[start : start + size] for start in range(len(text) - size + 1)]
    again = sum(run in runs[:place] for place, run in enumerate(runs))
    assert RepetitionFilter(size=size).repetition(text) == pytest.approx(again / len(runs) if runs else 0.0, abs=1e-12)


def test_loops_go_and_prose_stays() -> None:
    assert RepetitionFilter()(qa("?", LONG)) is True
    assert RepetitionFilter()(qa("?", "I think so. " * 20)) is False
    assert RepetitionFilter()(qa("?", "我想是的。" * 30)) is False
    assert RepetitionFilter()(qa("ha" * 100, "Funny.")) is True
    assert RepetitionFilter(roles=None)(qa("ha" * 100, "Funny.")) is False
    assert RepetitionFilter()(qa("?", "ha" * 20)) is True  # too short to say
    assert RepetitionFilter(min_length=0)(qa("?", "ha" * 20)) is False
    assert RepetitionFilter(column="text")({"text": None}) is True


@pytest.mark.parametrize("arguments", [{"max_share": 1.5}, {"max_share": "x"}, {"size": 0}, {"min_length": -1}])
def test_arguments_of_repetition_are_checked(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"RepetitionFilter: {next(iter(arguments))} is"):
        RepetitionFilter(**arguments)


# Characters


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        (LONG, True),
        ("这是一个完全正常的句子。", True),
        ("हिन्दी में एक वाक्य, اور اردو میں بھی۔", True),
        ("$\\int_0^1 x^2\\,dx = \\frac{1}{3}$ costs 5 €", True),
        ("def f(x):\n\treturn x | 1\r\n", True),
        ("Good \N{WHITE SMILING FACE}", True),
        ("\N{SNOWMAN}\N{SNOWMAN}a", False),
        ("broken \N{REPLACEMENT CHARACTER} text", False),
        ("\x00\x01\x02ab", False),
        ("", True),
    ],
)
def test_words_of_any_script_stay_and_symbols_go(text: str, stays: bool) -> None:
    assert CharacterFilter()(qa("?", text)) is stays


def test_limits_of_characters_are_choices() -> None:
    broken = qa("?", "broken \N{REPLACEMENT CHARACTER} text")
    assert CharacterFilter(allow_broken=True)(broken) is True
    assert CharacterFilter(roles="user")(broken) is True
    assert CharacterFilter(0.5, column="t")({"t": "a\N{SNOWMAN}"}) is True
    with pytest.raises(ArgumentError, match="allow_broken is 'no'; it is True or False"):
        CharacterFilter(allow_broken="no")


# Conversations


@pytest.mark.parametrize(
    ("turns", "stays"),
    [
        (("u:a", "a:b"), True),
        (("s:x", "u:a", "a:b", "u:c", "a:d"), True),
        (("u:a", "a:b", "t:c", "t:c", "a:d"), True),
        (("u:a", "a: "), False),
        (("u:a", "a:b", "u:c"), False),
        (("a:b",), False),
        (("u:a", "u:b", "a:c"), False),
        (("u:a", "s:x", "a:b"), False),
        (("u:a", "a:b", "a:c"), False),
        (("u:a", "t:c", "a:d"), False),
        ((), False),
    ],
)
def test_turns_say_something_and_come_in_order(turns: tuple[str, ...], stays: bool) -> None:
    assert ConversationFilter()(talk(*turns)) is stays
    assert ConversationFilter(any_order=True)(talk(*turns)) is (turns != () and "a: " not in turns)


def test_calls_reasoning_and_images_say_something() -> None:
    for silent in (
        {"tool_calls": [{"function": {"name": "f"}}]},
        {"reasoning_content": "hm"},
        {"content": [{"type": "image"}]},
    ):
        row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", **silent}]}
        assert ConversationFilter()(row) is True
    empty = {"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}, {"role": "assistant"}]}
    assert ConversationFilter()(empty) is False
    assert ConversationFilter(allow_empty=True)(empty) is True


def test_rounds_are_the_assistants_turns() -> None:
    row = talk("u:a", "a:b", "u:c", "a:d")
    assert [ConversationFilter(min_rounds=n)(row) for n in (2, 3)] == [True, False]
    assert [ConversationFilter(max_rounds=n)(row) for n in (2, 1)] == [True, False]
    assert ConversationFilter()({"positive": row, "negative": talk("u:a")}) is False
