"""The packed data set: encoded rows put together into rows as long as the model takes."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import repeat
from typing import Any

from twinkle.dataset.meta import DatasetMeta
from twinkle.errors import ArgumentError, TrainingStateError
from twinkle.logging import get_logger
from twinkle.preprocessor.base import Preprocessor
from twinkle.runtime import remote_class, remote_function
from twinkle_data.dataset.base import Dataset
from twinkle_data.dataset.encoding import token_counts
from twinkle_data.dataset.packing import GROUP_ROWS, Fill, capacity_of, check_lengths, joined, pack_lengths
from twinkle_data.dataset.table import Table
from twinkle_torch.collate import TOKEN_KEYS

_remote = remote_function(dispatch="all", execute="first", collect="first")


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
        """Decide which rows go together, best fit decreasing in groups of 1000 rows; the log says how full packs are.

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
        found = zip(starts, _packs_of(groups, capacity, self.packing_num_proc), strict=True)
        self._packs = [[start + row for row in pack] for start, packs in found for pack in packs]
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
            DataError: a row cannot be packed with others, as `twinkle_data.dataset.packing.joined` says.
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


def from_one(name: str, value: Any) -> int:
    """Return a whole number from 1 on, or raise `ArgumentError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} is {value!r}; give a whole number from 1")
    return value


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
