"""Sequences that go on after a shared prefix attend as if each had the prefix for itself, to the last gradient."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinkle.errors import ArgumentError, Unsupported
from twinkle_torch import prefix_attention as parts
from twinkle_torch import segments as room
from twinkle_torch.prefix_attention import Part, gather
from twinkle_torch.segments import Segments, by_segment, segment_attention

LENGTHS = (7, 3, 3, 5, 4, 6, 2, 3, 1)
PARENTS = (-1, 0, 0, 0, -1, -1, 5, 5, 6)
"""A prefix with three children, a sequence of its own, and a tree of three floors whose last has one token."""
HEADS, GROUPS, SIZE = 4, 2, 8
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": 0.3},
    {"window": 1},
    {"window": 2},
    {"window": 4},
    {"window": 8},
    {"window": 12},
    {"softcap": 0.7},
    {"softcap": 0.7, "window": 3},
    {"sinks": SINKS},
    {"sinks": SINKS, "window": 5, "softcap": 2.0, "scale": 1.0},
]


def tensors(total: int, out: int = SIZE, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, SIZE), (GROUPS, SIZE), (GROUPS, out))
    made = [torch.randn(total, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in made]


def seen_by(lengths: Sequence[int], parents: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """For each token the places of what it sees, itself the last, in order."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    for number, length in enumerate(lengths):
        before: list[int] = []
        above = parents[number]
        while above >= 0:
            before = [*range(starts[above], starts[above] + lengths[above]), *before]
            above = parents[above]
        for place in range(starts[number], starts[number] + length):
            yield [*before, *range(starts[number], place + 1)], place


def token_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    parents: Sequence[int],
    scale: float = SIZE**-0.5,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition, one token at a time."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    results = []
    for places, place in seen_by(lengths, parents):
        kept = places if window is None else places[-window:]
        scores = torch.einsum("hd,khd->kh", q[place], k[kept]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp()
        rest = 0 if sinks is None else sinks.exp()
        results.append(torch.einsum("kh,khe->he", weights / (weights.sum(0) + rest), v[kept]))
    return torch.stack(results)


def gradients(out: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad((out * weights.to(out)).sum(), leaves)


@pytest.mark.sample(4)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("out", [SIZE, 3, 11])
def test_each_token_sees_its_chain_and_its_own(options: dict[str, Any], out: int) -> None:
    options = {name: x.clone().requires_grad_() if name == "sinks" else x for name, x in options.items()}
    q, k, v = tensors(sum(LENGTHS), out)
    wanted = token_by_token(q, k, v, LENGTHS, PARENTS, **options)
    found = segment_attention(q, k, v, Segments.of(LENGTHS, parents=PARENTS), **options)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    leaves = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor))]
    for ours, theirs in zip(gradients(found, leaves), gradients(wanted, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_forest_and_window(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    parents = [data.draw(st.integers(-1, n - 1)) for n in range(len(lengths))]
    window = data.draw(st.none() | st.integers(1, 20))
    q, k, v = tensors(sum(lengths))
    wanted = token_by_token(q, k, v, lengths, parents, window=window)
    found = segment_attention(q, k, v, Segments.of(lengths, parents=parents), window=window)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients(found, [q, k, v]), gradients(wanted, [q, k, v]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_large_scores_stay_exact(options: dict[str, Any]) -> None:
    q, k, v = tensors(sum(LENGTHS))
    q = q.detach() * 40
    k = k.detach().index_fill(0, torch.arange(7), 3.0)  # the first prefix takes all the weight, or none
    wanted = token_by_token(q, k, v, LENGTHS, PARENTS, **options)
    found = segment_attention(q, k, v, Segments.of(LENGTHS, parents=PARENTS), **options)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"sinks": SINKS}])
def test_another_family_changes_no_bit(options: dict[str, Any]) -> None:
    q, k, v = (x.detach() for x in tensors(sum(LENGTHS), dtype=torch.float32))
    segments = Segments.of(LENGTHS, parents=PARENTS)
    found = segment_attention(q, k, v, segments, **options)
    other = [torch.where((torch.arange(len(x)) < 18)[:, None, None], -3 * x, x) for x in (q, k, v)]
    changed = segment_attention(*other, segments, **options)
    assert torch.equal(found[18:], changed[18:])
    assert not torch.equal(found[:18], changed[:18])
    broken = [x.index_fill(0, torch.tensor([2, 19]), torch.nan) for x in (q, k, v)]
    harmed = segment_attention(*broken, segments, **options)
    assert torch.equal(found[22:], harmed[22:])
    assert harmed[2].isnan().all()


def test_half_precision_and_autocast_keep_their_dtype() -> None:
    q, k, v = (x.detach() for x in tensors(sum(LENGTHS), dtype=torch.float32))
    wanted = token_by_token(q, k, v, LENGTHS, PARENTS)
    segments = Segments.of(LENGTHS, parents=PARENTS)
    for dtype in (torch.bfloat16, torch.float16):
        found = segment_attention(q.to(dtype), k.to(dtype), v.to(dtype), segments)
        assert found.dtype is dtype
        torch.testing.assert_close(found.float(), wanted, rtol=0.03, atol=0.03)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = segment_attention(q, k, v, segments)
    assert torch.equal(mixed, segment_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), segments))


@pytest.mark.parametrize("stride", ["heads first", "last dimension apart"])
def test_tensors_may_lie_in_memory_in_any_way(stride: str) -> None:
    q, k, v = (x.detach() for x in tensors(sum(LENGTHS)))
    segments = Segments.of(LENGTHS, parents=PARENTS)
    wanted = segment_attention(q, k, v, segments)
    axes = (0, 1) if stride == "heads first" else (1, 2)
    turned = [x.transpose(*axes).contiguous().transpose(*axes).requires_grad_() for x in (q, k, v)]
    found = segment_attention(*turned, segments)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    found.sum().backward()  # a gradient without strides of its own
    straight = [x.clone().requires_grad_() for x in (q, k, v)]
    segment_attention(*straight, segments).mul(torch.ones_like(wanted)).sum().backward()
    for ours, theirs in zip(turned, straight, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-13)


def test_mixed_dtypes_are_an_error_of_torch() -> None:
    q, k, v = (x.detach() for x in tensors(sum(LENGTHS)))
    with pytest.raises(RuntimeError, match="dtype"):
        segment_attention(q, k, v.float(), Segments.of(LENGTHS, parents=PARENTS))


@pytest.mark.full
def test_dropout_leaves_weights_out_and_keeps_the_mean() -> None:
    q, k, v = (x.detach() for x in tensors(sum(LENGTHS)))
    segments = Segments.of(LENGTHS, parents=PARENTS)
    torch.manual_seed(0)
    for options in ({}, {"softcap": 5.0}):
        whole = segment_attention(q, k, v, segments, **options)
        drawn = [segment_attention(q, k, v, segments, dropout=0.5, **options) for _ in range(400)]
        assert not torch.equal(drawn[0], drawn[1])
        torch.testing.assert_close(torch.stack(drawn).mean(0), whole, rtol=0, atol=0.7)


def test_children_of_one_prefix_cost_one_call_and_copy_nothing() -> None:
    segments = Segments.of((6, 2, 2, 3, 5, 5), parents=(-1, 0, 0, 0, -1, -1))
    assert segments.parts == (
        Part((0, 6), (0, 6)), Part((6, 10), (6, 10), 2), Part((10, 13), (10, 13)), Part((13, 23), (13, 23), 2),
        Part((6, 13), (0, 6)),
    )  # fmt: skip
    row = torch.randn(23, 4, 8)
    assert all(
        x.data_ptr() == row[part.queries[0]].data_ptr() for part in segments.parts for x in [part.of_queries(row)]
    )


def test_without_the_kernel_of_torch_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(sum(LENGTHS))
    segments = Segments.of(LENGTHS, parents=PARENTS)
    found = segment_attention(q, k, v, segments)
    monkeypatch.setattr(room, "fits", lambda *tensors: False)
    plain = segment_attention(q, k, v, segments)
    torch.testing.assert_close(plain, found, rtol=0, atol=1e-14)
    for ours, theirs in zip(gradients(plain, [q, k, v]), gradients(found, [q, k, v]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_a_torch_whose_kernel_is_another_one_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts.fits(torch.zeros(1))
    assert not parts.fits(torch.zeros(1, dtype=torch.int64))
    assert not parts.fits(torch.zeros(1, device="meta"))
    assert not parts.fits(torch.zeros(1), torch.zeros(1, dtype=torch.float64))
    forward = parts._forward
    monkeypatch.setattr(
        parts, "_forward", lambda *given, scale: (forward(*given, scale=scale)[0], torch.zeros(1, 2, 3))
    )
    assert not parts.has_kernel.__wrapped__()
    monkeypatch.setattr(parts, "_NAME", "_of_another_version")
    monkeypatch.setattr(parts, "_forward", forward)
    assert not parts.has_kernel.__wrapped__()


def bottom_right(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Tensor:
    """What flash attention for unequal lengths promises: the last query and the last key belong together."""
    left, right = options["window_size"]
    groups = q.shape[1] // k.shape[1]
    assert (groups > 1) == options["enable_gqa"]
    assert cu_q.dtype is cu_k.dtype is torch.int32
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    results = []
    for n in range(len(cu_q) - 1):
        own = q[cu_q[n] : cu_q[n + 1]]
        keys, values = (x[cu_k[n] : cu_k[n + 1]].repeat_interleave(groups, 1) for x in (k, v))
        place = torch.arange(len(own))[:, None] + len(keys) - len(own)
        key = torch.arange(len(keys))
        seen = (key <= place + right) & ((key >= place - left) | (left < 0))
        scores = torch.einsum("qhd,khd->hqk", own, keys) * options["scale"]
        results.append(torch.einsum("hqk,khe->qhe", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
    return torch.cat(results)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"window": 1}, {"scale": 0.3}])
def test_a_kernel_for_unequal_lengths_is_given_prefix_and_own_keys(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_kernel", lambda q, v: bottom_right)
    q, k, v = tensors(sum(LENGTHS))
    wanted = token_by_token(q, k, v, LENGTHS, PARENTS, **options)
    found = segment_attention(q, k, v, Segments.of(LENGTHS, parents=PARENTS), **options)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients(found, [q, k, v]), gradients(wanted, [q, k, v]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_gathered_gradients_are_summed_in_float32() -> None:
    x = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    gather(x, torch.zeros(513, dtype=torch.int64)).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [512.0, 0.0]  # 513 rounded once; adding ones in bfloat16 ends at 256


def test_segments_know_what_comes_before_them() -> None:
    segments = Segments.of(LENGTHS, parents=PARENTS)
    assert segments.parents == PARENTS
    assert segments.starts == (0, 7, 7, 7, 0, 0, 6, 6, 8)
    assert (segments.total, segments.longest, segments.reach) == (34, 7, 12)
    assert segments.positions.dtype is torch.int64
    assert segments.positions.tolist() == [len(places) - 1 for places, _ in seen_by(LENGTHS, PARENTS)]
    plain = Segments.of([3, 2], parents=[-1, -1])
    assert plain.parents == ()
    assert plain.positions.tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("parents", "words"),
    [
        ([-1, 1], "segment 1 has the parent 1; a parent comes before its children"),
        ([-1, -2], "segment 1 has the parent -2"),
        ([1, -1], "segment 0 has the parent 1"),
        ([-1], "1 parents for 2 segments"),
        ([], "0 parents for 2 segments"),
    ],
)
def test_parents_that_cannot_be_are_refused(parents: list[int], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Segments.of([3, 2], parents=parents)


def test_what_runs_on_each_sequence_alone_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"gated delta rule.*give each sequence its prefix"):
        by_segment(lambda x: x, Segments.of([3, 2], parents=[-1, 0]), torch.zeros(5))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 4}, {"window": 1}, {"softcap": 0.7}, {"sinks": SINKS}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = tensors(sum(LENGTHS))
    wanted = token_by_token(q, k, v, LENGTHS, PARENTS, **options)
    leaves = [x.detach().to("cuda", dtype).requires_grad_() for x in (q, k, v)]
    options = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in options.items()}
    found = segment_attention(*leaves, Segments.of(LENGTHS, "cuda", PARENTS), **options)
    pairs = zip((found, *gradients(found, leaves)), (wanted, *gradients(wanted, [q, k, v])), strict=True)
    for ours, theirs in pairs:
        error = (ours.double().cpu() - theirs).norm() / theirs.norm()
        assert error < (0.02 if dtype is torch.bfloat16 else 1e-4)
