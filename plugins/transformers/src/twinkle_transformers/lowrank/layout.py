"""The weights of a LoRA adapter in one flat buffer: offsets of the matrices, and immutable versions of the buffer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

from torch import Tensor

from twinkle.errors import NonFiniteError

ALIGNMENT = 8
"""Alignment of matrices, in elements: 16 bytes of a 2-byte dtype, as grouped kernels require."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One adapted product `y = x W^T + scale * (x A^T) B^T` of an adapter.

    Attributes:
        rank: r, as stored; for some devices it is rounded up, and the added rows stay 0.
        fan_in: size of x.
        fan_out: size of y.
        scale: factor of the low-rank term: `alpha / r`, or `alpha / sqrt(r)` with rslora (arXiv:2312.03732).
        down: offset of A.
        up: offset of B.
        experts: number of experts, each with its own matrices; 0 for an ordinary linear layer.
        as_given: B is stored as in PEFT, `[fan_out, r]`, for buffers that are mostly copied and not trained.

    A lies there as `[r, fan_in]`, B transposed, as `[r, fan_out]`. With experts A lies as `[experts, r, fan_in]` and B
    as `[r, experts, fan_out]`, so that both can be seen as the matrices that PEFT has; ranks are not rounded up there.
    """

    rank: int
    fan_in: int
    fan_out: int
    scale: float
    down: int
    up: int
    experts: int = 0
    as_given: bool = False

    @property
    def down_shape(self) -> tuple[int, ...]:
        """Shape of A."""
        return (self.rank, self.fan_in) if not self.experts else (self.experts, self.rank, self.fan_in)

    @property
    def up_shape(self) -> tuple[int, ...]:
        """Shape of B, transposed; with experts this is not the memory order."""
        return (self.rank, self.fan_out) if not self.experts else (self.experts, self.rank, self.fan_out)

    def down_of(self, flat: Tensor) -> Tensor:
        """Return A as a view of one buffer `[P]`, or of several, `[n, P]`."""
        return _view(flat, self.down, self.down_shape)

    def up_of(self, flat: Tensor) -> Tensor:
        """Return B, transposed, as a view of one buffer `[P]`, or of several, `[n, P]`."""
        if self.as_given:
            return _view(flat, self.up, (self.fan_out, self.rank)).mT
        if not self.experts:
            return _view(flat, self.up, self.up_shape)
        return _view(flat, self.up, (self.rank, self.experts, self.fan_out)).transpose(-3, -2)


@dataclass(frozen=True, slots=True)
class Shape:
    """What an adapter has at one place, before it has offsets; the fields are those of `Entry`."""

    rank: int
    fan_in: int
    fan_out: int
    scale: float
    experts: int = 0


@dataclass(frozen=True, eq=False)
class Layout:
    """All entries of an adapter by the name of the place they adapt. Adapters of one layout can share products.

    Made by `of`, which returns the same object for the same shapes: layouts are equal if they are identical.

    Attributes:
        shapes: what the adapter has at each place, in the order in which they lie.
        entries: the same with offsets.
        size: number of elements of the buffer, including padding for alignment.
        rank_multiple: ranks are stored rounded up to a multiple of it.
        as_given: each B is stored as in PEFT (see `Entry`), except those of experts.
    """

    shapes: Mapping[str, Shape]
    entries: Mapping[str, Entry]
    size: int
    rank_multiple: int = 1
    as_given: bool = False

    @staticmethod
    def of(shapes: Iterable[tuple[str, Shape]], *, rank_multiple: int = 1, as_given: bool = False) -> "Layout":
        """Lay matrices out one after the other.

        Args:
            shapes: name of the place and what the adapter has there.
            rank_multiple: ranks are stored rounded up to a multiple of it.
            as_given: store each B as in PEFT.
        """
        return _layout(tuple(shapes), rank_multiple, as_given)

    @cached_property
    def parameters(self) -> int:
        """Number of trained elements, without padding for alignment and rounded ranks."""
        return sum(s.rank * (s.fan_in + s.fan_out) * max(1, s.experts) for s in self.shapes.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return _layout, (tuple(self.shapes.items()), self.rank_multiple, self.as_given)


@cache
def _layout(shapes: tuple[tuple[str, Shape], ...], rank_multiple: int, as_given: bool = False) -> Layout:
    entries: dict[str, Entry] = {}
    at = 0
    for name, shape in shapes:
        rank = shape.rank if shape.experts else -(-shape.rank // rank_multiple) * rank_multiple
        count = rank * max(1, shape.experts)
        down, up = at, _aligned(at + count * shape.fan_in)
        at = _aligned(up + count * shape.fan_out)
        given = as_given and not shape.experts
        entries[name] = Entry(rank, shape.fan_in, shape.fan_out, shape.scale, down, up, shape.experts, given)
    return Layout(MappingProxyType(dict(shapes)), MappingProxyType(entries), at, rank_multiple, as_given)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _view(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    inner = (shape[1], 1) if len(shape) == 2 else (shape[1] * shape[2], shape[2], 1)
    base = flat.storage_offset() + start
    if flat.ndim == 1:
        return flat.as_strided(shape, inner, base)
    return flat.as_strided((len(flat), *shape), (flat.stride(0), *inner), base)


@dataclass(frozen=True, eq=False)
class AdapterVersion:
    """The weights of an adapter at one point of training.

    Attributes:
        layout: offsets of the matrices.
        flat: `[P]`, not shared with other objects.
        key: identifies the weights: versions with equal keys are equal.
    """

    layout: Layout
    flat: Tensor
    key: str
    _finite: list[bool] = field(default_factory=list, repr=False)

    @property
    def nbytes(self) -> int:
        """Memory that the weights take, in bytes."""
        return self.flat.numel() * self.flat.element_size()

    def check(self) -> None:
        """Refuse weights that are not finite: in a grouped product they could affect rows of other adapters.

        Raises:
            NonFiniteError: a weight is NaN or infinite.
        """
        if not self._finite:
            self._finite.append(bool(self.flat.isfinite().all()))
        if not self._finite[0]:
            raise NonFiniteError(f"the weights of adapter {self.key!r} are NaN or infinite; did its training diverge?")
