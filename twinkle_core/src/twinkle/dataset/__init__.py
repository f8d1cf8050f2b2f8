"""Data sets: the contract `DatasetLike`, `DatasetMeta`, and every installed data set by name."""

from twinkle._lazy import room
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.protocol import DatasetLike

__all__ = ["DatasetLike", "DatasetMeta"]

__getattr__, __dir__ = room(__name__, "dataset")
