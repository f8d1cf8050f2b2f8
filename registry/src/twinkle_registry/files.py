"""Imports `./file.py:Name` under a module name of its own: `twinkle_registry.files.<stem>_<digest>`.

The digest covers path and content, so two files of the same name can be loaded together, and an edited file is a new
module. Nothing is put on sys.path, and no `.pyc` is read or written: the code that runs is the text in the file.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import re
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, ModuleType

from .errors import ComponentNotFound, PluginBroken
from .importing import import_failed
from .naming import nearest_or_all
from .regular import read_regular

# One lock per module: with a single lock, two threads whose files import each other's modules could deadlock.
_locks: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
_locks_guard = threading.Lock()


class _TextLoader(importlib.machinery.SourceFileLoader):
    """Compiles the bytes that were hashed, never a cached or newer version."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self._source, self.path)
        return code


def import_file(path: str, *, context: str, source: bytes | None = None) -> ModuleType:
    """Return the module of one Python file; `~` and relative paths are supported.

    `source` is the content of the file, if it was already read and checked.

    Raises:
        ComponentNotFound: There is no such file.
        PluginBroken: The file raises while it is imported.
    """
    file = Path(path).expanduser().absolute()
    source = source_of(file, context) if source is None else source
    digest = hashlib.sha256(str(file).encode() + b"\0" + source).hexdigest()[:16]
    stem = re.sub(r"\W", "_", file.stem)
    name = f"{__name__}.{stem}_{digest}"
    with _locks_guard:
        lock = _locks[name]
    with lock:
        return sys.modules[name] if name in sys.modules else _execute(name, file, source, context)


def source_of(file: Path, context: str) -> bytes:
    """Return the bytes of a Python file; if it does not exist, the error names similar files in its folder."""
    try:
        return read_regular(file)
    except FileNotFoundError as error:
        siblings = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        hint = f"of the Python files beside it, {nearest_or_all(file.name, siblings)}"
        if not file.parent.is_dir():
            hint = f"there is no folder {file.parent}"
        raise ComponentNotFound(f"{context}: there is no file {file}; {hint}") from error
    except OSError as error:
        raise ComponentNotFound(f"{context}: {file} cannot be read ({error.strerror})") from error


def _execute(name: str, file: Path, source: bytes, context: str) -> ModuleType:
    loader = _TextLoader(name, str(file), source)
    spec = importlib.machinery.ModuleSpec(name, loader, origin=str(file))
    spec.has_location = True
    module = importlib.util.module_from_spec(spec)
    # Dataclasses, pickle and inspect look up the module of a class by its name.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(file, context, error) from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _failed(file: Path, context: str, error: BaseException) -> PluginBroken:
    neighbour = f"{error.name}.py" if isinstance(error, ModuleNotFoundError) else ""
    if neighbour and (file.parent / neighbour).is_file():
        return PluginBroken(
            f"{context}: importing {file} failed: {neighbour} is in the same folder, but a single file cannot import "
            "its neighbours; merge the files, or make a package and write 'package.module:Attr'"
        )
    return import_failed(context, str(file), error)
