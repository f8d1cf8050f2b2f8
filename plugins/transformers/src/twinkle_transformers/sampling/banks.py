"""Weights of several adapters, stacked as a step samples with them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from twinkle_transformers.versions import AdapterVersion


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
