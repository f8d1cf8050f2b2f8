"""The source of a data set, as a small record that can be compared and pickled."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from twinkle.errors import ArgumentError, DataError

_DIGEST = re.compile(r":data#\w+$")


@dataclass
class DatasetMeta:
    """Names a data set and the part of it to use.

    Attributes:
        dataset_id: a local file (jsonl, json, csv, parquet, arrow, feather, txt), a folder of such files, or one
            that `save_to_disk` of `datasets` wrote; or a reference `scheme://...` of a hub
            (`builtin://self-cognition`, `hf://org/name`); or `org/name` of the hub that `TWINKLE_DEFAULT_HUB` names, if
            there is no such path; the oldest ids of Hugging Face have no `org/` (`hf://gsm8k`). With `data` it is only
            a name.
        subset_name: a configuration of a hub's data set, or a sub-folder of a local folder.
        split: `train`, `test`, ...; in a local folder, the name of a subfolder or a word in a file's name.
        data_slice: number of first rows, or the indices of the rows in order: a range, a slice, a list or another
            iterable of ints. An index i >= n, the number of rows, means row i mod n, so `range(500)` of 200 rows
            repeats rows.
        data: rows in memory: a list of dicts, a dict of columns, a `datasets.Dataset` or `DatasetDict`, a
            `pyarrow.Table`, or a function without arguments that returns one of these. `IterableDataset` also accepts
            an object that can be iterated repeatedly, and a function that returns an iterator.
    """

    dataset_id: str = ""
    subset_name: str = "default"
    split: str = "train"
    data_slice: Iterable[int] | slice | int | None = None
    data: Any = None

    def __post_init__(self) -> None:
        """Store the indices of an iterator, which can be read only once; check `dataset_id`."""
        given: object = self.dataset_id
        if not isinstance(given, str | PathLike):
            raise ArgumentError(
                f"dataset_id is a {type(given).__name__}, not a text; rows in memory go into data: "
                "DatasetMeta(data=rows)"
            )
        self.data_slice = _kept(self.data_slice)

    def get_id(self) -> str:
        """Return a text that is equal for equal records, and differs where source, split, slice or data differ."""
        parts = [str(self.dataset_id), self.subset_name, self.split]
        if self.data_slice is not None:
            parts.append(_short(self.data_slice))
        if self.data is not None:
            parts.append(_identity(self.data))
        return ":".join(parts)


def readable(name: str) -> str:
    """Return `get_id` of a record in a readable form, without digest of rows and without defaults."""
    text = _DIGEST.sub("", name).replace(":default:train", "", 1)
    return f"in memory{text}" if text[:1] in ("", ":") else text


def all_readable(names: Iterable[str], between: str = ", ") -> str:
    """Return several of them as one text."""
    return between.join(map(readable, names))


def _kept(wanted: Any) -> Any:
    """Return `data_slice` so that it can be read more than once: a count as a slice, an iterator as a list."""
    if wanted is None or isinstance(wanted, range | slice | list | tuple | str):
        return wanted
    if isinstance(wanted, Iterable):
        return list(wanted)
    if isinstance(wanted, bool) or not hasattr(wanted, "__index__") or wanted.__index__() < 1:
        raise DataError(f"data_slice is {wanted!r}; give a count from 1 on, a range, a slice or row numbers")
    return slice(wanted.__index__())


def _short(indices: Any) -> str:
    text = repr(indices)
    return text if len(text) <= 40 else f"{text[:16]}...#{_digest(text)}"


def _identity(data: Any) -> str:
    if isinstance(data, list | Mapping):
        return f"data#{_digest(repr(data))}"
    fingerprint = getattr(data, "_fingerprint", None)
    if fingerprint is not None:
        return f"data#{fingerprint}"
    if callable(data):
        return f"{getattr(data, '__module__', '')}.{getattr(data, '__qualname__', repr(data))}"
    return f"data#{_digest(repr(data))}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
