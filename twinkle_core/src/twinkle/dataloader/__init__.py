"""Data loaders: the contract `DataLoaderLike`, and every installed data loader by name."""

from twinkle._registry import lazy_names
from twinkle.dataloader.protocol import DataLoaderLike

__all__ = ["DataLoaderLike"]

__getattr__, __dir__ = lazy_names(__name__, "dataloader")
