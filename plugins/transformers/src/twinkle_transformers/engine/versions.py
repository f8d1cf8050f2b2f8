"""Adapters as an engine samples with them: weights that nobody changes any more, and a name for exactly those."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twinkle.errors import NonFiniteError
from twinkle.torch.layout import Layout


@dataclass(frozen=True, eq=False)
class AdapterVersion:
    """The weights of an adapter at one time.

    Attributes:
        layout: where the matrices lie.
        flat: `[P]`; whoever makes a version gives its weights away, or a copy.
        key: says which weights these are: two versions of one key are the same.
    """

    layout: Layout
    flat: Tensor
    key: str
    _finite: list[bool] = field(default_factory=list, repr=False)

    def check(self) -> None:
        """Refuse weights that are not finite: in a product they could reach rows of others.

        Raises:
            NonFiniteError: a weight is NaN or infinite.
        """
        if not self._finite:
            self._finite.append(bool(self.flat.isfinite().all()))
        if not self._finite[0]:
            raise NonFiniteError(f"the weights of adapter {self.key!r} are NaN or infinite; did its training diverge?")


class Banks:
    """Weights of several versions, stacked as a step needs them and kept for the next steps."""

    def __init__(self, kept: int = 4) -> None:
        """Keep so many stacks, the last ones used."""
        self._kept = kept
        self._stacks: dict[tuple[str | torch.dtype, ...], Tensor] = {}

    def of(self, versions: Iterable[AdapterVersion], dtype: torch.dtype) -> Tensor:
        """Return the versions' weights `[n, P]`."""
        versions = list(versions)
        key: tuple[str | torch.dtype, ...] = (dtype, *(version.key for version in versions))
        found = self._stacks.pop(key, None)
        if found is None:
            flats = [version.flat for version in versions]
            found = torch.empty(len(flats), flats[0].numel(), dtype=dtype, device=flats[0].device)
            torch._foreach_copy_(list(found.unbind()), flats)
        self._stacks[key] = found
        while len(self._stacks) > self._kept:
            del self._stacks[next(iter(self._stacks))]
        return found
