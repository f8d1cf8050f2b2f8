"""Adapters in PEFT's format: beside the state of training in a checkpoint, and read back as a specification."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from twinkle.engine import AdapterSpec, SavedAdapter
from twinkle.errors import CheckpointError

EXPORT: Final = "peft."
"""Prefix of the files in PEFT's format beside the state of training."""


@dataclass(frozen=True, slots=True)
class WithExport:
    """A copy of an adapter with its complete state and, beside it, its weights in PEFT's format.

    Attributes:
        state: what training continues from.
        exported: the weights alone.
    """

    state: SavedAdapter
    exported: SavedAdapter

    def write(self, folder: Path) -> None:
        """Write both into an empty folder."""
        self.state.write(folder)
        work = folder / "export"
        work.mkdir()
        self.exported.write(work)
        for file in work.iterdir():
            file.rename(folder / f"{EXPORT}{file.name}")
        work.rmdir()


def exported_spec(folder: Path, shape: AdapterSpec) -> AdapterSpec:
    """Return the specification of an adapter in PEFT's format.

    Args:
        folder: of the adapter.
        shape: its rank and switches as the service knows them; the switches select layers only where the adapter is
            also on parameters of experts, which `AdapterSpec.targets` cannot name.

    Raises:
        CheckpointError: the configuration is missing or invalid.
    """
    path = folder / "adapter_config.json"
    try:
        config = json.loads(path.read_bytes())
        spec = replace(
            shape, rank=int(config["r"]), alpha=float(config["lora_alpha"]), dropout=float(config["lora_dropout"]),
            rslora=bool(config.get("use_rslora")), rank_pattern=tuple((config.get("rank_pattern") or {}).items()),
            alpha_pattern=tuple((config.get("alpha_pattern") or {}).items()),
        )  # fmt: skip
        if config.get("target_parameters"):
            return spec
        return replace(spec, targets=_layers(config["target_modules"]), exclude=_layers(config.get("exclude_modules")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _layers(names: Sequence[str] | None) -> tuple[str, ...] | str:
    """Return layers of PEFT's files as `AdapterSpec` has them: names, or a pattern."""
    return names if isinstance(names, str) else tuple(names or ())
