"""Data loaders: the contract `DataLoaderLike`, and every installed data loader by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room
from twinkle.dataloader.protocol import DataLoaderLike

__all__ = ["DataLoaderLike"]

__getattr__, __dir__ = room(__name__, "dataloader")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle_data.dataloader.base import DataLoader as DataLoader
