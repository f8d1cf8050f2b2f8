"""Data sets: the contracts `DatasetLike` and `StreamLike`, `DatasetMeta`, and every installed data set by name."""

from twinkle._registry import lazy_names
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.protocol import DatasetLike, StreamLike

__all__ = ["DatasetLike", "DatasetMeta", "StreamLike"]

__getattr__, __dir__ = lazy_names(__name__, "dataset")
