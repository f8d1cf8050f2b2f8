"""The checkpoints of a run: `checkpoints/step-<n>/`, the pointers `best` and `last`, and which of them stay."""

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twinkle.errors import CheckpointError
from twinkle.paths import recovered, write_text

_STEP = re.compile(r"step-(\d+)")
_SHOWN = 5


class Checkpoints:
    """Saves, points and forgets.

    `best` and `last` are text files that hold the name of a checkpoint folder; they are replaced in one step, after
    the folder stands whole, so they never name something half-written.

    Args:
        folder: `checkpoints` of the run; made with the first checkpoint.
        limit: how many folders stay, the newest; None keeps all. Those of `best` and `last` always stay.
        best_score: the lowest evaluation loss so far, when a run continues.
        writes: whether this process moves pointers and forgets; of several ranks the first does.
    """

    def __init__(
        self, folder: Path, limit: int | None = None, best_score: float = math.inf, *, writes: bool = True
    ) -> None:
        self.folder = folder
        self.limit = limit
        self.best_score = best_score
        self._writes = writes

    def is_best(self, score: float | None) -> bool:
        """Say whether `score` is lower than every one before; a missing or non-finite one never is."""
        return score is not None and math.isfinite(score) and score < self.best_score

    def save(self, step: int, score: float | None, write: Callable[..., Any]) -> Path:
        """Save step `step`, point `last` (and, with a new lowest score, `best`) to it, and forget old ones.

        Args:
            step: number of the optimizer step.
            score: evaluation loss of this very step; None if it was not evaluated.
            write: `model.save` with everything but `name` and `output_dir` bound.
        """
        path = self.folder / f"step-{step}"
        write(name=path.name, output_dir=str(self.folder))
        self._point("last", path)
        if score is not None and self.is_best(score):
            self.best_score = score
            self._point("best", path)
        self._forget_old()
        return path

    def path(self, pointer: str) -> Path | None:
        """Return the folder that `best` or `last` names, or None if there is no such pointer yet."""
        file = self.folder / pointer
        return self.folder / file.read_text(encoding="utf-8").strip() if file.is_file() else None

    def _point(self, pointer: str, path: Path) -> None:
        if self._writes:
            write_text(self.folder / pointer, path.name + "\n")

    def _forget_old(self) -> None:
        if self.limit is None or not self._writes:
            return
        spared = {self.path("best"), self.path("last")}
        numbered = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _STEP.fullmatch(path.name))]
        for _, path in sorted(numbered)[: -self.limit]:
            if path not in spared:
                shutil.rmtree(path)


def find_checkpoint(place: str) -> Path:
    """Return the checkpoint folder that `resume_from` means: a run folder (its last), a pointer file, or itself.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(place)
    if not recovered(path).exists():
        raise CheckpointError(f"cannot resume from {place}: there is no such folder; {_runs_near(path)}")
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints" / "last"
    if path.is_file() and path.name in ("best", "last"):
        path = path.parent / path.read_text(encoding="utf-8").strip()
    path = recovered(path)
    if not (path / "trainer_state.json").is_file():
        raise CheckpointError(
            f"cannot resume from {place}: {path} is no checkpoint with optimizer state (no trainer_state.json); "
            "give a run folder that holds checkpoints/, or one of its checkpoints/step-N"
        )
    return path


def _runs_near(path: Path) -> str:
    """Return the folders among which the one that was meant may be: those beside it, else the runs of this place."""
    folder = next((f for f in (path.parent, Path("runs")) if f != Path() and f.is_dir()), None)
    if folder is None:
        return "give a run folder (by default below runs/), or one of its checkpoints/step-N"
    kept = [entry for entry in folder.iterdir() if entry.is_dir() and any(map(_is_seen, entry.iterdir()))]
    found = sorted(kept, key=lambda f: f.stat().st_mtime)[::-1]
    names = ", ".join(entry.name for entry in found[:_SHOWN]) or "no folder"
    return f"{folder}/ holds {names}" + (f" and {len(found) - _SHOWN} older ones" if len(found) > _SHOWN else "")


def _is_seen(path: Path) -> bool:
    """Return whether a file tells of a run: the fresh folder of this one has a hidden lock alone."""
    return not path.name.startswith(".")


def run_folder_of(checkpoint: Path) -> Path | None:
    """Return the run folder that a checkpoint lies in, or None if it lies elsewhere."""
    checkpoints = checkpoint.resolve().parent
    return checkpoints.parent if checkpoints.name == "checkpoints" else None
