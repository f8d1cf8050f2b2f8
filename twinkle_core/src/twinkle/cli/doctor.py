"""What `twinkle plugins doctor` looks for."""

from collections.abc import Iterator
from dataclasses import dataclass

from twinkle.errors import ComponentConflict, PluginBroken, SettingsError, TwinkleError
from twinkle_registry import ComponentSpec, Registry, missing_requirements
from twinkle_registry.naming import canonical


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and what to do about it (empty where `what` says it)."""

    kind: str
    what: str
    remedy: str = ""


def examine() -> list[Problem]:
    """Return every problem of this installation."""
    import warnings

    from twinkle._registry import registry

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same notices are among the problems
            found = registry()
    except SettingsError as error:
        return [Problem("settings", str(error)), *_second_owners()]
    problems = [*_unusable(found), *_settings(found), *_conflicts(found), *_missing(found), *_promises(found)]
    return [*problems, *_second_owners()]


def _unusable(registry: Registry) -> Iterator[Problem]:
    for record in registry.records:
        if record.status in ("ok", "disabled"):
            continue
        stale = "stale" in record.reason
        remedy = f"pip install --force-reinstall {record.dist}, or pip uninstall {record.dist}"
        if "://" in record.dist:
            remedy = f"twinkle plugins verify, or without it: twinkle plugins remove {record.dist}"
        elif record.status == "incompatible":
            remedy = ""  # the reason ends with the commands
        elif record.location:
            remedy = f"edit {record.location}, or tell its author; without it: pip uninstall {record.dist}"
        yield Problem(
            "stale entry point" if stale else f"{record.status} plugin", f"{record.name}: {record.reason}", remedy
        )


def _settings(registry: Registry) -> Iterator[Problem]:
    for notice in registry.notices():
        yield Problem("settings", notice)


def _conflicts(registry: Registry) -> Iterator[Problem]:
    for kind in registry.kinds:
        for name in registry.names(kind):
            try:
                registry.find(name, kind)
            except ComponentConflict as error:
                yield Problem("duplicate provider", str(error))


def _missing(registry: Registry) -> Iterator[Problem]:
    lacking: dict[tuple[str, str], list[str]] = {}
    for spec in _specs(registry):
        for missing in missing_requirements(spec):
            lacking.setdefault((spec.dist, str(missing)), []).append(spec.name)
    for (plugin, requirement), names in lacking.items():
        command = f"pip install '{requirement.partition(' (')[0]}'"
        yield Problem(
            "missing requirement",
            f"{', '.join(names)} of {plugin} need{'s' if len(names) == 1 else ''} {requirement}",
            command,
        )


def _promises(registry: Registry) -> Iterator[Problem]:
    """Yield components and hooks whose module is not there; nothing is imported, so attributes are not checked."""
    for spec in _specs(registry):
        module = spec.ref.partition(":")[0]
        if not _exists(module):
            error = PluginBroken(f"{spec}: its manifest says ref = {spec.ref!r}, but there is no module {module!r}")
            yield Problem("broken component", str(error), f"reinstall {spec.dist} or tell its author")
    for record in registry.records:
        hooks = record.manifest.hooks if record.manifest and record.status == "ok" else None
        if hooks is not None and not _exists(hooks.module):
            what = f"{record.name}: its manifest says hooks.module = {hooks.module!r}, but there is no such module"
            yield Problem("broken hooks", what, f"edit {record.location}, reinstall {record.dist} or tell its author")


def _exists(module: str) -> bool:
    """Say whether there is such a module, from the folders of its parents: `find_spec` would import these."""
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    if module in sys.modules:
        return True
    if module.startswith("twinkle_registry.code."):
        return _exists_in_store(module)
    name, *rest = module.split(".")
    try:
        spec = find_spec(name)
        for part in rest:
            name = f"{name}.{part}"
            spec = PathFinder.find_spec(name, spec.submodule_search_locations or ()) if spec else None
    except KeyError:  # a namespace in a package that is not imported: its folders are not known yet
        return True
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None


def _exists_in_store(module: str) -> bool:
    from twinkle_registry.code.finder import CodeFinder

    try:
        return CodeFinder.find_spec(module) is not None
    except (ImportError, TwinkleError):
        return False


def _specs(registry: Registry) -> Iterator[ComponentSpec]:
    for kind in registry.kinds:
        for specs in registry.specs(kind).values():
            yield from specs


def _second_owners() -> Iterator[Problem]:
    """Yield other distributions that put files into the package `twinkle`: whichever came last has overwritten."""
    from importlib.metadata import distributions

    for dist in distributions():
        name = dist.metadata["Name"] or ""
        record = dist.read_text("RECORD") or ""
        if canonical(name) != "twinkle-core" and any(line.startswith("twinkle/") for line in record.splitlines()):
            yield Problem(
                "second owner of twinkle/",
                f"{name} {dist.version} installs files into the package 'twinkle', which is twinkle-core's",
                f"pip uninstall {name}, then pip install --force-reinstall --no-deps twinkle-core",
            )
