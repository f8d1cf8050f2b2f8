"""The packed data set: concatenates encoded rows up to the maximum length, and the rules of packing."""

import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import repeat
from numbers import Number
from typing import Any

from twinkle.dataset.meta import DatasetMeta
from twinkle.errors import DataError, TrainingStateError
from twinkle.logging import get_logger
from twinkle.preprocessor.base import Preprocessor
from twinkle.runtime import remote_class, remote_function
from twinkle_data.dataset.base import Dataset
from twinkle_data.dataset.calls import from_one
from twinkle_data.dataset.encoding import token_counts
from twinkle_data.dataset.table import Table
from twinkle_torch.collate import TOKEN_KEYS

DEFAULT_CAPACITY = 2048
GROUP_ROWS = 1000
_remote = remote_function(dispatch="all", execute="first", collect="first")


def capacity_of(template: Any) -> int:
    """Return the capacity of a pack in tokens: the template's `max_length`, or 2048 without a template.

    Raises:
        TrainingStateError: the template has no limit.
    """
    if template is None:
        return DEFAULT_CAPACITY
    capacity = getattr(template, "max_length", None)
    if not isinstance(capacity, int) or capacity < 1:
        raise TrainingStateError(
            f"the template's max_length is {capacity!r}, so there is no size for a pack; "
            "call set_template(..., max_length=...) with a number of tokens"
        )
    return capacity


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Divide rows into packs, best fit decreasing: each row, longest first, is added to the fullest pack that fits.

    Hardly ever more than 11/9 of the fewest possible packs (Johnson 1973), and nearly full ones where rows are much
    shorter than a pack. The same lengths give the same packs.

    Args:
        lengths: tokens of each row, each from 1 to `capacity`.
        capacity: tokens of a pack.

    Returns:
        The row numbers of each pack, ascending; packs in the order of their first rows.
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, number of the pack), sorted
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = bisect.bisect_left(room, (lengths[row], -1))
        if place == len(room):
            free, pack = capacity, len(packs)
            packs.append([])
        else:
            free, pack = room.pop(place)
        packs[pack].append(row)
        bisect.insort(room, (free - lengths[row], pack))
    return sorted(map(sorted, packs))


def check_lengths(lengths: Sequence[int], capacity: int, first: int = 0) -> None:
    """Raise `DataError` for the first row that has no tokens or does not fit into a pack."""
    for number, length in enumerate(lengths, first):
        if length < 1:
            raise DataError(f"row {number} has no tokens, so it cannot be packed; encode it first, and drop empty rows")
        if length > capacity:
            raise DataError(
                f"row {number} has {length} tokens, but a pack holds {capacity}; set max_length={length} of the "
                "template, or a truncation_strategy that shortens or drops the row"
            )


def joined(rows: Sequence[Mapping[str, Any]], numbers: Sequence[int], token_keys: Collection[str]) -> dict[str, Any]:
    """Concatenate rows to one row.

    Args:
        rows: encoded rows, each with `input_ids`.
        numbers: of the rows, for errors.
        token_keys: names whose values have one entry a token (`token_keys_of`).

    Returns:
        `input_ids`, `position_ids` (which begin at 0 with every row), and the other token keys, concatenated; `length`,
        the number of all tokens; everything else as a list with one entry a row.

    Raises:
        DataError: a row lacks a token key that others have, or has the wrong number of entries; its positions do not
            begin at 0; or its last label is trained, and so would teach the first token of its neighbour.
    """
    for row, number in zip(rows, numbers, strict=True):
        _check_row(row, number, token_keys)
    pack: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key) for row in rows]
        if key in token_keys:
            pack[key] = [entry for value in values for entry in _entries(value)]
        elif key != "length":
            pack[key] = values
    if "position_ids" not in token_keys:
        pack["position_ids"] = [place for row in rows for place in range(len(row["input_ids"]))]
    pack["length"] = len(pack["input_ids"])
    return pack


def token_keys_of(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the keys that have, in every row that has them, one number (or list of numbers) for each token."""
    keys = {key for row in rows for key, value in row.items() if value is not None}
    token_keys = {key for key in keys if key in TOKEN_KEYS}
    for key in keys - token_keys:
        values = [(row[key], len(row["input_ids"])) for row in rows if row.get(key) is not None]
        if all(_one_a_token(value, length) for value, length in values):
            token_keys.add(key)
    return token_keys


def _one_a_token(value: Any, length: int) -> bool:
    if hasattr(value, "shape"):
        return bool(value.shape) and int(value.shape[0]) == length
    return isinstance(value, Sequence) and len(value) == length and not isinstance(value, str) and _numeric(value)


def _numeric(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return all(map(_numeric, value))
    return isinstance(value, Number)


def _check_row(row: Mapping[str, Any], number: int, token_keys: Collection[str]) -> None:
    length = len(row["input_ids"])
    for key in token_keys:
        size = None if row.get(key) is None else len(row[key])
        if size != length:
            problem = f"no {key!r}, which other rows have" if size is None else f"{size} entries of {key!r}"
            raise DataError(f"row {number} has {problem}, for {length} tokens; to be packed, every token needs one")
    if "labels" in token_keys and int(row["labels"][-1]) != -100:
        raise DataError(
            f"row {number}: the last label is {int(row['labels'][-1])}, but labels[i] is the target of position i, so "
            "the last one must be -100; packed, it would be learnt from the wrong row"
        )
    if "position_ids" in token_keys and int(row["position_ids"][0]) != 0:
        raise DataError(
            f"row {number}: position_ids begin at {int(row['position_ids'][0])}; packed rows are separated by "
            "positions that begin at 0"
        )


def _entries(value: Any) -> Sequence[Any]:
    to_list: Callable[[], Any] | None = getattr(value, "tolist", None)
    entries: Sequence[Any] = value if to_list is None else to_list()
    return entries


class Fill:
    """Statistics of packing, for the log."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.rows, self.tokens, self.packs = capacity, 0, 0, 0

    def add(self, lengths: Sequence[int]) -> None:
        """Count one pack of rows of these lengths."""
        self.rows += len(lengths)
        self.tokens += sum(lengths)
        self.packs += 1

    def __str__(self) -> str:
        ratio = self.tokens / (self.packs * self.capacity) if self.packs else 0.0
        return (
            f"packed {self.rows} rows of {self.tokens} tokens into {self.packs} packs of {self.capacity}: "
            f"{ratio:.1%} full"
        )


@remote_class(execute="first")
class PackingDataset(Dataset):
    """A data set whose encoded rows are packed: after `encode` call `pack_dataset`.

    A row of it is then several rows one after the other, at most as long as the template's `max_length` (2048 without a
    template). `position_ids` begin at 0 with every one of them, which is how a model tells them apart; labels are
    shifted within each row already, so nothing is learnt across a border.
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None, packing_num_proc: int = 1, **kwargs: Any) -> None:
        """Load the rows; errors are those of `Dataset`.

        Args:
            dataset_meta: as for `Dataset`.
            packing_num_proc: how many processes find out which rows go together; the result is the same for any.
            **kwargs: as for `Dataset`.

        Raises:
            ArgumentError: `packing_num_proc` is no number from 1.
        """
        self.packing_num_proc = from_one("packing_num_proc", packing_num_proc)
        self._packs: list[list[int]] | None = None
        self._token_keys: frozenset[str] = frozenset()
        self._lengths: list[int] = []
        super().__init__(dataset_meta, **kwargs)

    @_remote
    def pack_dataset(self) -> None:
        """Assign rows to packs, best fit decreasing in groups of 1000 rows; the log reports how full packs are.

        Raises:
            TrainingStateError: rows are not encoded, or are packed already; or the template has no `max_length`.
            DataError: a row has more tokens than a pack holds, or none; the message names it.
        """
        self._refuse_change("pack_dataset")
        table, capacity = self._table(), capacity_of(self.template)
        if "input_ids" not in table.names:
            raise TrainingStateError(
                f"pack_dataset() packs encoded rows, but there is no column input_ids (there is "
                f"{', '.join(table.names)}); call encode() first"
            )
        lengths = token_counts(table, "input_ids")
        check_lengths(lengths, capacity)
        starts = range(0, len(lengths), GROUP_ROWS)
        groups = [lengths[start : start + GROUP_ROWS] for start in starts]
        plans = zip(starts, _packs_of(groups, capacity, self.packing_num_proc), strict=True)
        self._packs = [[start + row for row in pack] for start, packs in plans for pack in packs]
        self._token_keys = _token_columns(table, lengths)
        self._lengths = [sum(lengths[row] for row in pack) for pack in self._packs]
        fill = Fill(capacity)
        for pack in self._packs:
            fill.add([lengths[row] for row in pack])
        get_logger(__name__).info("%s", fill)

    @_remote
    def __len__(self) -> int:
        """Return the number of packs; before `pack_dataset`, of rows."""
        return super().__len__() if self._packs is None else len(self._packs)

    @_remote
    def __getitem__(self, idx: Any) -> Any:
        """Return pack `idx` as one encoded row; other indices, and all before `pack_dataset`, as for `Dataset`.

        A pack has `input_ids`, `labels`, `position_ids` and every other key with one entry a token, concatenated;
        `length`, the number of its tokens; and everything else as a list with one entry a packed row.

        Raises:
            DataError: a row cannot be packed with others; see `twinkle_data.dataset.packed.joined`.
        """
        if self._packs is None:
            return super().__getitem__(idx)
        size = len(self._packs)
        if isinstance(idx, str):
            return Preprocessor.map_row_to_col(list(self._every_row()))[idx]
        if isinstance(idx, slice | list | tuple | range):
            numbers = range(size)[idx] if isinstance(idx, slice) else [range(size)[number] for number in idx]
            return Preprocessor.map_row_to_col([self._pack(number) for number in numbers])
        pack = self._pack(range(size)[idx])
        self._saving.record(range(size)[idx], pack)
        return pack

    @property
    def column_names(self) -> list[str]:
        """The names of the columns."""
        return super().column_names if self._packs is None else list(self._pack(0))

    @_remote
    def row_lengths(self) -> list[int]:
        """Return the number of tokens of every pack; before `pack_dataset`, of every row."""
        return super().row_lengths() if self._packs is None else list(self._lengths)

    # Inside

    def _pack(self, number: int) -> dict[str, Any]:
        members = (self._packs or [])[number]
        rows = Preprocessor.map_col_to_row(self._table().columns(members))
        return joined(rows, members, self._token_keys)

    def _refuse_change(self, change: str) -> None:
        if self._packs is not None:
            raise TrainingStateError(f"the rows are packed already; call {change} before pack_dataset()")
        super()._refuse_change(change)

    def _saved_columns(self) -> list[str] | None:
        return super()._saved_columns() if self._packs is None else None

    def _every_row(self) -> Iterator[dict[str, Any]]:
        return super()._every_row() if self._packs is None else map(self._pack, range(len(self._packs)))


def _packs_of(groups: Sequence[Sequence[int]], capacity: int, processes: int) -> list[list[list[int]]]:
    pack = partial(pack_lengths, capacity=capacity)
    if processes == 1 or len(groups) == 1:
        return list(map(pack, groups))
    with ProcessPoolExecutor(min(processes, len(groups))) as pool:
        return list(pool.map(pack_lengths, groups, repeat(capacity), chunksize=16))


def _token_columns(table: Table, lengths: Sequence[int]) -> frozenset[str]:
    """Return the columns that have one number (or list of numbers) for each token of every row."""
    columns = set()
    for name in set(table.names) - table.packed:
        counts = token_counts(table, name)
        if name in TOKEN_KEYS:
            if any(count > 0 for count in counts):
                columns.add(name)
        elif counts == list(lengths) and _holds_numbers(table, name):
            columns.add(name)
    return frozenset(columns)


def _holds_numbers(table: Table, name: str) -> bool:
    import pyarrow

    kind = table.hf.data.table.schema.field(name).type
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return bool(pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind))
