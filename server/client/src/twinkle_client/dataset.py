"""Data sets that live on a service, with the methods of `twinkle.dataset`."""

# mypy: disable-error-code="empty-body"

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from twinkle.dataset.protocol import NotSized
from twinkle.errors import ArgumentError, OutputError, TwinkleError, Unsupported
from twinkle_client.data import Client, Iterated, remote

if TYPE_CHECKING:
    from twinkle.dataset.meta import DatasetMeta

__all__ = ["Dataset", "IterableDataset", "IterablePackingDataset", "LazyDataset", "PackingDataset"]
_PAGE: Final = 256
_FORMATS: Final = ("jsonl", "json")


class _Rows(Iterated):
    """The methods of all data sets.

    Attributes:
        sized: whether it has a length.
    """

    kind: ClassVar[str] = "dataset"
    eager: ClassVar[bool] = True
    page: ClassVar[int] = _PAGE
    sized: ClassVar[bool] = True

    @remote
    def set_template(self, template_func: Any, **kwargs: Any) -> None:
        """Set the template for `encode` and `check`: a name, with its arguments, or a template of the client."""

    @remote
    def encode(self, add_generation_prompt: bool = False, *, timeout: float = 600.0, **kwargs: Any) -> None:
        """Encode conversations to tokens and labels; `timeout` is the seconds to wait for the service."""

    @remote
    def check(self, **kwargs: Any) -> None:
        """Drop the rows that the template cannot encode."""

    @remote
    def cast_column(self, column: str, decode: bool = True) -> None:
        """Convert a column to images."""

    @remote
    def map(
        self,
        preprocess_func: Any,
        dataset_meta: "DatasetMeta | None" = None,
        init_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Replace the columns by the result of a preprocessor that is installed on the service."""

    @remote
    def filter(
        self,
        filter_func: Any,
        dataset_meta: "DatasetMeta | None" = None,
        init_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the rows for which a filter that is installed on the service returns true."""

    @remote
    def add_dataset(self, dataset_meta: "DatasetMeta", **kwargs: Any) -> None:
        """Load a further set."""

    @remote
    def mix_dataset(self, interleave: bool = True) -> None:
        """Join all added data sets."""

    def save_as(
        self,
        output_path: str | Path,
        format: str | None = None,
        batch_size: int = 1000,
        mode: str = "immediate",
        **kwargs: Any,
    ) -> None:
        """Write the rows to a file of this machine; the service writes none.

        Args:
            output_path: the file; an existing one is replaced.
            format: jsonl or json; by default the ending of `output_path`.
            batch_size: must be at least 1; the client writes row by row.
            mode: `immediate`.
            **kwargs: none; an unknown name is an error.

        Raises:
            ArgumentError: an unknown format or keyword.
            Unsupported: `mode="training"`, or a format that the client does not write.
            OutputError: the file cannot be written.
        """
        if kwargs:
            raise ArgumentError(f"save_as has no argument {next(iter(kwargs))!r}")
        if mode != "immediate":
            raise Unsupported(f"save_as(mode={mode!r}): the rows are on the service; use mode='immediate'")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ArgumentError(f"save_as: batch_size is {batch_size!r}; give a number of rows above 0")
        path = Path(output_path)
        chosen = format or path.suffix.removeprefix(".").lower()
        if chosen not in _FORMATS:
            raise Unsupported(f"save_as: a client writes {' and '.join(_FORMATS)}, got {chosen!r}")
        try:
            _write(self, path, chosen)
        except OSError as error:
            if isinstance(error, TwinkleError):
                raise
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from error

    def flush_save(self) -> None:
        """Refuse: only `save_as(mode="training")` of a local data set leaves something to complete."""
        raise Unsupported(
            "flush_save() completes a save_as(mode='training'), which a data set of a service does not have"
        )


class Dataset(_Rows):
    """Rows with a length on a service.

    Args:
        dataset_meta: where they are: rows in memory or in a jsonl or json file of this machine, which are sent;
            `builtin://...`; or an id that the service offers. None makes an empty set for `add_dataset`.
        client: by default that of the last `init_twinkle_client`.
        **kwargs: of the source, such as `revision`.

    Raises:
        DataError: the service cannot load it, it is malformed, or it has too many rows.
    """

    def __init__(
        self, dataset_meta: "DatasetMeta | None" = None, *, client: Client | None = None, **kwargs: Any
    ) -> None:
        super().__init__(type(self).__name__, () if dataset_meta is None else (dataset_meta,), kwargs, client=client)

    @remote
    def __len__(self) -> int:
        """Return the number of rows."""

    @remote
    def __getitem__(self, idx: Any) -> Any:
        """Return row `idx` as a dict; for a slice or a list of indices, columns; for a column's name, its values."""

    @property
    def column_names(self) -> list[str]:
        """The names of the columns."""
        names: list[str] = self._run(self._invoke("column_names", {}))
        return names

    @remote
    def row_lengths(self) -> list[int]:
        """Return the number of tokens of every row."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield every row; several iterations may run at the same time."""
        start, size = 0, len(self)
        while start < size:
            rows = self._run(self._invoke("rows", {"start": start, "count": self.page}))
            yield from rows
            start += len(rows)


class LazyDataset(Dataset):
    """Raw rows on a service, mapped and encoded on access."""


class PackingDataset(Dataset):
    """Encoded rows on a service, packed into rows of the maximum length."""

    def __init__(
        self,
        dataset_meta: "DatasetMeta | None" = None,
        packing_num_proc: int = 1,
        *,
        client: Client | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset_meta, client=client, packing_num_proc=packing_num_proc, **kwargs)

    @remote
    def pack_dataset(self) -> None:
        """Pack the encoded rows."""


class IterableDataset(_Rows):
    """A stream of rows on a service. Arguments and errors are those of `Dataset`."""

    sized: ClassVar[bool] = False

    def __init__(
        self, dataset_meta: "DatasetMeta | None" = None, *, client: Client | None = None, **kwargs: Any
    ) -> None:
        super().__init__(type(self).__name__, () if dataset_meta is None else (dataset_meta,), kwargs, client=client)

    def __len__(self) -> int:
        """Refuse: a stream has no length."""
        raise NotSized("a stream has no length; iterate over it, or use Dataset")

    def __getitem__(self, idx: Any) -> Any:
        """Refuse: a stream has no row numbers."""
        raise NotSized("a stream has no row numbers; iterate over it, or use Dataset")


class IterablePackingDataset(IterableDataset):
    """A stream of rows on a service, packed window by window."""

    def __init__(
        self,
        dataset_meta: "DatasetMeta | None" = None,
        packing_interval: int = 128,
        packing_num_proc: int = 1,
        cyclic: bool = False,
        *,
        client: Client | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset_meta, client=client, packing_interval=packing_interval, packing_num_proc=packing_num_proc,
            cyclic=cyclic, **kwargs,
        )  # fmt: skip

    @remote
    def pack_dataset(self) -> None:
        """Record that rows are packed."""


def _write(rows: Any, path: Path, chosen: str) -> None:
    """Write rows to a new file, and rename it when it is complete."""
    work = path.with_name(f".{path.name}.part")
    try:
        with work.open("w", encoding="utf-8") as file:
            before, between, after = ("[\n", ",\n", "\n]\n") if chosen == "json" else ("", "\n", "\n")
            file.write(before)
            for number, row in enumerate(rows):
                file.write((between if number else "") + json.dumps(row, ensure_ascii=False))
            file.write(after)
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
