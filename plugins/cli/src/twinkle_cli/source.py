"""Finds where a component is written, by reading its source and never by importing it or a package that holds it."""

import ast
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from twinkle_registry import ComponentSpec, NotTrusted

_OF_HUBS = "twinkle_registry.code."
_MAX_STEPS = 5  # from an __init__ through what it imports from; more is a circle


def locate(spec: ComponentSpec) -> tuple[str, int] | None:
    """Return file and line of the definition that `spec.ref` names, or None where that cannot be told."""
    module, _, path = spec.ref.partition(":")
    return _definition(module, path.split("."), _MAX_STEPS)


def find_module(name: str) -> ModuleSpec | None:
    """Return where a module is, or None; packages that hold it are looked through, where `find_spec` imports them.

    Raises:
        KeyError: it is a namespace inside of a package that is not imported, so that its folders are not known.
        NotTrusted: it is code of a Hub that may not be read.
    """
    first, *rest = name.split(".")
    try:
        if name.startswith(_OF_HUBS):
            from twinkle_registry.trust.loading import CodeFinder

            return CodeFinder.find_spec(name)
        spec = _imported(name) or find_spec(first)
        if spec is not None and spec.name == name:
            return spec
        for part in rest:
            first = f"{first}.{part}"
            spec = PathFinder.find_spec(first, spec.submodule_search_locations or ()) if spec else None
    except (KeyError, NotTrusted):
        raise
    except Exception:  # finders of other people sit on sys.meta_path and raise what they like
        return None
    return spec


def _imported(name: str) -> ModuleSpec | None:
    return getattr(sys.modules.get(name), "__spec__", None)


def _definition(module: str, path: list[str], steps: int) -> tuple[str, int] | None:
    try:
        found = find_module(module)
    except (KeyError, NotTrusted):
        return None
    if found is None or not found.origin or not found.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(found.origin).read_text("utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    if line := _line_of(tree, path):
        return found.origin, line
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and steps:
            for alias in node.names:
                if path[0] in (alias.asname, alias.name if alias.asname is None else None):
                    source = _source(node, found)
                    return _definition(source, [alias.name, *path[1:]], steps - 1)
    return None


def _source(node: ast.ImportFrom, inside: ModuleSpec) -> str:
    """Return the absolute name of the module that `from ... import` reads."""
    if not node.level:
        return str(node.module)
    is_package = inside.submodule_search_locations is not None
    parts = inside.name.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _line_of(tree: ast.AST, path: list[str]) -> int:
    """Return the line of the class, function or assignment at a dotted path, or 0; branches count as their place."""
    for node in getattr(tree, "body", []):
        if path[0] in _names(node):
            return int(node.lineno) if len(path) == 1 else _line_of(node, path[1:])
        if isinstance(node, ast.If | ast.Try):
            others = [ast.Module(part, []) for part in (node.orelse, getattr(node, "finalbody", []))]
            for part in (node, *others, *getattr(node, "handlers", [])):
                if line := _line_of(part, path):
                    return line
    return 0


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]
