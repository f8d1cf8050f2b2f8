"""A processor on which every matrix product rounds by its number of rows, as those of other machines do."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_"})
_STEPS = 7


class RoundsByRows(TorchDispatchMode):
    """Moves the result of each product by 0 to 6 units in the last place, a function of its number of rows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _PRODUCTS:
            found.mul_(1.0 + torch.finfo(found.dtype).eps * (found.shape[-2] % _STEPS))
        return found


@pytest.fixture
def rounds_by_rows() -> Iterator[None]:
    """Let products round so for a test."""
    with RoundsByRows():
        yield
