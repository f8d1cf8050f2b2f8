"""Where an adapter's matrices lie: each whole, none over another, at offsets that kernels like."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinkle_transformers.lowrank.layout import ALIGNMENT, Entry, Layout, Shape

shapes = st.builds(
    Shape,
    rank=st.integers(1, 9),
    fan_in=st.integers(1, 13),
    fan_out=st.integers(1, 13),
    scale=st.floats(0.1, 4.0),
    experts=st.sampled_from([0, 0, 0, 1, 3]),
)


def named(found: list[Shape]) -> list[tuple[str, Shape]]:
    return [(f"layer{number}", shape) for number, shape in enumerate(found)]


@given(st.lists(shapes, min_size=1, max_size=6), st.sampled_from([1, 8, 16]), st.booleans())
def test_matrices_are_whole_apart_and_aligned(found: list[Shape], multiple: int, as_given: bool) -> None:
    layout = Layout.of(named(found), rank_multiple=multiple, as_given=as_given)
    flat = torch.zeros(layout.size)
    for entry, shape in zip(layout.entries.values(), found, strict=True):
        unit = 1 if shape.experts else multiple  # grouped products of experts take any rank
        assert entry.rank % unit == 0
        assert 0 <= entry.rank - shape.rank < unit
        experts = (shape.experts,) if shape.experts else ()
        for view, fan in ((entry.down_of(flat), shape.fan_in), (entry.up_of(flat), shape.fan_out)):
            assert view.shape == (*experts, entry.rank, fan)
            assert view.storage_offset() % ALIGNMENT == 0
            view += 1
    assert set(flat.tolist()) <= {0.0, 1.0}  # no number belongs to two
    stored = sum(
        max(1, s.experts) * e.rank * (s.fan_in + s.fan_out) for e, s in zip(layout.entries.values(), found, strict=True)
    )
    assert int(flat.sum()) == stored
    assert layout.parameters == sum(max(1, s.experts) * s.rank * (s.fan_in + s.fan_out) for s in found)


@pytest.mark.parametrize("as_given", [False, True])
def test_views_of_many_buffers_are_those_of_each(as_given: bool) -> None:
    layout = Layout.of([("a", Shape(3, 5, 7, 1.0)), ("b", Shape(2, 5, 4, 1.0, experts=2))], as_given=as_given)
    flats = torch.randn(4, layout.size, generator=torch.Generator().manual_seed(0))
    wide = torch.randn(4, 2 * layout.size)
    wide[:, 3 : 3 + layout.size] = flats
    part = wide[1:, 3 : 3 + layout.size]  # a view with strides and an offset of its own
    for entry in layout.entries.values():
        assert torch.equal(entry.down_of(flats)[2], entry.down_of(flats[2]))
        assert torch.equal(entry.up_of(part), entry.up_of(flats)[1:])
        assert torch.equal(entry.down_of(part), entry.down_of(flats)[1:])


def test_what_is_written_into_a_view_is_in_the_buffer() -> None:
    layout = Layout.of([("a", Shape(2, 3, 4, 1.0))])
    flat = torch.zeros(layout.size)
    layout.entries["a"].up_of(flat)[1, 2] = 5.0
    assert flat[ALIGNMENT + 4 + 2] == 5.0


def test_matrices_that_lie_as_peft_has_them_are_in_its_order() -> None:
    layout = Layout.of([("a", Shape(2, 3, 4, 1.0))], as_given=True)
    entry, flat = layout.entries["a"], torch.zeros(layout.size)
    entry.up_of(flat).copy_(torch.arange(8.0).view(4, 2).t())
    assert flat[entry.up :][:8].tolist() == list(range(8))
    assert pickle.loads(pickle.dumps(layout)) is layout is not Layout.of([("a", Shape(2, 3, 4, 1.0))])


def test_layouts_of_the_same_places_are_one_and_others_are_not() -> None:
    one = Layout.of([("a", Shape(2, 3, 4, 1.0)), ("b", Shape(2, 3, 4, 1.0))])
    again = Layout.of([("a", Shape(2, 3, 4, 1.0)), ("b", Shape(2, 3, 4, 1.0))])
    assert one == again == copy.deepcopy(one) == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(again)
    others = [
        Layout.of([("a", Shape(2, 3, 4, 1.0))]),
        Layout.of([("a", Shape(2, 3, 4, 2.0)), ("b", Shape(2, 3, 4, 1.0))]),
        Layout.of([("a", Shape(3, 3, 4, 1.0)), ("b", Shape(2, 3, 4, 1.0))]),
        Layout.of([("a", Shape(2, 3, 4, 1.0)), ("c", Shape(2, 3, 4, 1.0))]),
        Layout.of([("a", Shape(2, 3, 4, 1.0)), ("b", Shape(2, 3, 4, 1.0))], rank_multiple=8),
    ]
    assert all(one != other for other in others)
    assert one != "a layout"


def test_nothing_about_an_entry_can_be_changed() -> None:
    entry = Layout.of([("a", Shape(2, 3, 4, 1.0))]).entries["a"]
    assert isinstance(entry, Entry)
    with pytest.raises(AttributeError):
        entry.rank = 3  # type: ignore[misc]
