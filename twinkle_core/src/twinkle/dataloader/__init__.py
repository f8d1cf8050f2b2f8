"""Data loaders: the contract `DataLoaderLike`, and every installed data loader by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room
from twinkle.dataloader.protocol import DataLoaderLike
from twinkle.dataloader.published import DeviceMeshIterableFetcher, DeviceMeshSampler, RetrySampler

__all__ = ["DataLoaderLike", "DeviceMeshIterableFetcher", "DeviceMeshSampler", "RetrySampler"]

__getattr__, __dir__ = room(__name__, "dataloader")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle.dataloader.base import DataLoader as DataLoader
