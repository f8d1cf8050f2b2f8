# Written by `twinkle plugins types`; do not edit.
"""Data sets: the contracts `DatasetLike` and `StreamLike`, `DatasetMeta`, and every installed data set by name."""

from twinkle._registry import lazy_names
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.protocol import DatasetLike, StreamLike

__all__ = ["DatasetLike", "DatasetMeta", "StreamLike"]


from twinkle_data.dataset.base import Dataset as Dataset
from twinkle_data.dataset.iterable import IterableDataset as IterableDataset
from twinkle_data.dataset.lazy import LazyDataset as LazyDataset
from twinkle_data.dataset.packed import PackingDataset as PackingDataset
from twinkle_data.dataset.packed_stream import IterablePackingDataset as IterablePackingDataset
