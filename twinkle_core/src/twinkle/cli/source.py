"""Finds where a component is written, by reading its source and never by importing it."""

import ast
from importlib.util import find_spec
from pathlib import Path

from twinkle.errors import TwinkleError
from twinkle_registry import ComponentSpec
from twinkle_registry.code.finder import CodeFinder


def locate(spec: ComponentSpec) -> tuple[str, int] | None:
    """Return file and line of the definition that `spec.ref` names, or None where that cannot be told."""
    module, _, path = spec.ref.partition(":")
    try:
        # The finder of Hub code is asked itself: `find_spec` would import the package first.
        hub = module.startswith("twinkle_registry.code.")
        found = CodeFinder.find_spec(module) if hub else find_spec(module)
    except (ImportError, ValueError, AttributeError, TwinkleError):
        return None
    if found is None or not found.origin or not found.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(found.origin).read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    line = _line_of(tree, path.split("."))
    return (found.origin, line) if line else None


def _line_of(tree: ast.AST, path: list[str]) -> int:
    """Return the line of the class, function or assignment at a dotted path, or 0."""
    for node in getattr(tree, "body", []):
        if path[0] in _names(node):
            return int(node.lineno) if len(path) == 1 else _line_of(node, path[1:])
    return 0


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]
