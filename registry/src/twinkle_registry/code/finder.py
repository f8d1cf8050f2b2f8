"""Finds and loads `twinkle_registry.code.<name>_<digest>` and what is below it, from the store and from nowhere else.

The bytes that are hashed are the bytes that are compiled. No `.pyc` is read or written, a file that the listing does
not have does not exist, and nothing is put on sys.path.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

from .listing import DIGEST_IN_NAMES

if TYPE_CHECKING:
    from .resources import CheckedResources
    from .tree import Tree

_PREFIX = f"{__package__}."
_LOADED = re.compile(rf"\w+_(?P<digest>[0-9a-f]{{{DIGEST_IN_NAMES}}})")


class CodeFinder:
    """The finder; it answers for every module below a digest, so that no other finder is asked."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return where a module of loaded code is; None for every other module."""
        if not fullname.startswith(_PREFIX):
            return None
        top, _, inner = fullname[len(_PREFIX) :].partition(".")
        match = _LOADED.fullmatch(top)
        if match is None:
            return None
        tree = _tree_of(_PREFIX + top, match["digest"], is_top=not inner)
        return _spec(fullname, inner.replace(".", "/"), tree)


class CodeLoader(SourceFileLoader):
    """Compiles what the tree gives, which has checked its hash."""

    def __init__(self, fullname: str, source: str, tree: Tree) -> None:
        """Load `fullname` from the file `source` of the tree; an empty text is a package without code of its own."""
        super().__init__(fullname, str(tree.folder / source) if source else str(tree.folder / "__init__.py"))
        self.tree, self.source = tree, source

    def get_data(self, path: str) -> bytes:
        """Return the bytes of a file of the tree, checked; `path` begins with the folder of the tree."""
        if path == self.path and not self.source:
            return b""
        folder = str(self.tree.folder)
        relative = path[len(folder) :].replace("\\", "/").lstrip("/") if path.startswith(folder) else path
        return self.tree.read(relative)

    def get_code(self, fullname: str) -> CodeType:
        """Compile the module from its source."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Run the module; an absolute import of a file of the same repository is explained."""
        try:
            super().exec_module(module)
        except ModuleNotFoundError as error:
            own = (error.name or "").partition(".")[0]
            if own and not (error.name or "").startswith(_PREFIX) and is_module(self.tree, own):
                raise ImportError(
                    f"{own} lies in the repository itself; its author must write 'from . import {own}', since nothing "
                    "of a Hub is put on sys.path"
                ) from error
            raise

    def get_resource_reader(self, name: str | None = None) -> CheckedResources:  # type: ignore[override]
        """Let `importlib.resources.files(package)` reach the data files of the package."""
        from .resources import CheckedResources

        below = (name or self.name).removeprefix(_PREFIX).partition(".")[2].replace(".", "/")
        return CheckedResources(self.tree, below)


def install() -> None:
    """Put the finder first: no other finder may answer for these modules."""
    if not any(isinstance(finder, type) and finder.__name__ == CodeFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, CodeFinder)


def is_module(tree: Tree, name: str) -> bool:
    """Say whether the tree has a module or package `name` at its top."""
    return f"{name}.py" in tree.files or name in tree.folders


def _tree_of(top: str, digest: str, *, is_top: bool) -> Tree:
    loaded = getattr(sys.modules.get(top), "__loader__", None)
    if isinstance(loaded, CodeLoader) and not is_top:
        return loaded.tree
    from .gate import checked_tree

    return checked_tree(digest, asked=top)


def _spec(fullname: str, path: str, tree: Tree) -> ModuleSpec:
    below = f"{path}/" if path else ""
    if path and f"{path}.py" in tree.files:
        return _located(ModuleSpec(fullname, CodeLoader(fullname, f"{path}.py", tree)), None)
    if path in tree.folders or not path:
        init = f"{below}__init__.py"
        return _located(ModuleSpec(fullname, CodeLoader(fullname, init if init in tree.files else "", tree)), [])
    raise ModuleNotFoundError(f"the repository has no module {path.replace('/', '.')!r}", name=fullname)


def _located(spec: ModuleSpec, locations: Iterable[str] | None) -> ModuleSpec:
    loader = spec.loader
    spec.origin = loader.path if isinstance(loader, CodeLoader) else None
    spec.has_location = True
    # Empty: a path would let Python's own finder look into the folder, where anything may have been put since.
    spec.submodule_search_locations = None if locations is None else list(locations)
    return spec
