"""Preference pairs: encoding, order of rows, and log-probabilities under the reference model."""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import CheckpointError, ConfigError, EncodeError
from twinkle.paths import new_directory, recovered
from twinkle_recipes.config import DataConfig, RunConfig
from twinkle_recipes.data import encode_rows
from twinkle_recipes.preference.config import DPOConfig
from twinkle_recipes.run.building import as_before, build_frozen, check_tokens

SIDES = ("positive", "negative")


def interleaved(pairs: Sequence[Any]) -> list[Any]:
    """Return the rows of pairs as `[chosen, rejected, chosen, rejected, ...]`."""
    return [pair[side] for pair in pairs for side in SIDES]


def encode_pairs(dataset: Any, config: RunConfig) -> None:
    """Encode pairs of conversations.

    Raises:
        EncodeError: a row is not a pair, or one of its answers has no trained tokens; names the first such row.
    """
    rows, data = len(dataset), config.data
    encode_rows(dataset, config)
    note = "" if len(dataset) == rows else f" of the {len(dataset)} of {rows} rows that data.truncation kept"
    for number in range(len(dataset)):
        if problem := _problem(dataset[number], data):
            raise EncodeError(f"row {number}{note}: {problem}")


def _problem(row: Mapping[str, Any], data: DataConfig) -> str:
    """Return the problem of an encoded row, or an empty string."""
    if missing := [side for side in SIDES if side not in row]:
        return (
            f"there is no {missing[0]!r} (it has {', '.join(sorted(row))}); a pair needs both; set data.preprocessor, "
            "for example PreferenceProcessor for prompt, chosen and rejected"
        )
    for side in SIDES:
        if all(label == IGNORE_INDEX for label in row[side]["labels"]):
            return (
                f"no token of {side!r} is trained: its answer is empty, or beyond max_length {data.max_length} "
                f"(truncation: {data.truncation}); increase data.max_length, drop such pairs with data.truncation "
                "delete, or remove the row"
            )
    return ""


Reference = Callable[[Sequence[Any]], dict[str, Any]]
"""Maps rows to the reference's log-probabilities, as keyword arguments of the loss."""


def needs_reference(config: DPOConfig) -> bool:
    """Return whether the configured loss takes `ref_logps`."""
    loss = config.component("loss", config.loss.name)
    parameters = inspect.signature(loss.__call__ if isinstance(loss, type) else loss).parameters
    return "ref_logps" in parameters and not config.loss.args.get("reference_free", False)


def check_loss(config: DPOConfig) -> None:
    """Refuse a loss that does not compare pairs, and a reference that the loss does not use.

    Raises:
        ConfigError: the message names the side.
    """
    together = getattr(config.component("loss", config.loss.name), "rows_together", 1)
    if together != 2:
        raise ConfigError(
            f"the loss {config.loss.name} does not compare pairs (its rows_together is {together}, and not 2), so it "
            "would train rejected answers like chosen ones; use DPOLoss, SimPOLoss, CPOLoss or ORPOLoss"
        )
    settings = [f"reference.{key}" for key, value in config.reference.model_dump().items() if value]
    if settings and not needs_reference(config):
        raise ConfigError(f"{settings[0]} is set, but the loss {config.loss.name} takes no reference; omit it")


def build_reference(config: DPOConfig, model: Any, folder: Path, loaders: Iterable[Any]) -> Reference:
    """Return the configured reference.

    Args:
        config: configuration of the run.
        model: the policy; with LoRA it is its own reference.
        folder: the run folder, which stores log-probabilities that are computed once.
        loaders: loaders of all pairs of the run; None is skipped.
    """
    if not needs_reference(config):
        return lambda rows: {}
    if config.reference.cache:
        cached = Kept.read(folder / "reference")
        datasets = [loader.dataset for loader in loaders if loader is not None]
        rows = [dataset[number][side] for dataset in datasets for number in range(len(dataset)) for side in SIDES]
        return cached or Kept.computed(_live(config, model), rows, config, folder / "reference")
    return _live(config, model)


def _live(config: DPOConfig, model: Any) -> Reference:
    """Return a reference that computes its log-probabilities for each batch."""
    if config.reference.id is None and config.lora is not None:
        before = as_before(config.lora)
        return lambda rows: {"ref_logps": model.forward_only(inputs=rows, **before, **config.in_memory)["logps"]}
    settings = config.model.model_copy(update={"id": config.reference.id or config.model.id})
    check_tokens(config, settings.id, "reference")
    frozen = build_frozen(config, settings)
    return lambda rows: {"ref_logps": frozen.forward_only(inputs=rows, **config.in_memory)["logps"]}


class Kept:
    """Log-probabilities of the trained tokens of rows, by the content of the rows.

    Args:
        logps: float32 `[n]` of each row, by its digest.
    """

    def __init__(self, logps: Mapping[bytes, Any]) -> None:
        self._logps = logps

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Return the log-probabilities of rows, one list per row."""
        return {"ref_logps": [self._logps[_digest(row)].tolist() for row in rows]}

    @classmethod
    def read(cls, folder: Path) -> "Kept | None":
        """Return the log-probabilities that an earlier part of the run stored, or None.

        Raises:
            CheckpointError: the file is damaged.
        """
        file = recovered(folder) / "logps.npz"
        if not file.is_file():
            return None
        try:
            with np.load(file) as arrays:
                parts = np.split(arrays["logps"], np.cumsum(arrays["counts"])[:-1])
                return cls({bytes(digest): part for digest, part in zip(arrays["digests"], parts, strict=True)})
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise CheckpointError(
                f"{file} cannot be read ({error}); remove the folder to compute the reference again"
            ) from error

    @classmethod
    def computed(cls, reference: Reference, rows: Sequence[Any], config: DPOConfig, folder: Path) -> "Kept":
        """Compute the log-probabilities of all rows, and store them atomically in a folder."""
        logps: dict[bytes, Any] = {}
        size = 2 * config.batch_size
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            table = reference(batch)["ref_logps"].float().cpu().numpy()
            for row, line in zip(batch, table, strict=True):
                trained = np.array(row["labels"]) != IGNORE_INDEX
                logps[_digest(row)] = line[: len(trained)][trained]
        with new_directory(folder) as work:
            np.savez(
                work / "logps.npz",
                logps=np.concatenate([*logps.values()]),
                counts=np.array([len(part) for part in logps.values()]),
                digests=np.array([list(digest) for digest in logps], dtype=np.uint8),
            )
        return cls(logps)


def _digest(row: Mapping[str, Any]) -> bytes:
    tokens = np.array([*row["input_ids"], *row["labels"]], dtype=np.int64)
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
