"""Imports the object that a ref names; the error says which of the many possible reasons made it fail."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from .errors import ComponentNotFound, NotTrusted, PluginBroken, TwinkleError
from .naming import nearest_or_all


def import_object(ref: str, *, asked: str, promised_by: str = "") -> Any:
    """Return the object at `package.module:Attr`.

    Args:
        ref: Module and attribute; the part after the colon may have dots.
        asked: How errors name the request.
        promised_by: What declares it, for example "its manifest"; then its absence is not the caller's fault.

    Raises:
        ComponentNotFound: There is no such module or attribute (not promised).
        PluginBroken: The module raises while it is imported, or does not have what was declared.
        NotTrusted: It is code from a Hub that may not run, or was changed.
    """
    module_name, _, path = ref.partition(":")
    absent = PluginBroken if promised_by else ComponentNotFound
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if _is_or_holds(error.name, module_name):
            raise absent(f"{asked}: there is no module {error.name!r}{_promise(ref, promised_by)}") from error
        raise import_failed(asked, module_name, error) from error
    except NotTrusted:
        raise
    except (Exception, SystemExit) as error:
        raise import_failed(asked, module_name, error) from error
    return attribute(module, path, asked=asked, absent=absent)


def attribute(module: ModuleType, path: str, *, asked: str, absent: type[TwinkleError], shown: str = "") -> Any:
    """Return `module.path`, where the path may have dots; raise `absent` with the nearest name.

    `shown` is the name of the module in the error, where `__name__` means nothing to the reader.
    """
    value: Any = module
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError as error:
            if isinstance(error.__cause__, TwinkleError):  # a public module of core, which says why
                raise absent(f"{asked}: {error.__cause__}") from error
            public = [n for n in dir(value) if not n.startswith("_")]
            where = (shown if value is module else "") or getattr(value, "__name__", value)
            raise absent(f"{asked}: {where} has no {name!r}; {nearest_or_all(name, public)}") from error
    return value


def import_failed(asked: str, where: str, error: BaseException) -> PluginBroken:
    """Return the error for a module that exists but raises while it is imported."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        own = package == where.partition(".")[0]
        why = f"it needs the module {error.name!r}, which is " + ("not part of it" if own else "not installed")
    else:
        why = f"{type(error).__name__}: {error}{_place_of(error)}"
    return PluginBroken(f"{asked}: importing {where} failed: {why}")


def _place_of(error: BaseException) -> str:
    """Return ` (file.py:3)`, the innermost line that ran, or nothing; the text of a SyntaxError names its line."""
    if isinstance(error, SyntaxError):
        return ""
    place, importing, trace = "", False, error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            importing = True
        elif importing:  # the frames before it are the registry's
            place = f" ({file}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place


def _is_or_holds(missing: str | None, module: str) -> bool:
    return missing is not None and (module == missing or module.startswith(missing + "."))


def _promise(ref: str, promised_by: str) -> str:
    return f", but {promised_by} names {ref!r}; reinstall it, or report this to its author" if promised_by else ""
