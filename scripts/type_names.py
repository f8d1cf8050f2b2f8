"""Writes into each room of core which names our own plugins offer there, for editors and type checkers alone.

At run time a room finds its names through the registry; the block that is written here is never executed.
`python scripts/type_names.py` renews the blocks, with `--check` it only says whether one is out of date.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ROOT / "twinkle_core" / "src" / "twinkle"
MARK = "\n# Names of our own plugins, for editors and type checkers; scripts/type_names.py writes them.\n"


def components() -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, name, module and attribute of every component of the house."""
    below = (path for depth in ("*", "plugins/*") for path in ROOT.glob(f"{depth}/src/*/twinkle-plugin.toml"))
    for manifest in sorted(below):
        for component in tomllib.loads(manifest.read_text("utf-8")).get("component", ()):
            module, _, attribute = component["ref"].partition(":")
            yield component["kind"], component["name"], module, attribute


def room_of(kind: str) -> Path:
    """Return the file of a room: a package's or a module's."""
    package = ROOMS / kind / "__init__.py"
    return package if package.is_file() else ROOMS / f"{kind}.py"


def bound(source: str) -> set[str]:
    """Return the names that a room has anyway."""
    body = ast.parse(source).body
    imports = (alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names)
    return {*imports, *(node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef))}


def renewed(source: str, offered: list[tuple[str, str]]) -> str:
    """Return the source of a room with its block: `offered` are module and name."""
    own = source.partition(MARK)[0]
    lines = [f"    from {module} import {name} as {name}\n" for module, name in offered if name not in bound(own)]
    if not lines:
        return own
    if "TYPE_CHECKING" not in bound(own):
        raise SystemExit(f"import TYPE_CHECKING from typing in the room of {', '.join(name for _, name in offered)}")
    return own + MARK + "if TYPE_CHECKING:\n" + "".join(lines)


def lines_of(source: str) -> list[str]:
    """Return the lines in an order of their own: `ruff` sorts imports after us."""
    return sorted(line for line in source.splitlines() if line)


def main(check: bool) -> int:
    """Renew all blocks, or report those that are out of date."""
    offered: dict[Path, list[tuple[str, str]]] = {}
    for kind, name, module, attribute in components():
        if name == attribute:
            offered.setdefault(room_of(kind), []).append((module, name))
    stale = 0
    for room in sorted({*offered, *(path for path in ROOMS.rglob("*.py") if MARK in path.read_text("utf-8"))}):
        old = room.read_text("utf-8")
        new = renewed(old, sorted(offered.get(room, [])))
        if lines_of(new) == lines_of(old):
            continue
        stale += 1
        if not check:
            room.write_text(new, "utf-8")
        sys.stdout.write(f"{room.relative_to(ROOT)}: {'out of date, run: make format' if check else 'renewed'}\n")
    return stale if check else 0


if __name__ == "__main__":
    sys.exit(min(main("--check" in sys.argv[1:]), 1))
