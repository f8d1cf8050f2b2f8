"""A plan saves as many tokens as any choice of shared prefixes can, and rows lose nothing by it."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinkle.errors import ArgumentError
from twinkle_torch.segments import Segments, segment_attention
from twinkle_transformers.shared_prefixes import PrefixPlan, plan_prefixes

Rows = list[list[int]]


@st.composite
def forests(draw: st.DrawFn, most: int = 9) -> Rows:
    """Rows of which many begin as another one did before."""
    rows: Rows = []
    for _ in range(draw(st.integers(1, most))):
        known = draw(st.sampled_from(rows)) if rows and draw(st.booleans()) else []
        kept = known[: draw(st.integers(0, len(known)))]
        own = draw(st.lists(st.integers(0, 2), min_size=0 if kept else 1, max_size=6))
        rows.append(kept + own)
    return rows


def common(rows: Sequence[Sequence[int]]) -> int:
    return next((i for i, tokens in enumerate(zip(*rows, strict=False)) if len(set(tokens)) > 1), min(map(len, rows)))


def partitions(items: Sequence[Any]) -> Iterator[list[list[Any]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for number in range(len(rest)):
            yield [*rest[:number], [items[0], *rest[number]], *rest[number + 1 :]]


def by_trial(rows: Rows, least: int) -> int:
    """Tokens saved less `least - 1` for each group, at best: every partition of the rows that no other begins with."""
    whole = {tuple(row) for row in rows}
    left = [row for row in whole if not any(row != other and other[: len(row)] == row for other in whole)]
    dropped = sum(map(len, rows)) - sum(map(len, left))
    gains = (
        sum(max((len(group) - 1) * common(group) - least + 1, 0) for group in partition if len(group) > 1)
        for partition in partitions(left)
    )
    return dropped + max(gains)


def check(plan: PrefixPlan, rows: Sequence[Sequence[int]]) -> None:
    """What holds for every plan."""
    assert len(plan.pieces) == len(plan.parents) == len(plan.lengths) == len(plan.starts)
    assert all(stop - start == length > 0 for (_, start, stop), length in zip(plan.pieces, plan.lengths, strict=True))
    assert [start for _, start, _ in plan.pieces] == list(plan.starts)
    assert plan.saved == sum(map(len, rows)) - sum(plan.lengths)
    for number, parent in enumerate(plan.parents):
        assert plan.starts[number] == (0 if parent < 0 else plan.lengths[parent])
        if parent >= 0:
            assert plan.parents[parent] == -1
            assert set(plan.parents[parent + 1 : number]) <= {parent}, "children stand directly after their parent"
    tokens = np.concatenate([rows[row][start:stop] for row, start, stop in plan.pieces])
    places = positions(plan).numpy()
    owner = np.repeat(np.arange(len(plan.lengths)), plan.lengths)
    for row, index in zip(rows, plan.index, strict=True):
        assert index.dtype == np.int64
        assert tokens[index].tolist() == list(row)
        assert places[index].tolist() == list(range(len(row)))
        of, last = owner[index], owner[index[-1]]
        assert set(of) <= {last, plan.parents[last]}, "a row lies in one segment and in its parent"


def positions(plan: PrefixPlan) -> Tensor:
    return Segments.of(plan.lengths, parents=plan.parents).positions


@settings(deadline=None, max_examples=150)
@given(rows=forests(), least=st.integers(1, 20))
def test_every_row_reads_its_own_tokens_from_the_stream(rows: Rows, least: int) -> None:
    check(plan_prefixes(rows, least=least), rows)


@settings(deadline=None, max_examples=150)
@given(rows=forests(most=7), least=st.integers(1, 8))
def test_no_choice_of_groups_saves_more(rows: Rows, least: int) -> None:
    plan = plan_prefixes(rows, least=least)
    groups = set(plan.parents) - {-1}
    assert plan.saved - (least - 1) * len(groups) == by_trial(rows, least)
    for group in groups:
        assert (plan.parents.count(group) - 1) * plan.lengths[group] >= least


def test_a_group_in_a_group_goes_where_more_is_saved() -> None:
    inner = [[1, 1, 1, 1, 2, 2, 2, 2, n] for n in range(3)]
    outer = [[1, 1, 1, 1, 3 + n] for n in range(2)]
    rows = [outer[0], *inner, outer[1]]
    plan = plan_prefixes(rows, least=1)
    check(plan, rows)
    assert plan.saved == 2 * 8 + 4  # two groups: the inner rows share eight tokens, the others four
    assert plan.parents == (-1, 0, 0, -1, 3, 3, 3)
    assert plan_prefixes(rows, least=5).saved == 16  # the outer group is too little
    rows = [*outer, *([1, 1, 1, 1, 9, n] for n in range(2))]
    assert plan_prefixes(rows, least=1).saved == 3 * 4  # one token deeper would cost four


def test_nothing_to_share_leaves_the_rows_as_they_are() -> None:
    rows = [[5, 1], [3], [5, 2, 7]]
    plan = plan_prefixes(rows)
    assert plan.pieces == ((0, 0, 2), (1, 0, 1), (2, 0, 3))
    assert plan.parents == (-1, -1, -1)
    assert plan.saved == 0
    assert [index.tolist() for index in plan.index] == [[0, 1], [2], [3, 4, 5]]


def test_segments_stand_where_rows_first_need_them() -> None:
    rows = [[9, 9], [4, 4, 4, 1], [8], [4, 4, 4, 2, 2]]
    plan = plan_prefixes(rows, least=3)
    assert plan.pieces == ((0, 0, 2), (1, 0, 3), (1, 3, 4), (3, 3, 5), (2, 0, 1))
    assert plan.parents == (-1, -1, 1, 1, -1)
    assert plan.starts == (0, 0, 3, 3, 0)


def test_equal_rows_and_beginnings_of_others_take_nothing() -> None:
    rows = [[1, 2], [1, 2, 3], [1, 2, 3], [1]]
    plan = plan_prefixes(rows)
    assert plan.pieces == ((1, 0, 3),)
    assert plan.saved == 6
    assert [index.tolist() for index in plan.index] == [[0, 1], [0, 1, 2], [0, 1, 2], [0]]


def test_rows_may_be_lists_arrays_and_tensors() -> None:
    rows = [
        [1, 2, 3],
        np.array([1, 2, 4], np.int32),
        torch.tensor([1, 2, 5]),
        torch.tensor([1, 2, 3], dtype=torch.uint8),
    ]
    plan = plan_prefixes(rows, least=1)
    check(plan, [list(map(int, row)) for row in rows])
    assert plan.saved == 12 - 5
    assert plan_prefixes([[-100, 2**40], [-100, 2**40, 1]]).saved == 2


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "at least one row, got none"),
        ([[1], []], "row 1 is empty"),
        ([[1.5]], "row 0 must be a sequence of integers"),
        ([["a"]], "row 0 must be a sequence of integers"),
        ([[[1]]], "row 0 must be a sequence of integers"),
        ([3], "row 0 must be a sequence of integers"),
        ([[2**63]], "row 0 must be a sequence of integers"),
        ([torch.ones(2)], r"row 0 is float32 of shape \[2\]"),
        ([torch.ones(2, 2, dtype=torch.int64)], r"row 0 is int64 of shape \[2, 2\]"),
        ([torch.ones(0, dtype=torch.int64)], r"row 0 is int64 of shape \[0\].*one token at least"),
    ],
)
def test_what_is_no_row_is_refused(rows: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        plan_prefixes(rows)


def test_least_is_a_number_of_tokens() -> None:
    with pytest.raises(ArgumentError, match="least must be an integer of at least 1, got 0"):
        plan_prefixes([[1]], least=0)


def test_long_chains_of_prefixes_are_no_trouble() -> None:
    rows = [[7] * n + [n] for n in range(8, 600)]
    plan = plan_prefixes(rows, least=1)
    check(plan, rows)
    assert plan.saved > 0.9 * sum(map(len, rows))


def attended(
    tables: Sequence[Tensor], tokens: Tensor, places: Tensor, segments: Segments, window: int | None
) -> Tensor:
    """A layer of a model whose queries, keys and values are what its tables say of token and position."""
    q, k, v = (table[0, tokens] * table[1, places] for table in tables)
    return segment_attention(q, k, v, segments, window=window)


@settings(deadline=None, max_examples=40)
@given(rows=forests(), window=st.none() | st.integers(1, 9))
def test_attention_over_the_stream_is_attention_of_each_row_alone(rows: Rows, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    longest = max(map(len, rows))
    shapes = [(2, max(3, longest), heads, 8) for heads in (4, 2, 2)]
    tables = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    up = torch.randn(sum(map(len, rows)), 4, 8, generator=generator, dtype=torch.float64)
    alone = [
        attended(tables, torch.tensor(row), torch.arange(len(row)), Segments.of([len(row)]), window) for row in rows
    ]
    plan = plan_prefixes(rows, least=1)
    segments = Segments.of(plan.lengths, parents=plan.parents)
    tokens = torch.tensor([token for row, start, stop in plan.pieces for token in rows[row][start:stop]])
    stream = attended(tables, tokens, segments.positions, segments, window)
    found = stream[torch.from_numpy(np.concatenate(plan.index))]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-12, atol=1e-12)
    theirs, ours = (torch.autograd.grad((x * up).sum(), tables) for x in (torch.cat(alone), found))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_starts_are_the_positions_where_segments_begin() -> None:
    plan = plan_prefixes([[1] * 20 + [2, 3], [1] * 20 + [4]])
    firsts = [0, *accumulate(plan.lengths)][:-1]
    assert positions(plan)[firsts].tolist() == list(plan.starts) == [0, 20, 20]
