"""The weights that are sampled from: read once from a checkpoint's folder, kept while somebody samples from them."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle.errors import CheckpointError, Unsupported
from twinkle_server.engine.backend import UserError
from twinkle_server.engine.pool.faults import damaged
from twinkle_server.engine.pool.states import is_state

KEPT_BYTES = 512 * 2**20
"""Weights that nobody samples from at the moment stay in memory up to so many bytes."""


@dataclass(slots=True)
class _Source:
    """Weights, how many requests sample from them, and their bytes."""

    version: Any
    users: int
    bytes: int


class Sources:
    """Keeps the weights of checkpoints; a folder never changes, since its name is new for every checkpoint.

    Args:
        read: reads a folder of PEFT's files.
        kept: see `KEPT_BYTES`.
    """

    def __init__(self, read: Callable[[Path], Any], kept: int = KEPT_BYTES) -> None:
        self._read, self._kept = read, kept
        self._sources: OrderedDict[Path, _Source] = OrderedDict()

    def take(self, folder: Path) -> Any:
        """Return the weights in a folder for one request more.

        Raises:
            UserError: they are gone, damaged, or of another model.
        """
        found = self._sources.get(folder)
        if found is None:
            found = self._sources[folder] = self._load(folder)
        self._sources.move_to_end(folder)
        found.users += 1
        return found.version

    def give_back(self, folder: Path) -> None:
        """Note that a request which took the weights is over."""
        self._sources[folder].users -= 1
        idle = [(path, source) for path, source in self._sources.items() if not source.users]
        size = sum(source.bytes for _, source in idle)
        for path, source in idle:
            if size <= self._kept:
                return
            size -= source.bytes
            del self._sources[path]

    def __len__(self) -> int:
        return len(self._sources)

    def _load(self, folder: Path) -> _Source:
        if not folder.is_dir():
            raise UserError("the checkpoint to sample from is gone; it was deleted, or its time was over")
        if is_state(folder):
            raise UserError("this checkpoint is for training; sample from one that was saved for the sampler")
        try:
            version = self._read(folder)
        except CheckpointError as error:
            raise damaged(error) from error
        except Unsupported as error:
            raise UserError(
                "this checkpoint holds more than low-rank matrices, which cannot be sampled from"
            ) from error
        return _Source(version, 0, version.flat.numel() * version.flat.element_size())
