"""Data sets: the contracts `DatasetLike` and `StreamLike`, `DatasetMeta`, and every installed data set by name."""

from typing import TYPE_CHECKING

from twinkle._lazy import room
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.protocol import DatasetLike, StreamLike

__all__ = ["DatasetLike", "DatasetMeta", "StreamLike"]

__getattr__, __dir__ = room(__name__, "dataset")

# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.
if TYPE_CHECKING:
    from twinkle_data.dataset.base import Dataset as Dataset
    from twinkle_data.dataset.iterable import IterableDataset as IterableDataset
    from twinkle_data.dataset.lazy import LazyDataset as LazyDataset
    from twinkle_data.dataset.packed import PackingDataset as PackingDataset
    from twinkle_data.dataset.packed_stream import IterablePackingDataset as IterablePackingDataset
