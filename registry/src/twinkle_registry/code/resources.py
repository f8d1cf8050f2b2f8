"""Data files of loaded code for `importlib.resources`: only what the listing has, hashed as it is read."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO, Any

from .tree import Tree


class CheckedResources:
    """What `importlib.resources` asks a loader for."""

    def __init__(self, tree: Tree, below: str) -> None:
        """Show the part of `tree` below the folder `below`."""
        self._root = CheckedPath(tree, below)

    def files(self) -> CheckedPath:
        """Return the folder of the package."""
        return self._root


class CheckedPath:
    """A file or folder of a tree, with the methods of `importlib.resources.abc.Traversable`."""

    def __init__(self, tree: Tree, path: str) -> None:
        """Stand for `path`, relative to the tree; it need not exist."""
        self._tree, self._path = tree, path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._path.rpartition("/")[2]

    def is_file(self) -> bool:
        """Say whether this is a listed file."""
        return self._path in self._tree.files

    def is_dir(self) -> bool:
        """Say whether this is a folder that holds a listed file."""
        return self._path in self._tree.folders

    def iterdir(self) -> Iterator[CheckedPath]:
        """Yield what this folder holds."""
        below = f"{self._path}/" if self._path else ""
        names = {path[len(below) :].partition("/")[0] for path in self._tree.files if path.startswith(below)}
        yield from (self.joinpath(name) for name in sorted(names))

    def joinpath(self, *descendants: Any) -> CheckedPath:
        """Return what lies below."""
        parts = [self._path, *(str(part) for part in descendants)]
        return CheckedPath(self._tree, "/".join(part.strip("/") for part in parts if part.strip("/")))

    def __truediv__(self, child: Any) -> CheckedPath:
        return self.joinpath(child)

    def read_bytes(self) -> bytes:
        """Return the bytes, checked."""
        return self._tree.read(self._path)

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """Return the text, UTF-8 unless another encoding is named."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def open(self, mode: str = "r", *args: Any, **kwargs: Any) -> IO[Any]:
        """Open for reading, in text (`r`) or binary (`rb`) mode."""
        if mode not in ("r", "rb", "rt"):
            raise ValueError(f"mode is {mode!r}; what came from a Hub is only read: 'r' or 'rb'")
        raw = io.BytesIO(self.read_bytes())
        return raw if mode == "rb" else io.TextIOWrapper(raw, *args, **{"encoding": "utf-8", **kwargs})

    def __str__(self) -> str:
        """Return the path in the store, for messages."""
        return str(self._tree.folder / self._path)
