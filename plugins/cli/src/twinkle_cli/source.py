"""Inspects the code of a plugin without importing it: locations of modules, defined names, syntax errors."""

import ast
import functools
import struct
import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import MAGIC_NUMBER, cache_from_source, find_spec
from pathlib import Path

from twinkle_registry import ComponentSpec, NotTrusted, PluginRecord
from twinkle_registry.regular import read_regular

_DYNAMIC = frozenset(("__dict__", "__getattr__", "exec", "globals", "locals", "modules", "setattr", "vars"))


def surely_lacks(ref: str) -> bool:
    """Return whether the source of a module certainly does not define the name in `module:Name`.

    False if it is uncertain: star imports, a `__getattr__`, and other code that defines names at run time.
    """
    module, _, path = ref.partition(":")
    try:
        spec = find_module(module)
    except (KeyError, NotTrusted):
        return False
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return False
    names = _bound_names(spec.origin)
    name = path.partition(".")[0]
    return bool(names) and name not in names and not names & _DYNAMIC and not _is_submodule(spec.origin, name)


@functools.lru_cache(maxsize=256)
def _bound_names(file: str) -> frozenset[str]:
    """Return all names that a file uses or binds, in any scope; empty if they cannot be determined."""
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


def syntax_errors(record: PluginRecord) -> dict[str, list[str]]:
    """Compile every Python file of a usable plugin's package.

    Returns:
        Each error as `file:line: description`, with the names of the components, commands and hooks whose module, or
        a package around it, is that file.
    """
    if record.manifest is None or record.status != "ok" or not record.location:
        return {}
    folder, modules = Path(record.location).parent, _modules(record)
    errors = {}
    for file in sorted(folder.rglob("*.py")):
        inner = file.relative_to(folder).with_suffix("").parts
        if not all(part.isidentifier() for part in inner) or not (error := _error_in(file)):
            continue
        module = ".".join([record.package, *(inner[:-1] if inner[-1] == "__init__" else inner)])
        errors[error] = [name for name, ref in modules if ref == module or ref.startswith(f"{module}.")]
    return errors


def _modules(record: PluginRecord) -> list[tuple[str, str]]:
    """Return pairs of a name and the module that it needs; refs of a hub's manifest may begin with a dot."""
    manifest = record.manifest
    if manifest is None:
        return []
    refs = [(spec.name, spec.ref) for spec in manifest.components]
    refs += [(f"command {command.name}", command.ref) for command in manifest.commands]
    refs += [("hooks", manifest.hooks.module)] if manifest.hooks else []
    modules = [(name, ref.partition(":")[0]) for name, ref in refs]
    return [(name, f"{record.package}{module}" if module.startswith(".") else module) for name, module in modules]


def _error_in(file: Path) -> str:
    if _is_cached(file):
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the file are for its author
            compile(read_regular(file), str(file), "exec", dont_inherit=True)
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror}"
    except SyntaxError as error:
        return f"{file}:{error.lineno or 1}: {type(error).__name__}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte, or nested too deeply
        return f"{file}: {type(error).__name__}: {error}"
    return ""


def _is_cached(file: Path) -> bool:
    """Return whether Python has compiled this file before: the header of its bytecode has the file's time and size."""
    try:
        with Path(cache_from_source(str(file))).open("rb") as cached:
            header = cached.read(16)
        state = file.stat()
    except (OSError, NotImplementedError):
        return False
    flags = bytes(4)  # PEP 552: the cache is validated by time and size
    current = MAGIC_NUMBER + flags + struct.pack("<II", int(state.st_mtime) & 0xFFFFFFFF, state.st_size & 0xFFFFFFFF)
    return header == current


_OF_HUBS = "twinkle_registry.code."
_MAX_STEPS = 5  # limits re-exports through several __init__ files; more would be a cycle


def locate(spec: ComponentSpec) -> tuple[str, int] | None:
    """Return file and line of the definition that `spec.ref` names, or None if that cannot be determined."""
    module, _, path = spec.ref.partition(":")
    return _definition(module, path.split("."), _MAX_STEPS)


def find_module(name: str) -> ModuleSpec | None:
    """Return the location of a module, or None, without importing its parent packages as `find_spec` does.

    Raises:
        KeyError: it is in a namespace package that is not imported, so that its folders are unknown.
        NotTrusted: it is code of a hub that may not be read.
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
    except Exception:  # third-party finders on sys.meta_path may raise any exception
        return None
    return spec


def _imported(name: str) -> ModuleSpec | None:
    return getattr(sys.modules.get(name), "__spec__", None)


def _definition(module: str, path: list[str], steps: int) -> tuple[str, int] | None:
    try:
        spec = find_module(module)
    except (KeyError, NotTrusted):
        return None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    if line := _line_of(tree, path):
        return spec.origin, line
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and steps:
            for alias in node.names:
                if path[0] in (alias.asname, alias.name if alias.asname is None else None):
                    source = _source(node, spec)
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
    """Return the line of the class, function or assignment at a dotted path, or 0; branches are searched too."""
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
