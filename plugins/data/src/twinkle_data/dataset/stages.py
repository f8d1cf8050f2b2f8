"""Recorded steps of `map`, `filter`, `encode` and `check`, applied to chunks of rows when these are read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle.filter import Filter
from twinkle.preprocessor.base import Preprocessor
from twinkle_data.dataset.calls import Call, call_on_columns, called_with, clean_column, require_one_length
from twinkle_data.dataset.encoding import CheckCall, EncodeCall

Row = dict[str, Any]

MAP_OPTIONS = frozenset({"batch_size", "remove_columns", "fn_kwargs"})
FILTER_OPTIONS = frozenset({"fn_kwargs"})


@dataclass
class Chunk:
    """A chunk of rows, with their indices for errors: the index in the source, or the range of the whole chunk."""

    rows: list[Row]
    numbers: list[int | str]

    @classmethod
    def of(cls, rows: Sequence[Row], first: int) -> "Chunk":
        """Return rows numbered from `first` on."""
        return cls(list(rows), list(range(first, first + len(rows))))

    def parts(self, size: int) -> "Iterable[Chunk]":
        """Yield the rows in parts of at most `size`."""
        for start in range(0, len(self.rows), size):
            place = slice(start, start + size)
            yield Chunk(self.rows[place], self.numbers[place])

    def replaced(self, rows: list[Row]) -> "Chunk":
        """Return a chunk with other rows; if their number is the same, the indices are kept."""
        if len(rows) == len(self.rows) or not self.numbers:
            return Chunk(rows, self.numbers)
        ends = (str(self.numbers[0]).split(" to ")[0], str(self.numbers[-1]).split(" to ")[-1])
        return Chunk(rows, [ends[0] if ends[0] == ends[1] else " to ".join(ends)] * len(rows))


@dataclass(frozen=True)
class MapStage:
    """Calls a preprocessor with the columns of at most `batch_size` rows at a time."""

    function: Callable[..., Any]
    name: str
    drop: frozenset[str] = frozenset()
    batch_size: int = 1000
    fn_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, chunk: Chunk) -> Chunk:
        """Return the result of the preprocessor."""
        return _joined(part.replaced(self._rows(part.rows)) for part in chunk.parts(self.batch_size))

    def _rows(self, rows: list[Row]) -> list[Row]:
        columns = Preprocessor.map_row_to_col(rows)
        results = call_on_columns(self.function, columns, self.name, self.drop, fn_kwargs=self.fn_kwargs)
        return _as_rows(results, self.name)


@dataclass(frozen=True)
class FilterStage:
    """Keeps the rows for which a function is true."""

    function: Callable[..., Any]
    name: str
    fn_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def begin(self) -> None:
        """Reset the filter before a new pass over the rows."""
        if isinstance(self.function, Filter):
            self.function.reset()

    def __call__(self, chunk: Chunk) -> Chunk:
        """Return the rows that stay."""
        keep = [bool(self.function(row, **self.fn_kwargs)) for row in chunk.rows]
        return _kept(chunk, keep)


@dataclass(frozen=True)
class EncodeStage:
    """Encodes at most `batch_size` rows at a time by a template; rows without tokens are dropped."""

    call: EncodeCall
    batch_size: int = 1000
    name: str = "encode"

    def __call__(self, chunk: Chunk) -> Chunk:
        """Return the encoded rows."""
        return _joined(part.replaced(self._rows(part)) for part in chunk.parts(self.batch_size))

    def _rows(self, part: Chunk) -> list[Row]:
        return _as_rows(self.call(Preprocessor.map_row_to_col(part.rows), part.numbers), self.name)


@dataclass(frozen=True)
class EncodeMissing:
    """Encodes the rows that have no `input_ids`."""

    stage: EncodeStage
    name: str = "encode"

    def __call__(self, chunk: Chunk) -> Chunk:
        """Return the chunk with all rows encoded."""
        return self.stage(chunk) if any("input_ids" not in row for row in chunk.rows) else chunk


@dataclass(frozen=True)
class CheckStage:
    """Drops the rows that a template cannot encode, in batches of `batch_size` rows."""

    call: CheckCall
    batch_size: int = 1000
    name: str = "check"

    def __call__(self, chunk: Chunk) -> Chunk:
        """Return the rows that can be encoded."""
        return _joined(map(self._passed, chunk.parts(self.batch_size)))

    def _passed(self, part: Chunk) -> Chunk:
        passed = [pair for pair in zip(self.call.rows(part.rows), part.numbers, strict=True) if pair[0] is not None]
        return Chunk([row for row, _ in passed if row is not None], [number for _, number in passed])


@dataclass(frozen=True)
class ImageStage:
    """Converts one column to images."""

    column: str
    decode: bool
    name: str = "cast_column"

    def __call__(self, chunk: Chunk) -> Chunk:
        """Return the rows with images."""
        import datasets

        feature = datasets.Image(decode=self.decode)
        return Chunk([self._row(row, feature) for row in chunk.rows], chunk.numbers)

    def _row(self, row: Row, feature: Any) -> Row:
        if row.get(self.column) is None:
            return row
        try:
            value = feature.encode_example(row[self.column])
            image = feature.decode_example(value) if self.decode else value
        except (ValueError, TypeError, AttributeError, OSError) as error:
            raise DataError(f"cast_column: column {self.column!r} cannot hold images: {error}") from error
        return {**row, self.column: image}


Stage = MapStage | FilterStage | EncodeStage | EncodeMissing | CheckStage | ImageStage


def run_stages(stages: Iterable[Stage], chunk: Chunk) -> Chunk:
    """Apply all stages to a chunk of rows."""
    for stage in stages:
        chunk = stage(chunk)
    return chunk


def map_stage(x: Any, init_args: Mapping[str, Any] | None, kwargs: Mapping[str, Any]) -> MapStage:
    """Return the stage of a call of `map`.

    Raises:
        ArgumentError: a keyword that neither the preprocessor nor the stage takes.
        ComponentTypeError: `x` is no preprocessor.
    """
    call = called_with(x, "preprocessor", init_args, _read_when_asked("map", kwargs), MAP_OPTIONS)
    drop = call.options.get("remove_columns") or ()
    drop = [drop] if isinstance(drop, str) else drop
    size = _batch_size(call, "map")
    fn_kwargs = call.options.get("fn_kwargs") or {}
    return MapStage(call.component, f"map({call.name})", frozenset(drop), size, dict(fn_kwargs))


def filter_stage(x: Any, init_args: Mapping[str, Any] | None, kwargs: Mapping[str, Any]) -> FilterStage:
    """Return the stage of a call of `filter`; errors as for `map_stage`."""
    call = called_with(x, "filter", init_args, _read_when_asked("filter", kwargs), FILTER_OPTIONS)
    return FilterStage(call.component, f"filter({call.name})", dict(call.options.get("fn_kwargs") or {}))


def encode_stage(template: Any, add_generation_prompt: bool, kwargs: Mapping[str, Any]) -> EncodeStage:
    """Return the stage of a call of `encode`, which also takes `batch_size`."""
    call = EncodeCall(template, {"add_generation_prompt": add_generation_prompt})
    return EncodeStage(call, _only_batch_size("encode", kwargs))


def check_stage(template: Any, kwargs: Mapping[str, Any]) -> CheckStage:
    """Return the stage of a call of `check`, which takes `batch_size`."""
    return CheckStage(CheckCall(template), _only_batch_size("check", kwargs))


def _only_batch_size(what: str, kwargs: Mapping[str, Any]) -> int:
    rest = called_with(_nothing, what, None, _read_when_asked(what, kwargs), frozenset({"batch_size"}))
    return _batch_size(rest, what)


def _nothing() -> None:
    """Represents a component without arguments."""


def _read_when_asked(what: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Remove keywords of `datasets` that equal the fixed behaviour, and refuse other values of them."""
    rest = dict(kwargs)
    if rest.pop("num_proc", None) not in (None, 1):
        raise ArgumentError(
            f"{what}(num_proc={kwargs['num_proc']!r}): rows are made when they are read, so it starts no processes; "
            "give DataLoader num_workers= instead"
        )
    if rest.pop("load_from_cache_file", None):
        raise Unsupported(
            f"{what}(load_from_cache_file=True): rows are made when they are read and not kept; use Dataset"
        )
    return rest


def _batch_size(call: Call, what: str) -> int:
    size = call.options.get("batch_size", 1000)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ArgumentError(f"{what}: batch_size is {size!r}; give a number of rows above 0")
    return size


def _as_rows(columns: Mapping[str, Sequence[Any]], what: str) -> list[Row]:
    require_one_length(columns, what)
    return Preprocessor.map_col_to_row(
        {name: clean_column(name, list(values), deep=False) for name, values in columns.items()}
    )


def _kept(chunk: Chunk, keep: Sequence[bool]) -> Chunk:
    places = [place for place, kept in enumerate(keep) if kept]
    return Chunk([chunk.rows[place] for place in places], [chunk.numbers[place] for place in places])


def _joined(parts: Iterable[Chunk]) -> Chunk:
    joined = Chunk([], [])
    for part in parts:
        joined.rows += part.rows
        joined.numbers += part.numbers
    return joined
