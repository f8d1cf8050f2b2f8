"""Rows in pairs: their encoding, their order, and their log-probabilities by the reference."""

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
    """Return the rows of some pairs as `[chosen, rejected, chosen, rejected, ...]`."""
    return [pair[side] for pair in pairs for side in SIDES]


def encode_pairs(dataset: Any, config: RunConfig) -> None:
    """Turn pairs of conversations into tokens.

    Raises:
        EncodeError: a row is no pair, or no token of one of its answers is trained; names the first such row.
    """
    rows, data = len(dataset), config.data
    encode_rows(dataset, config)
    left = "" if len(dataset) == rows else f" of the {len(dataset)} of {rows} rows that data.truncation left"
    for number in range(len(dataset)):
        if problem := _problem(dataset[number], data):
            raise EncodeError(f"row {number}{left}: {problem}")


def _problem(row: Mapping[str, Any], data: DataConfig) -> str:
    """Return what is wrong with an encoded row, or nothing."""
    if missing := [side for side in SIDES if side not in row]:
        return (
            f"there is no {missing[0]!r} (it has {', '.join(sorted(row))}); a pair needs both: let data.preprocessor "
            "make them, as PreferenceProcessor does of prompt, chosen and rejected"
        )
    for side in SIDES:
        if all(label == IGNORE_INDEX for label in row[side]["labels"]):
            return (
                f"no token of {side!r} is trained: its answer is empty, or lies behind max_length {data.max_length} "
                f"(truncation: {data.truncation}); give a larger data.max_length, data.truncation delete to leave such "
                "pairs out, or take the row out"
            )
    return ""


Reference = Callable[[Sequence[Any]], dict[str, Any]]
"""Takes rows, and returns what the loss needs of the reference, as keyword arguments."""


def needs_reference(config: DPOConfig) -> bool:
    """Return whether the loss takes `ref_logps`, as it is configured."""
    loss = config.component("loss", config.loss.name)
    parameters = inspect.signature(loss.__call__ if isinstance(loss, type) else loss).parameters
    return "ref_logps" in parameters and not config.loss.args.get("reference_free", False)


def check_loss(config: DPOConfig) -> None:
    """Refuse a loss that compares no pairs, and a reference that nothing would read.

    Raises:
        ConfigError: the message names the side.
    """
    together = getattr(config.component("loss", config.loss.name), "rows_together", 1)
    if together != 2:
        raise ConfigError(
            f"the loss {config.loss.name} does not compare pairs (its rows_together is {together}, and not 2), so it "
            "would train rejected answers like chosen ones; take DPOLoss, SimPOLoss, CPOLoss, ORPOLoss or one like them"
        )
    asked = [f"reference.{key}" for key, value in config.reference.model_dump().items() if value]
    if asked and not needs_reference(config):
        raise ConfigError(f"{asked[0]} is given, but the loss {config.loss.name} takes no reference; leave it out")


def build_reference(config: DPOConfig, model: Any, folder: Path, loaders: Iterable[Any]) -> Reference:
    """Return the reference that is configured.

    Args:
        config: of the run.
        model: the policy; with LoRA it is its own reference.
        folder: of the run, where numbers that are computed once are kept.
        loaders: of all pairs that the run reads; None is one without.
    """
    if not needs_reference(config):
        return lambda rows: {}
    if config.reference.cache:
        kept = Kept.read(folder / "reference")
        datasets = [loader.dataset for loader in loaders if loader is not None]
        rows = [dataset[number][side] for dataset in datasets for number in range(len(dataset)) for side in SIDES]
        return kept or Kept.computed(_live(config, model), rows, config, folder / "reference")
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
    """Log-probabilities of the trained tokens of rows, by what the rows hold.

    Args:
        logps: float32 `[n]` of each row, by its digest.
    """

    def __init__(self, logps: Mapping[bytes, Any]) -> None:
        self._logps = logps

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Return the numbers of some rows, one list a row."""
        return {"ref_logps": [self._logps[_digest(row)].tolist() for row in rows]}

    @classmethod
    def read(cls, folder: Path) -> "Kept | None":
        """Return what an earlier part of the run kept, if it did.

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
                f"{file} cannot be read ({error}); remove the folder, and the reference is computed anew"
            ) from error

    @classmethod
    def computed(cls, reference: Reference, rows: Sequence[Any], config: DPOConfig, folder: Path) -> "Kept":
        """Compute the numbers of all rows, and keep them in a folder that is there whole or not at all."""
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
    held = np.array([*row["input_ids"], *row["labels"]], dtype=np.int64)
    return hashlib.blake2b(held.tobytes(), digest_size=16).digest()
