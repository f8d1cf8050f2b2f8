"""Creates the loaders of training and held-out rows from the configuration."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar, cast

from twinkle.data_format import IGNORE_INDEX
from twinkle.dataset.protocol import StreamLike
from twinkle.errors import ConfigError, DataError, EncodeError
from twinkle.logging import get_logger
from twinkle.mesh import DeviceMesh
from twinkle.platform import Platform
from twinkle_recipes.config import DataConfig, RunConfig, SFTConfig, parse_slice

_ROW = re.compile(r"row (\d+): ")


Config = TypeVar("Config", bound=RunConfig)
Wanted = list[int] | slice | None
"""Rows of a data set: a list of indices, a slice of a stream, or None for all."""
_CONVERSATIONS = ("messages", "positive", "negative")
_GAP = re.compile(r"\{\{[A-Z][A-Z_]*\}\}")
_NOTHING: Mapping[str, Any] = {}
_INSPECTED = 1000
_INSPECTED_OF_STREAM = 64
_FEW_ROWS = 10  # with fewer rows, each one contributes more than a tenth to a mean


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable the progress bar of `datasets` for each pass over the rows."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


@without_bars()
def loaders(config: Config, encode: Callable[[Any, Config], None] | None = None) -> tuple[Any, Any]:
    """Return the loader of the training rows and that of the evaluation rows (None without evaluation).

    A held-out row is never trained on: rows with the same content are always on the same side. A stream has no
    held-out rows.

    Args:
        config: configuration of the run.
        encode: encodes the rows of a data set in place; by default with the configured template.
    """
    data, encode = config.data, encode or encode_rows
    held_out = None
    if data.separate_eval:
        name, split = data.eval_id or data.id, data.eval_split or data.split
        held_out = _loader(_dataset(config, name, split, None, data.eval_args), config, name, None, False, encode)
    rows: list[int] | slice = parse_slice(data.slice) if is_stream(config) else _selected_rows(config)
    if data.eval_fraction and not data.separate_eval and isinstance(rows, list):
        held_out_indices = set(held_out_rows(*_raw(config, rows), data.eval_fraction, config.seed))
        evaluation_indices = sorted(held_out_indices)
        held_out = _loader(
            _dataset(config, data.id, data.split, evaluation_indices),
            config,
            data.id,
            evaluation_indices,
            False,
            encode,
        )
        rows = [row for row in rows if row not in held_out_indices]
    training = _dataset(config, data.id, data.split, rows)
    return _loader(training, config, data.id, rows, data.shuffle, encode), held_out


def held_out_rows(indices: Sequence[int], rows: Sequence[Any], fraction: float, seed: int) -> list[int]:
    """Return the indices of about `fraction` of the rows, at least one, selected by content and seed.

    Rows of the same content are selected together. The selection depends neither on the order of the rows nor on a
    global random generator.

    Raises:
        DataError: no row would remain for training.
    """
    groups: dict[str, list[int]] = {}
    for index, row in zip(indices, rows, strict=True):
        text = json.dumps(row, sort_keys=True, default=repr, ensure_ascii=False)
        groups.setdefault(hashlib.sha256(f"{seed}:{text}".encode()).hexdigest(), []).append(index)
    target = max(1, round(fraction * len(rows)))
    selected: list[int] = []
    for digest in sorted(groups):
        if len(selected) >= target:
            break
        selected += groups[digest]
    if len(selected) >= len(rows):
        raise DataError(
            f"{len(rows)} rows with {len(groups)} different contents cannot be divided into training and evaluation "
            f"rows with eval_fraction {fraction}; give more rows, or eval_fraction: 0"
        )
    return selected


def groups_of_batches(loader: Any, epochs: int | None, size: int) -> Iterator[list[Any]]:
    """Yield groups of `size` batches over all epochs (None: endlessly); the last group may be smaller."""
    batches = (batch for _ in (count() if epochs is None else range(epochs)) for batch in loader)
    while group := list(islice(batches, size)):
        yield group


def batches_per_epoch(loader: Any) -> int | None:
    """Return the number of batches per epoch; None for a stream, whose length is unknown."""
    return None if isinstance(loader.dataset, StreamLike) else len(loader)


def describe_data(training: Any, held_out: Any) -> str:
    """Describe the number of batches per epoch and of held-out rows (None: no evaluation)."""

    def size(loader: Any) -> str:
        batches = batches_per_epoch(loader)
        return "a stream" if batches is None else f"{batches} batch{'' if batches == 1 else 'es'}"

    text = size(training) + ("" if batches_per_epoch(training) is None else " an epoch")
    if held_out is None:
        return text
    rows = None if batches_per_epoch(held_out) is None else len(held_out.dataset)
    few = f" (only {rows}: results are noisy)" if rows is not None and rows < _FEW_ROWS else ""
    return f"{text}; {size(held_out)} of other rows to evaluate on{few}"


def count_steps(config: SFTConfig, batches: int | None) -> int:
    """Return the number of optimizer steps in a run with `batches` batches per epoch (None: a stream)."""
    if batches is None:
        return config.max_steps or 0  # checked by `check_stream`
    steps = -(-config.epochs * batches // config.gradient_accumulation_steps)
    return min(steps, config.max_steps or steps)


def share(batch: Sequence[Any], rank: int, ranks: int) -> list[Any]:
    """Return the rows of a batch that rank `rank` of `ranks` computes, possibly none."""
    return list(batch[rank::ranks])


def count_tokens(batch: Sequence[Any]) -> int:
    """Return the number of tokens of all rows of a batch."""
    return sum(len(row["input_ids"]) for row in batch)


def _selected_rows(config: RunConfig) -> list[int]:
    data = config.data
    size = len(_source(config, data.id, data.split, None))
    rows = list(range(size))[parse_slice(data.slice)]
    if not rows:
        raise DataError(f"data set {data.id}: slice {data.slice!r} of {size} rows is empty")
    return rows


def _raw(config: RunConfig, rows: list[int]) -> tuple[list[int], list[Any]]:
    source = _source(config, config.data.id, config.data.split, rows)
    return rows, [source[index] for index in range(len(rows))]


def _source(config: RunConfig, name: str, split: str, rows: Wanted, args: Mapping[str, Any] = _NOTHING) -> Any:
    from twinkle.dataset import DatasetMeta

    data = config.data
    meta = DatasetMeta(name, subset_name=data.subset, split=split, data_slice=rows)
    return config.build("dataset", data.type, meta, **{**data.args, **args})


def _dataset(config: RunConfig, name: str, split: str, rows: Wanted, args: Mapping[str, Any] = _NOTHING) -> Any:
    data, dataset = config.data, _source(config, name, split, rows, args)
    if data.preprocessor is not None:
        dataset.map(config.component("preprocessor", data.preprocessor), init_args=data.preprocessor_args)
    _warn_of_gaps(dataset, name)
    return dataset


def _warn_of_gaps(dataset: Any, name: str) -> None:
    """Warn about unfilled placeholders: a model would learn `{{NAME}}` as its name."""
    texts = (json.dumps(_learnt(row), default=repr) for row in _first_rows(dataset))
    if gaps := sorted({gap for text in texts for gap in _GAP.findall(text)}):
        get_logger(__name__).warning(
            "data set %s: its rows contain %s, which the model would learn literally; fill it in: data.preprocessor "
            "SelfCognitionProcessor with preprocessor_args {model_name: ..., model_author: ...}, or another one",
            name, " and ".join(gaps),
        )  # fmt: skip


def _learnt(row: Any) -> Any:
    """Return the conversations of a row, without the raw columns that they were made of; a row without any, whole."""
    conversations = {name: row[name] for name in _CONVERSATIONS if name in row} if isinstance(row, Mapping) else {}
    return conversations or row


def _first_rows(dataset: Any) -> Iterator[Any]:
    """Yield the rows that are inspected before a run; fewer for a stream, whose rows may be slow to read."""
    if isinstance(dataset, StreamLike):
        return islice(cast("Iterable[Any]", dataset), _INSPECTED_OF_STREAM)
    return (dataset[index] for index in range(min(len(dataset), _INSPECTED)))


def encode_rows(dataset: Any, config: RunConfig) -> None:
    """Encode conversations, or pairs of them, with the configured template.

    Prompts for sampling end with the generation prompt.
    """
    data = config.data
    arguments = {"max_length": data.max_length, "truncation_strategy": data.truncation, **data.template_args}
    dataset.set_template(config.component("template", data.template), model_id=config.model.id, **arguments)
    dataset.encode(**({"add_generation_prompt": True} if config.samples else {}))


def _loader(
    dataset: Any, config: Config, name: str, rows: Wanted, shuffle: bool, encode: Callable[[Any, Config], None]
) -> Any:
    """Return the loader of a data set, encoded.

    Args:
        dataset: raw conversations.
        config: configuration of the run.
        name: name of the data set, for errors.
        rows: indices of the rows in that data set.
        shuffle: use another order in each epoch.
        encode: encodes the data set.
    """
    data = config.data
    stream = isinstance(dataset, StreamLike)
    numbers = rows if isinstance(rows, list) and len(rows) == len(dataset) else None
    with with_source_rows(name, numbers):
        encode(dataset, config)
    if not stream and not config.samples:
        _check_labels(dataset, data)
    if hasattr(dataset, "pack_dataset"):
        dataset.pack_dataset()
    if stream:
        _check_labels_of_stream(dataset, data)
    options: dict[str, Any] = {"batch_size": config.batch_size, "shuffle": shuffle, "num_workers": 0}
    if shuffle:
        options["seed"] = config.seed
        if data.shuffle_buffer is not None:
            options["shuffle_buffer"] = data.shuffle_buffer
    if Platform.get_world_size() > 1:
        import numpy as np

        # Every rank reads global batches and uses its share of each, so that a step consists of the same rows for
        # any number of ranks.
        options["device_mesh"] = DeviceMesh(np.array([Platform.get_rank()]), ("dp",))
    return config.build("dataloader", data.loader, dataset, **options)


def _check_labels(dataset: Any, data: DataConfig) -> None:
    """Refuse data without trained tokens, and warn about rows without any; rows without labels are not checked.

    Raises:
        DataError: there are no rows, or no token of any row is trained.
    """
    from twinkle.dataset import Dataset, LazyDataset

    if len(dataset) == 0:
        raise DataError(f"data set {data.id}: no rows remain after encoding with max_length {data.max_length}")
    empty = sum(_is_untrained(dataset[index]) for index in range(len(dataset)))
    if empty == len(dataset):
        raise DataError(
            f"data set {data.id}: no token of its {len(dataset)} encoded rows is trained; {_cause(data)}, or the "
            "conversations have no assistant turn; increase max_length, or use rows with answers"
        )
    if empty and (isinstance(dataset, LazyDataset) or not isinstance(dataset, Dataset)):  # `Dataset` has already warned
        get_logger(__name__).warning(
            "data set %s: no token is trained in %d of %d encoded rows; %s", data.id, empty, len(dataset), _cause(data)
        )


def _check_labels_of_stream(dataset: Any, data: DataConfig) -> None:
    """Warn if the first rows of a stream have no trained tokens; later rows may have some."""
    rows = list(_first_rows(dataset))
    if all(map(_is_untrained, rows)):
        get_logger(__name__).warning(
            "data set %s: no token is trained in the first %d rows of the stream; %s, or the conversations have no "
            "assistant turn",
            data.id, len(rows), _cause(data),
        )  # fmt: skip


def _is_untrained(row: Any) -> bool:
    return "labels" in row and all(label == IGNORE_INDEX for label in row["labels"])


def _cause(data: DataConfig) -> str:
    return f"the trained tokens may be beyond max_length {data.max_length} (truncation: {data.truncation})"


def is_stream(config: RunConfig) -> bool:
    """Return whether the configured data set class is a stream; imports the class, but loads no data."""
    dataset: Any = config.component("dataset", config.data.type)
    return issubclass(dataset, StreamLike) if isinstance(dataset, type) else isinstance(dataset, StreamLike)


def check_stream(config: RunConfig) -> None:
    """Check that the configuration fits a stream or a data set with a length, and that the recipe supports its rows.

    Raises:
        ConfigError: with all problems at once.
    """
    data = config.data
    if not is_stream(config):
        if data.shuffle_buffer is not None:
            raise ConfigError(f"data.shuffle_buffer is for streams, but data.type {data.type} is not a stream; omit it")
        if hasattr(config.component("dataset", data.type), "pack_dataset") and not config.takes_packs:
            raise ConfigError(
                f"data.type {data.type} packs several rows into one, but the recipe {config.recipe} needs "
                "separate rows; use Dataset (data.padding_free true avoids padding)"
            )
        return
    if not config.takes_streams:
        raise ConfigError(
            f"data.type {data.type} is a stream, but the recipe {config.recipe} needs indexed rows; use Dataset"
        )
    problems = []
    if config.max_steps is None:
        problems.append("max_steps: set the number of optimizer steps; a stream that ends earlier is restarted")
    if getattr(config, "epochs", 1) != 1:
        problems.append("epochs: omit it; max_steps sets the length of the run")
    if data.eval_fraction and not data.separate_eval:
        problems.append(
            "data.eval_fraction: rows of a stream cannot be held out; set separate evaluation rows with "
            "data.eval_id or data.eval_split, or data.eval_fraction 0"
        )
    if data.shuffle_buffer is not None and not data.shuffle:
        problems.append("data.shuffle_buffer: it requires data.shuffle")
    selection = parse_slice(data.slice)
    if any(part is not None and part < 0 for part in (selection.start, selection.stop, selection.step)):
        problems.append(f"data.slice {data.slice!r}: a stream has no known end; count from its start")
    if problems:
        raise ConfigError("\n  ".join([f"data.type {data.type} is a stream, whose length is unknown:", *problems]))


@contextmanager
def with_source_rows(name: str, rows: Sequence[int] | None) -> Iterator[None]:
    """Add the row's index in the source, and its line in a jsonl file, to an `EncodeError` raised in the block.

    Args:
        name: the data set.
        rows: The indices of the encoded rows, in order; None if unknown.
    """
    try:
        yield
    except EncodeError as error:
        match = _ROW.match(str(error))
        if rows is None or match is None:
            raise EncodeError(f"data set {name}: {error}") from error
        number = rows[int(match[1])]
        line = _line(Path(name).expanduser(), number)
        raise EncodeError(f"data set {name}, {line or f'row {number}'}: {str(error)[match.end() :]}") from error


def _line(path: Path, row: int) -> str:
    """Return the line of a row in a jsonl file, which may have empty lines; empty for other sources."""
    if path.suffix.lower() != ".jsonl" or not path.is_file():
        return ""
    with path.open(encoding="utf-8-sig") as file:
        lines = (number for number, text in enumerate(file, start=1) if text.strip())
        return next((f"row {row} (line {number})" for number in islice(lines, row, None)), "")
