"""Rows on their way to a service: sources of this machine are read here, and bytes have a form on the wire."""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from twinkle.errors import DataError, Unsupported

if TYPE_CHECKING:
    from twinkle.dataset.meta import DatasetMeta

_MOST: Final = 1_000_000
_BYTES: Final = "$bytes"


def meta_fields(meta: "DatasetMeta") -> dict[str, Any]:
    """Return a `DatasetMeta` for a request: with its rows, if they are in memory or in a file of this machine.

    Raises:
        DataError: the file has no rows, or there are too many.
        Unsupported: the file has a format that cannot be read here.
    """
    fields: dict[str, Any] = {"dataset_id": str(meta.dataset_id), "subset_name": meta.subset_name, "split": meta.split}
    if meta.data_slice is not None:
        fields["data_slice"] = _slice(meta.data_slice)
    data = meta.data
    if data is None and _is_file(fields["dataset_id"]):
        data = _read(Path(fields["dataset_id"]).expanduser())
        fields["dataset_id"] = Path(fields["dataset_id"]).name
    if data is not None:
        fields["data"] = without_bytes(_in_memory(data, meta.split))
    return fields


def without_bytes(value: Any) -> Any:
    """Return a value in which bytes are tensors, as the wire has them."""
    if isinstance(value, bytes | bytearray):
        import numpy as np

        return {_BYTES: np.frombuffer(bytes(value), np.uint8)}
    if isinstance(value, Mapping):
        return {key: without_bytes(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        return [without_bytes(item) for item in value]
    return value


def with_bytes(value: Any) -> Any:
    """Undo `without_bytes`."""
    if isinstance(value, dict):
        if len(value) == 1 and _BYTES in value:
            return bytes(value[_BYTES].tobytes())
        return {key: with_bytes(item) for key, item in value.items()}
    if isinstance(value, list) and value and not isinstance(value[0], int | float):
        return [with_bytes(item) for item in value]
    return value


def _slice(chosen: Any) -> Any:
    if isinstance(chosen, range):
        return {"$range": [chosen.start, chosen.stop, chosen.step]}
    if isinstance(chosen, slice):
        return {"$slice": [chosen.start, chosen.stop, chosen.step]}
    return chosen if isinstance(chosen, int) else list(chosen)


def _in_memory(data: Any, split: str) -> Any:
    if callable(data) and not isinstance(data, type):
        data = data()
    if hasattr(data, "to_pylist"):  # pyarrow.Table
        return data.to_pylist()
    if isinstance(data, Mapping):
        if data and all(hasattr(value, "column_names") for value in data.values()):  # datasets.DatasetDict
            return _in_memory(data[split], split)
        return {key: list(values) for key, values in data.items()}
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise DataError(f"data is a {type(data).__name__}; give a list of dicts or a dict of columns")
    rows = list(itertools.islice(iter(data), _MOST + 1))
    if len(rows) > _MOST:
        raise DataError(f"data has more than {_MOST} rows; send a part, or ask the operator to offer the data set")
    return rows


def _is_file(name: str) -> bool:
    return bool(name) and "://" not in name and Path(name).expanduser().is_file()


def _read(path: Path) -> list[dict[str, Any]]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise Unsupported(
            f"{path} cannot be sent to the service: the client reads {', '.join(_READERS)}; load it with "
            "twinkle.dataset.Dataset, and send its rows: DatasetMeta(data=list(dataset))"
        )
    try:
        rows = reader(path.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is malformed: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} holds no rows; a row is an object")
    return rows


def _json(text: str) -> list[Any]:
    rows = json.loads(text)
    return rows if isinstance(rows, list) else [rows]


_READERS: Final[Mapping[str, Callable[[str], list[Any]]]] = {
    ".jsonl": lambda text: [json.loads(line) for line in text.splitlines() if line.strip()],
    ".json": _json,
}
