"""Imports the object that a ref names; an error says exactly why the import failed."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from .errors import ComponentNotFound, NotTrusted, PluginBroken, TwinkleError
from .naming import nearest_or_all


def import_object(ref: str, *, context: str, declared_by: str = "") -> Any:
    """Return the object at `package.module:Attr`.

    Args:
        ref: Module and attribute; the part after the colon may have dots.
        context: The request, as errors name it.
        declared_by: The source of the ref, for example "its manifest", if it is not the caller. A missing object then
            raises `PluginBroken`.

    Raises:
        ComponentNotFound: There is no such module or attribute (and `declared_by` is empty).
        PluginBroken: The module raises while it is imported, or does not have what was declared.
        NotTrusted: It is code from a hub that may not run, or was changed.
    """
    module_name, _, path = ref.partition(":")
    absent = PluginBroken if declared_by else ComponentNotFound
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if _is_or_holds(error.name, module_name):
            raise absent(f"{context}: there is no module {error.name!r}{_declaration(ref, declared_by)}") from error
        raise import_failed(context, module_name, error) from error
    except NotTrusted:
        raise
    except (Exception, SystemExit) as error:
        raise import_failed(context, module_name, error) from error
    return attribute(module, path, context=context, absent=absent)


def attribute(module: ModuleType, path: str, *, context: str, absent: type[TwinkleError], shown: str = "") -> Any:
    """Return `module.path`, where the path may have dots; raise `absent` with the nearest name.

    `shown` is the name of the module in the error, if its `__name__` means nothing to the reader.
    """
    value: Any = module
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError as error:
            if isinstance(error.__cause__, TwinkleError):  # a public module of core, whose error has the reason
                raise absent(f"{context}: {error.__cause__}") from error
            public = [n for n in dir(value) if not n.startswith("_")]
            where = (shown if value is module else "") or getattr(value, "__name__", value)
            raise absent(f"{context}: {where} has no {name!r}; {nearest_or_all(name, public)}") from error
    return value


def import_failed(context: str, where: str, error: BaseException) -> PluginBroken:
    """Return the error for a module that exists but raises while it is imported."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        own = package == where.partition(".")[0]
        why = f"it needs the module {error.name!r}, which is " + ("not part of it" if own else "not installed")
    else:
        why = f"{type(error).__name__}: {error}{_place_of(error)}"
    return PluginBroken(f"{context}: importing {where} failed: {why}")


def _place_of(error: BaseException) -> str:
    """Return ` (file.py:3)`, the innermost line that ran; empty for a SyntaxError, whose text has the line."""
    if isinstance(error, SyntaxError):
        return ""
    place, importing, trace = "", False, error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            importing = True
        elif importing:  # frames before the import are the registry's own
            place = f" ({file}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place


def _is_or_holds(missing: str | None, module: str) -> bool:
    return missing is not None and (module == missing or module.startswith(missing + "."))


def _declaration(ref: str, declared_by: str) -> str:
    return f", but {declared_by} names {ref!r}; reinstall it, or report this to its author" if declared_by else ""
