"""Says of a ref whether its module binds the name at all, by reading its source; for `twinkle plugins doctor`."""

import ast
import functools
from pathlib import Path

from twinkle_cli.source import find_module
from twinkle_registry import NotTrusted

_DYNAMIC = frozenset(("__dict__", "__getattr__", "exec", "globals", "locals", "modules", "setattr", "vars"))


def surely_lacks(ref: str) -> bool:
    """Return whether a module that can be read never binds the name of `module:Name`.

    False where the source leaves it open: a star import, a `__getattr__` or whatever binds names at run time.
    """
    module, _, path = ref.partition(":")
    try:
        found = find_module(module)
    except (KeyError, NotTrusted):
        return False
    if found is None or not found.origin or not found.origin.endswith(".py"):
        return False
    names = _names(found.origin)
    name = path.partition(".")[0]
    return bool(names) and name not in names and not names & _DYNAMIC and not _is_submodule(found.origin, name)


@functools.lru_cache(maxsize=256)
def _names(file: str) -> frozenset[str]:
    """Return all names that a file uses or binds, in whatever scope; nothing where it cannot be told."""
    try:
        tree = ast.parse(Path(file).read_text("utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return frozenset()
    names = {"__file__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            if node.name == "*":
                return frozenset()
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.MatchAs | ast.MatchStar):
            names.add(node.name or "")
    return frozenset(names)


def _is_submodule(file: str, name: str) -> bool:
    folder = Path(file).parent
    return Path(file).name == "__init__.py" and any((folder / name).parent.glob(f"{name}*"))
