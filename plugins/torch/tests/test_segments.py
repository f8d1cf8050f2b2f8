"""Attention within segments equals attention under a dense block-diagonal mask, computed in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinkle.errors import ArgumentError
from twinkle_torch import segments as room
from twinkle_torch.segments import Segments, by_segment, segment_attention

LENGTHS = (5, 1, 9, 5, 14, 1, 7)
HEADS, GROUPS, SIZE = 4, 2, 8


def tensors(total: int, out: int = SIZE, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, SIZE), (GROUPS, SIZE), (GROUPS, out))
    made = [torch.randn(total, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return tuple(x.requires_grad_() for x in made)  # type: ignore[return-value]


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Any,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition: all scores, a mask that is block-diagonal, causal and banded, and a plain soft-max."""
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    place = torch.arange(len(q))
    seen = (owner[:, None] == owner) & (place[:, None] >= place)
    if window is not None:
        seen &= place[:, None] - place < window
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (SIZE**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.exp() * seen
    rest = 0 if sinks is None else sinks.exp()[:, None, None]
    return torch.einsum("hqk,khe->qhe", weights / (weights.sum(-1, keepdim=True) + rest), v)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"window": 1},
        {"window": 4},
        {"window": 5},
        {"window": 14},
        {"window": 99},
        {"softcap": 0.7},
        {"softcap": 0.7, "window": 3},
        {"sinks": SINKS},
        {"sinks": SINKS, "window": 4, "softcap": 2.0, "scale": 1.0},
    ],
)
@pytest.mark.parametrize("out", [SIZE, 3])
def test_it_is_attention_under_a_block_diagonal_mask(options: dict[str, Any], out: int) -> None:
    options = {name: x.clone().requires_grad_() if name == "sinks" else x for name, x in options.items()}
    q, k, v = tensors(sum(LENGTHS), out)
    wanted = dense(q, k, v, LENGTHS, **options)
    found = segment_attention(q, k, v, Segments.of(LENGTHS), **options)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    leaves = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor))]
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theirs, ours = (torch.autograd.grad((x * weights).sum(), leaves) for x in (wanted, found))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), window=st.none() | st.integers(1, 13))
def test_any_lengths_and_windows(lengths: list[int], window: int | None) -> None:
    q, k, v = tensors(sum(lengths))
    found = segment_attention(q, k, v, Segments.of(lengths), window=window)
    torch.testing.assert_close(found, dense(q, k, v, lengths, window=window), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 0.7}, {"sinks": SINKS}])
def test_another_sequence_changes_no_bit(options: dict[str, Any]) -> None:
    q, k, v = (x.detach() for x in tensors(sum(LENGTHS), dtype=torch.float32))
    found = segment_attention(q, k, v, Segments.of(LENGTHS), **options)
    start, stop = 6, 15
    other = [torch.where((torch.arange(len(x)) // 1 < start)[:, None, None], -3 * x, x) for x in (q, k, v)]
    changed = segment_attention(*other, Segments.of(LENGTHS), **options)
    assert torch.equal(found[start:stop], changed[start:stop])
    assert not torch.equal(found[:5], changed[:5])


def test_half_precision_and_autocast_keep_their_dtype() -> None:
    q, k, v = (x.detach() for x in tensors(sum(LENGTHS), dtype=torch.float32))
    wanted = dense(q, k, v, LENGTHS, softcap=2.0)
    halves = [x.bfloat16() for x in (q, k, v)]
    found = segment_attention(*halves, Segments.of(LENGTHS), softcap=2.0)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=0.03, atol=0.03)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = segment_attention(q, k, v.bfloat16(), Segments.of(LENGTHS), softcap=2.0)
    assert torch.equal(mixed, found)


def test_dropout_leaves_weights_out_and_keeps_the_mean() -> None:
    q, k, v = (x.detach() for x in tensors(16))
    segments = Segments.of((8, 8))
    for options in ({}, {"softcap": 5.0}):
        whole = segment_attention(q, k, v, segments, **options)
        drawn = [segment_attention(q, k, v, segments, dropout=0.5, **options) for _ in range(400)]
        assert not torch.equal(drawn[0], drawn[1])
        torch.testing.assert_close(torch.stack(drawn).mean(0), whole, rtol=0, atol=0.5)


def test_sequences_of_one_length_go_in_one_call_and_come_back_in_order() -> None:
    calls = []

    def double(x: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        return x * 2

    x = torch.arange(12.0)[:, None]
    assert torch.equal(by_segment(double, Segments.of((2, 3, 2, 2, 3)), x), x * 2)
    assert calls == [(3, 2, 1), (2, 3, 1)]


def test_segments_know_their_bounds() -> None:
    segments = Segments.of([3, 1, 4], "cpu")
    assert segments.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert segments.cu_seqlens.dtype is torch.int32
    assert (segments.total, segments.longest, segments.reach) == (8, 4, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": (8, 4, 8)}, r"q \[8, 4, 8\].*\[7 tokens, heads, size\]"),
        ({"k": (7, 2, 4)}, "q and k need one size"),
        ({"v": (7, 1, 8)}, "k and v as many heads"),
        ({"q": (7, 3, 8)}, "of which q has a multiple"),
        ({"v": (7, 8)}, "each is"),
        ({"window": 0}, "window is 0"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"sinks": torch.zeros(2)}, r"sinks \[2\] for 4 heads"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    shapes = {"q": (7, 4, 8), "k": (7, 2, 8), "v": (7, 2, 8)}
    given = {name: torch.zeros(change.pop(name, shape)) for name, shape in shapes.items()}
    with pytest.raises(ArgumentError, match=words):
        segment_attention(**given, segments=Segments.of((3, 4)), **change)


def test_empty_segments_are_refused() -> None:
    for lengths in ([], [3, 0]):
        with pytest.raises(ArgumentError, match="each needs a token"):
            Segments.of(lengths)
    with pytest.raises(ArgumentError, match="hold 3 tokens, but a tensor has 4"):
        by_segment(lambda x: x, Segments.of([3]), torch.zeros(4))


def test_the_kernel_is_for_half_precision_on_a_gpu_alone() -> None:
    q, _, v = tensors(4, dtype=torch.float32)
    assert room._kernel(q, v) is None
    assert room._kernel(q.bfloat16(), v.bfloat16()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 4}, {"window": 1}, {"softcap": 0.7}, {"sinks": SINKS}])
def test_on_a_gpu_in_bfloat16(options: dict[str, Any]) -> None:
    q, k, v = tensors(sum(LENGTHS))
    wanted = dense(q, k, v, LENGTHS, **options)
    theirs = torch.autograd.grad(wanted.square().sum(), [q, k, v])
    leaves = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in (q, k, v)]
    options = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in options.items()}
    found = segment_attention(*leaves, Segments.of(LENGTHS, "cuda"), **options)
    ours = torch.autograd.grad(found.float().square().sum(), leaves)
    for a, b in zip((found, *ours), (wanted, *theirs), strict=True):
        error = (a.double().cpu() - b).norm() / b.norm()
        assert error < 0.02
