"""Finds files of a plugin that Python cannot compile, without importing any."""

import warnings
from pathlib import Path

from twinkle_registry import PluginRecord
from twinkle_registry.regular import read_regular


def syntax_errors(record: PluginRecord) -> dict[str, list[str]]:
    """Compile every Python file of a usable plugin's package.

    Returns:
        Each error as `file:line: what is wrong`, with the names of the components, commands and hooks whose module, or
        a package around it, is that file.
    """
    if record.manifest is None or record.status != "ok" or not record.location:
        return {}
    folder, named = Path(record.location).parent, _modules(record)
    found = {}
    for file in sorted(folder.rglob("*.py")):
        inner = file.relative_to(folder).with_suffix("").parts
        if not all(part.isidentifier() for part in inner) or not (error := _error_in(file)):
            continue
        module = ".".join([record.package, *(inner[:-1] if inner[-1] == "__init__" else inner)])
        found[error] = [name for name, ref in named if ref == module or ref.startswith(f"{module}.")]
    return found


def _modules(record: PluginRecord) -> list[tuple[str, str]]:
    """Return pairs of a name and the module that it needs; refs of a Hub's manifest may begin with a dot."""
    manifest = record.manifest
    if manifest is None:
        return []
    refs = [(spec.name, spec.ref) for spec in manifest.components]
    refs += [(f"command {command.name}", command.ref) for command in manifest.commands]
    refs += [("hooks", manifest.hooks.module)] if manifest.hooks else []
    modules = [(name, ref.partition(":")[0]) for name, ref in refs]
    return [(name, f"{record.package}{module}" if module.startswith(".") else module) for name, module in modules]


def _error_in(file: Path) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the file are for its author
            compile(read_regular(file), str(file), "exec", dont_inherit=True)
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror}"
    except SyntaxError as error:
        return f"{file}:{error.lineno or 1}: {type(error).__name__}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte, or nested too deep
        return f"{file}: {type(error).__name__}: {error}"
    return ""
