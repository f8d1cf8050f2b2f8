# Written by `twinkle plugins types`; do not edit.
"""Data loaders: the contract `DataLoaderLike`, and every installed data loader by name."""

from twinkle._registry import lazy_names
from twinkle.dataloader.protocol import DataLoaderLike

__all__ = ["DataLoaderLike"]


from twinkle_data.dataloader.base import DataLoader as DataLoader
from twinkle_data.dataloader.published import DeviceMeshIterableFetcher as DeviceMeshIterableFetcher
from twinkle_data.dataloader.published import DeviceMeshSampler as DeviceMeshSampler
from twinkle_data.dataloader.published import RetrySampler as RetrySampler
