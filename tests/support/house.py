"""The members of the house and their source, for tests that cross distributions."""

import ast
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Member:
    """One distribution of the house."""

    folder: Path

    def __str__(self) -> str:
        return self.name

    @cached_property
    def project(self) -> dict[str, Any]:
        project: dict[str, Any] = self._settings["project"]
        return project

    @property
    def settings(self) -> dict[str, Any]:
        """How it is built: `[tool.hatch]`."""
        found: dict[str, Any] = self._settings["tool"]["hatch"]
        return found

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text("utf-8"))

    @property
    def name(self) -> str:
        return str(self.project["name"])

    @property
    def source(self) -> Path:
        """The folder of its package in the checkout."""
        (init,) = self.folder.glob("src/*/__init__.py")
        return init.parent

    @property
    def requirements(self) -> list[str]:
        """What it declares, extras included."""
        extras = self.project.get("optional-dependencies", {}).values()
        return [*self.project.get("dependencies", ()), *(text for extra in extras for text in extra)]


MEMBERS = [Member(ROOT / path) for path in SETTINGS["tool"]["hatch"]["metadata"]["hooks"]["custom"]["members"]]


def members_below(member: Member) -> list[Member]:
    """Return the members that one declares as dependencies, and theirs."""
    ours = {other.name: other for other in MEMBERS}
    below: dict[str, Member] = {}
    waiting = [member]
    while waiting:
        for text in waiting.pop().project["dependencies"]:
            name = Requirement(text).name
            if name in ours and name not in below:
                below[name] = ours[name]
                waiting.append(ours[name])
    return list(below.values())


def modules_below(folder: Path) -> list[str]:
    """Return the dotted names of all modules below a folder of packages, but for those that run when imported."""
    files = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    names = {".".join(file.parts[:-1] if file.name == "__init__" else file.parts) for file in files}
    return sorted(name for name in names if not name.endswith("__main__"))


@functools.cache
def providers_of_packages() -> dict[str, list[str]]:
    """Return which distributions provide each top-level package; also of what is named here and not installed."""
    return {"mlflow": ["mlflow-skinny"], "openenv": ["openenv-core"], "reasoning_gym": ["reasoning-gym"]} | dict(
        packages_distributions()
    )


def imported(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and top-level package of every import that must succeed; an `except ImportError` is a way out."""
    if isinstance(node, ast.Import):
        yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield node.lineno, str(node.module).partition(".")[0]
    elif isinstance(node, ast.Try) and any("Import" in ast.dump(h.type) for h in node.handlers if h.type):
        node = ast.Module([*node.orelse, *node.finalbody], [])
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        node = ast.Module(node.orelse, [])
    for child in ast.iter_child_nodes(node):
        yield from imported(child)
