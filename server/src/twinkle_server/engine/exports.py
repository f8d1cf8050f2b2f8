"""Checkpoints for training that also hold the adapter in PEFT's format, for use elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twinkle.engine import SavedAdapter

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
