"""Data sets: map, filter, mixing, indexing; and what they refuse."""

import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from twinkle.dataset import Dataset, DatasetLike, DatasetMeta
from twinkle.errors import ArgumentError, ComponentTypeError, DataError, TrainingStateError
from twinkle.preprocessor import Preprocessor


def rows(count: int) -> list[dict[str, object]]:
    return [{"i": index, "text": f"row {index}"} for index in range(count)]


def numbers(count: int = 10, **kwargs: object) -> Dataset:
    return Dataset(DatasetMeta(data=rows(count), **kwargs))


class AddConstant(Preprocessor):
    def __init__(self, constant: int, batch_size: int = 0) -> None:
        self.constant, self.batch_size = constant, batch_size

    def __call__(self, rows):
        return {"i": [value + self.constant for value in rows["i"]], "own": [self.batch_size] * len(rows["i"])}


def test_a_data_set_has_a_length_and_rows() -> None:
    dataset = numbers(3)
    assert isinstance(dataset, DatasetLike)
    assert len(dataset) == 3
    assert dataset[0] == {"i": 0, "text": "row 0"}
    assert dataset[-1] == {"i": 2, "text": "row 2"}
    assert dataset[1:] == {"i": [1, 2], "text": ["row 1", "row 2"]} == dataset[[1, 2]]
    assert dataset["i"] == [0, 1, 2]
    assert list(dataset) == rows(3)
    with pytest.raises(IndexError):
        dataset[3]


def test_map_keeps_the_columns_that_the_function_does_not_return() -> None:
    dataset = numbers(2)
    dataset.map(lambda columns: {"i": [-value for value in columns["i"]], "new": [True, False]})
    assert list(dataset) == [{"i": 0, "text": "row 0", "new": True}, {"i": -1, "text": "row 1", "new": False}]


def test_columns_stay_as_in_the_library_datasets() -> None:
    ours, theirs = numbers(5), datasets.Dataset.from_list(rows(5))

    def halved(columns):
        return {"half": [value / 2 for value in columns["i"]], "i": [-value for value in columns["i"]]}

    ours.map(halved, remove_columns=["text"], batch_size=2)
    assert list(ours) == theirs.map(halved, batched=True, remove_columns=["text"], batch_size=2).to_list()


def test_map_gets_columns_and_may_change_their_names_and_their_number_of_rows() -> None:
    dataset = numbers(5)
    seen = []

    def twice_the_even(columns):
        seen.append({name: type(values) for name, values in columns.items()})
        return {"even": [value for value in columns["i"] if value % 2 == 0 for _ in range(2)]}

    dataset.map(twice_the_even, batch_size=2, remove_columns=dataset.column_names)
    assert seen == [{"i": list, "text": list}] * 3
    assert dataset["even"] == [0, 0, 2, 2, 4, 4]
    assert dataset.column_names == ["even"]


def test_remove_columns_removes_columns_of_the_input() -> None:
    dataset = numbers(3)
    dataset.map(lambda columns: {"double": [2 * value for value in columns["i"]]}, remove_columns="i")
    assert dataset[2] == {"text": "row 2", "double": 4}
    with pytest.raises(DataError, match="turned 3 rows into 1, so the columns text, double cannot stay"):
        dataset.map(lambda columns: {"one": [1]}, remove_columns=[])
    with pytest.raises(ArgumentError, match="no column 'txt', nearest: 'text'"):
        dataset.map(lambda columns: columns, remove_columns=["txt"])


def test_batches_may_differ_in_types_and_columns() -> None:
    dataset = numbers(4)

    def varied(columns):
        value = columns["i"][0]
        kinds = [{"n": [None]}, {"n": [1], "list": [[]]}, {"n": [2.5], "list": [[7]]}, {"n": [4], "more": [{"a": "x"}]}]
        return kinds[value]

    dataset.map(varied, batch_size=1)
    assert dataset["n"] == [None, 1.0, 2.5, 4.0]
    assert dataset["list"] == [None, [], [7], None]
    assert dataset["more"] == [None, None, None, {"a": "x"}]


def test_map_in_two_processes_gives_the_same_rows() -> None:
    one, two = numbers(50), numbers(50)
    one.map(AddConstant(7), batch_size=8)
    two.map(AddConstant(7), batch_size=8, num_proc=2)
    assert one[:] == two[:]
    assert one[49]["i"] == 56


def test_constructor_arguments_come_by_init_args_or_by_keyword() -> None:
    by_args, by_keyword = numbers(2), numbers(2)
    by_args.map(AddConstant, init_args={"constant": 5, "batch_size": 3})
    by_keyword.map(AddConstant, constant=5, batch_size=3)  # batch_size is map's own
    assert by_args["i"] == by_keyword["i"] == [5, 6]
    assert by_args["own"] == [3, 3]
    assert by_keyword["own"] == [0, 0]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"constnt": 5}, "unknown argument 'constnt', nearest: 'constant'"),
        ({"constant": 5, "num_procs": 2}, "unknown argument 'num_procs', nearest: 'num_proc'"),
        ({"constant": 5, "init_args": {"constant": 6}}, "'constant' is given twice"),
        ({"constant": 5, "batched": False}, "always gets a batch of columns"),
        ({"constant": 5, "features": None}, "unknown argument 'features'"),
        ({}, "missing argument 'constant'"),
    ],
)
def test_map_refuses_what_nobody_reads(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        numbers().map(AddConstant, **kwargs)


def test_batched_is_accepted_since_it_is_what_happens() -> None:
    dataset = numbers(2)
    dataset.map(AddConstant(1), batched=True, load_from_cache_file=False, desc="adding")
    assert dataset["i"] == [1, 2]


def test_a_function_takes_no_constructor_arguments_but_fn_kwargs() -> None:
    dataset = numbers(2)
    with pytest.raises(ArgumentError, match="not a class"):
        dataset.map(lambda columns: columns, init_args={"a": 1})
    dataset.map(lambda columns, by: {"i": [by * v for v in columns["i"]]}, fn_kwargs={"by": 3})
    assert dataset["i"] == [0, 3]
    with pytest.raises(ComponentTypeError, match="preprocessor is a int"):
        dataset.map(3)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned nothing; it gets columns"),
        ([{"i": 1}], "returned a list; it gets columns"),
        ({"i": 1}, "returned a int for column 'i'"),
        ({"i": "text"}, "returned a str for column 'i'"),
        ({}, "returned no columns"),
        ({"i": [1], "j": [1, 2]}, "columns have different lengths: {'i': 1, 'j': 2}"),
        ({"i": [1, "a"]}, r"column 'i' mixes types \(int, str\)"),
        ({"i": []}, r"has no rows after map\(give\)"),
    ],
)
def test_a_wrong_result_of_map_is_explained_and_changes_nothing(result: object, message: str) -> None:
    def give(columns):
        return result

    dataset = numbers(3)
    with pytest.raises(DataError, match=message):
        dataset.map(give, remove_columns=dataset.column_names)
    assert list(dataset) == rows(3)


def test_columns_whose_types_do_not_fit_over_batches_are_named() -> None:
    with pytest.raises(DataError, match=r"map.*do not fit together.*Field x"):
        numbers(2).map(lambda columns: {"x": ["a" if columns["i"][0] else 1]}, batch_size=1)


def test_filter_sees_one_row() -> None:
    dataset = numbers(10)
    dataset.filter(lambda row: row["text"] == "row 3" or row["i"] > 7)
    assert dataset["i"] == [3, 8, 9]
    dataset.map(lambda columns: {"i": columns["i"]})
    assert dataset["i"] == [3, 8, 9]
    with pytest.raises(DataError, match="no rows after filter"):
        dataset.filter(lambda row: False)
    with pytest.raises(ArgumentError, match="unknown argument 'nun_proc', nearest: 'num_proc'"):
        dataset.filter(lambda row: True, nun_proc=2)
    assert len(dataset) == 3


# Rows come back as they were put in


def test_dicts_keep_their_own_keys_and_values_of_any_type() -> None:
    given = [
        {"messages": [{"role": "user", "content": "plain"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "part"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]}]},
    ]
    dataset = Dataset(DatasetMeta(data=given))
    assert list(dataset) == given
    dataset.map(lambda columns: columns, batch_size=1)
    dataset.filter(lambda row: row in given)
    assert list(dataset) == given


def test_keys_that_arrow_adds_to_messages_and_tools_are_taken_away_again() -> None:
    import datasets

    given = [
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"function": {"properties": {"city": {"type": "s"}}}}],
        },
        {
            "messages": [{"role": "tool", "tool_call_id": "1"}],
            "tools": [{"function": {"properties": {"x": {"k": "i"}}}}],
        },
    ]
    arrow = datasets.Dataset.from_list(given)
    assert arrow[0]["messages"] == [{"role": "user", "content": "a", "tool_call_id": None}]
    dataset = Dataset(DatasetMeta(data=arrow))
    assert list(dataset) == given
    seen: list[object] = []
    dataset.map(lambda columns: seen.extend(columns["messages"]) or columns)
    assert seen == [row["messages"] for row in given]
    assert list(dataset) == given


def test_preference_pairs_are_cleaned_too() -> None:
    import datasets

    given = [
        {"positive": {"messages": [{"role": "user", "content": "a"}]}, "negative": {"messages": [{"role": "system"}]}},
        {"positive": {"messages": [{"role": "user"}]}, "negative": {"messages": [{"role": "user", "content": "b"}]}},
    ]
    assert list(Dataset(DatasetMeta(data=datasets.Dataset.from_list(given)))) == given
    assert list(Dataset(DatasetMeta(data=given))) == given


def test_a_late_row_with_new_keys_does_not_break_map() -> None:
    # The type that Arrow infers from the first 1000 rows must not bind the others.
    dataset = numbers(2500)
    late = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    dataset.map(lambda c: {"messages": [[{"role": "user"} if i < 2000 else late] for i in c["i"]]})
    assert dataset[0]["messages"] == [{"role": "user"}]
    assert dataset[2400]["messages"] == [late]


# Several sets


def two_sets() -> tuple[Dataset, DatasetMeta, DatasetMeta]:
    first = DatasetMeta("first", data=[{"t": f"a{i}"} for i in range(3)])
    second = DatasetMeta("second", data=[{"t": f"b{i}"} for i in range(2)])
    dataset = Dataset(first)
    dataset.add_dataset(second)
    return dataset, first, second


def test_interleave_takes_turns_until_the_shortest_ends(caplog: pytest.LogCaptureFixture) -> None:
    dataset, _, _ = two_sets()
    dataset.mix_dataset()
    assert dataset["t"] == ["a0", "b0", "a1", "b1"]
    assert "1 rows are left out" in caplog.text


def test_interleave_is_the_one_of_datasets() -> None:
    import datasets

    sets = [[{"t": f"{name}{i}"} for i in range(size)] for name, size in (("a", 5), ("b", 3), ("c", 4))]
    dataset = Dataset()
    for part in sets:
        dataset.add_dataset(DatasetMeta(data=part))
    dataset.mix_dataset(interleave=True)
    assert list(dataset) == list(datasets.interleave_datasets([datasets.Dataset.from_list(part) for part in sets]))


def test_without_interleave_the_sets_follow_each_other() -> None:
    dataset, _, _ = two_sets()
    dataset.mix_dataset(interleave=False)
    assert dataset["t"] == ["a0", "a1", "a2", "b0", "b1"]


def test_map_and_filter_choose_one_of_several_sets() -> None:
    dataset, first, second = two_sets()
    dataset.map(lambda columns: {"t": [t.upper() for t in columns["t"]]}, dataset_meta=second)
    dataset.filter(lambda row: row["t"] != "a1", dataset_meta=first)
    dataset.mix_dataset(interleave=False)
    assert dataset["t"] == ["a0", "a2", "B0", "B1"]


def test_sets_with_other_message_keys_mix() -> None:
    import datasets

    typed = [{"messages": [{"role": "user", "content": "x"}]}]
    untyped = [{"messages": [{"role": "tool", "tool_call_id": "7"}], "extra": 1}]
    dataset = Dataset(DatasetMeta(data=datasets.Dataset.from_list(typed)))
    dataset.add_dataset(DatasetMeta(data=untyped))
    dataset.mix_dataset()
    assert list(dataset) == [typed[0] | {"extra": None}, untyped[0]]


def test_unmixed_sets_have_no_rows_yet() -> None:
    dataset, first, _ = two_sets()
    for use in (lambda: len(dataset), lambda: dataset[0], lambda: dataset.map(lambda c: c), lambda: dataset.encode()):
        with pytest.raises(TrainingStateError, match=r"2 data sets were added .*mix_dataset\(\)"):
            use()
    with pytest.raises(DataError, match="is there already"):
        dataset.add_dataset(first)
    with pytest.raises(DataError, match="no data set 'third' was added; there are: first"):
        dataset.map(lambda c: c, dataset_meta=DatasetMeta("third"))
    dataset.mix_dataset()
    with pytest.raises(TrainingStateError, match="mixed already"):
        dataset.filter(lambda row: True, dataset_meta=first)
    with pytest.raises(TrainingStateError, match="mixed already"):
        dataset.add_dataset(DatasetMeta("third", data=rows(1)))


def test_sets_whose_columns_do_not_fit_say_so() -> None:
    dataset = numbers(2)
    dataset.add_dataset(DatasetMeta(data=[{"i": "a"}]))
    with pytest.raises(DataError, match=r"columns do not fit together.*Field i"):
        dataset.mix_dataset()


def test_an_empty_data_set_says_how_to_fill_it() -> None:
    with pytest.raises(DataError, match="give Dataset a DatasetMeta, or call add_dataset"):
        len(Dataset())
    with pytest.raises(DataError, match="no data set to mix"):
        Dataset().mix_dataset()
    with pytest.raises(ArgumentError, match="takes no 'revision'"):
        Dataset(revision="main")
    with pytest.raises(ComponentTypeError, match="dataset_meta is a str"):
        Dataset("rows.jsonl")


# Cache, pickling, images


def test_nothing_is_written_beside_the_source(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(rows(5)).save_to_disk(str(tmp_path / "saved"))
    before = sorted(path.name for path in (tmp_path / "saved").iterdir())
    dataset = Dataset(DatasetMeta(data=datasets.load_from_disk(str(tmp_path / "saved"))))
    dataset.map(AddConstant(1))
    dataset.filter(lambda row: row["i"] > 2)
    assert dataset["i"] == [3, 4, 5]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == before


def test_a_cached_map_is_used_for_the_same_rows_and_function_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    calls = tmp_path / "calls"

    def noted(columns, by):
        with calls.open("a") as file:
            file.write("x")
        return {"i": [by * value for value in columns["i"]]}

    for count, by in ((3, 2), (3, 2), (3, 5), (4, 2)):
        dataset = numbers(count)
        dataset.map(noted, fn_kwargs={"by": by}, load_from_cache_file=True)
        assert dataset["i"] == [by * value for value in range(count)]
    assert calls.read_text() == "xxx"


def test_a_data_set_and_its_meta_pickle() -> None:
    meta = DatasetMeta(data=rows(4), data_slice=(index for index in (3, 1)))
    dataset = pickle.loads(pickle.dumps(Dataset(pickle.loads(pickle.dumps(meta)))))
    assert dataset["i"] == [3, 1]


def test_cast_column_makes_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (2, 3), (255, 0, 0)).save(tmp_path / "red.png")
    dataset = Dataset(DatasetMeta(data=[{"picture": str(tmp_path / "red.png"), "n": 1}]))
    dataset.cast_column("picture")
    assert dataset[0]["picture"].size == (2, 3)
    dataset.map(lambda columns: columns)
    assert dataset[0]["picture"].size == (2, 3)
    dataset.cast_column("picture", decode=False)
    assert dataset[0]["picture"]["path"].endswith("red.png")
    with pytest.raises(ArgumentError, match="no column 'pictur', nearest: 'picture'"):
        dataset.cast_column("pictur")
    with pytest.raises(DataError, match="column 'n' cannot hold images"):
        dataset.cast_column("n")


def test_the_room_is_light_and_offers_the_published_names() -> None:
    code = (
        "import sys, twinkle.dataset, twinkle.dataloader; from twinkle.dataset import Dataset; "
        "from twinkle.dataloader import DataLoader; "
        "print(sorted({'torch', 'datasets', 'pandas', 'pyarrow', 'numpy'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("method", "published"),
    [
        ("__init__", ["dataset_meta", "kwargs"]),
        ("set_template", ["template_func", "kwargs"]),
        ("encode", ["add_generation_prompt", "kwargs"]),
        ("check", ["kwargs"]),
        ("cast_column", ["column", "decode"]),
        ("map", ["preprocess_func", "dataset_meta", "init_args", "kwargs"]),
        ("filter", ["filter_func", "dataset_meta", "init_args", "kwargs"]),
        ("add_dataset", ["dataset_meta", "kwargs"]),
        ("mix_dataset", ["interleave"]),
        ("save_as", ["output_path", "format", "batch_size", "mode", "kwargs"]),
        ("flush_save", []),
    ],
)
def test_signatures_are_the_published_ones(method: str, published: list[str]) -> None:
    parameters = inspect.signature(getattr(Dataset, method)).parameters
    own = {name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    assert [name for name in parameters if name not in own] == ["self", *published]
    assert all(parameters[name].default is not inspect.Parameter.empty for name in own)


def test_a_count_of_rows_is_the_first_rows() -> None:
    rows = [{"n": n} for n in range(5)]
    assert Dataset(DatasetMeta(data=rows, data_slice=2))["n"] == [0, 1]
    assert Dataset(DatasetMeta(data=rows, data_slice=9))["n"] == [0, 1, 2, 3, 4]
    assert DatasetMeta("a", data_slice=2).get_id() == DatasetMeta("a", data_slice=slice(2)).get_id()
    for wrong in (0, -1, True, 2.5):
        with pytest.raises(DataError, match="give a count from 1 on"):
            DatasetMeta(data=rows, data_slice=wrong)


def test_a_set_without_rows_is_named_for_people(tmp_path: Path) -> None:
    rows = [{"n": n} for n in range(5)]
    (tmp_path / "rows.csv").write_text("n\n1\n")
    for meta, told in (
        (DatasetMeta(data=rows), "data set 'in memory' has"),
        (DatasetMeta(data=rows, data_slice=2), r"data set 'in memory:slice\(None, 2, None\)' has"),
        (DatasetMeta("sums", data=rows), "data set 'sums' has"),
        (DatasetMeta(str(tmp_path / "rows.csv")), r"rows.csv' has"),
    ):
        with pytest.raises(DataError, match=told):
            Dataset(meta).filter(lambda row: False)
