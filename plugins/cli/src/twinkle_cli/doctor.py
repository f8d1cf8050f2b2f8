"""The checks of `twinkle plugins doctor`."""

from collections.abc import Collection, Iterator
from importlib.metadata import distributions

from twinkle.errors import ComponentConflict, PluginBroken, SettingsError
from twinkle_cli.installation import Problem, gone_editables, gone_paths, second_commands, second_owners
from twinkle_cli.manifest_lines import first_line
from twinkle_cli.records import reason_with_lines
from twinkle_cli.source import find_module, surely_lacks, syntax_errors
from twinkle_registry import (
    ComponentSpec,
    MissingRequirement,
    NotTrusted,
    PluginRecord,
    Registry,
    RequirementMissing,
    missing_requirements,
)
from twinkle_registry.naming import canonical
from twinkle_registry.validation import with_extra


def examine() -> list[Problem]:
    """Return every problem of this installation, without importing plugins."""
    import warnings

    from twinkle._registry import registry

    dists = list(distributions())
    missing_folders = gone_editables(dists)
    installation = [*missing_folders.values(), *gone_paths(dists), *second_commands(dists)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same notices are part of the problems
            plugins = registry()
    except SettingsError as error:
        wrong = dict.fromkeys([str(error), *_policy()])
        return [*(Problem("settings", text) for text in wrong), *installation, *second_owners(dists, [])]
    settings = [*_settings(plugins), *(Problem("settings", text) for text in _policy())]
    problems = [
        *_unusable(plugins, missing_folders),
        *settings,
        *_conflicts(plugins),
        *_missing(plugins),
        *_promises(plugins),
    ]
    return [*problems, *_lock(plugins), *_revocations(), *installation, *second_owners(dists, plugins.records)]


def _unusable(registry: Registry, reported: Collection[str]) -> Iterator[Problem]:
    for record in map(registry.checked, registry.records):
        frozen_out = record.status == "disabled" and isinstance(record.cause, NotTrusted)
        if (
            record.status == "ok"
            or (record.status == "disabled" and not frozen_out)
            or canonical(record.dist) in reported
        ):
            continue
        reason = reason_with_lines(record)
        kind = "stale entry point" if "stale" in record.reason else f"{record.status} plugin"
        yield Problem(kind, f"{record.name}: {reason}", _remedy(record, first_line(reason)))


def _remedy(record: PluginRecord, line: int) -> str:
    if "://" in record.dist:
        return f"twinkle plugins add {record.dist}, or twinkle plugins remove {record.dist}"
    if record.status in ("incompatible", "disabled"):
        return ""  # the reason ends with the commands
    if record.location:
        place = f"{record.location}:{line}" if line else record.location
        return f"edit {place}, or report it to its author; to remove it: pip uninstall {record.dist}"
    return f"pip install --force-reinstall {record.dist}, or pip uninstall {record.dist}"


def _settings(registry: Registry) -> Iterator[Problem]:
    for notice in registry.notices():
        yield Problem("settings", notice)


def _policy() -> list[str]:
    """Return the problems of `[trust]`, which is only read when code from a hub is loaded."""
    from twinkle_registry.trust.policy import Policy

    try:
        Policy.load()
    except (SettingsError, RequirementMissing) as error:
        return [str(error)]
    return []


def _revocations() -> Iterator[Problem]:
    """Yield the problems of the revocation lists; lists on the network are not read again."""
    from twinkle_registry.trust.policy import Policy

    try:
        lists = Policy.load().revoked
    except (SettingsError, RequirementMissing):
        return  # reported with the settings
    for known in lists:
        for text in filter(None, (known.error, known.problem)):
            yield Problem("revocation list", text, "twinkle plugins revoked")


def _conflicts(registry: Registry) -> Iterator[Problem]:
    for kind in registry.kinds:
        for name in registry.names(kind):
            try:
                registry.find(name, kind)
            except ComponentConflict as error:
                yield Problem("duplicate provider", str(error))


def _missing(registry: Registry) -> Iterator[Problem]:
    """Yield missing requirements of components; those of an extra are reported as optional."""
    dists = {record.name: record.dist for record in registry.records}
    lacking: dict[tuple[str, MissingRequirement], list[str]] = {}
    cache: dict[
        tuple[str, ...], list[MissingRequirement]
    ] = {}  # most components of a plugin have the same requirements
    for spec in _specs(registry):
        if spec.requires not in cache:
            cache[spec.requires] = missing_requirements(spec)
        for missing in cache[spec.requires]:
            lacking.setdefault((spec.dist, missing), []).append(spec.name)
    for (plugin, missing), names in lacking.items():
        extra = with_extra(missing.requirement, (dists[plugin],))
        optional = bool(extra) and missing.installed is None
        yield Problem(
            "missing extra" if optional else "missing requirement",
            f"{', '.join(names)} of {plugin} need{'s' if len(names) == 1 else ''} {missing}",
            f"pip install '{extra or missing.requirement}'",
            optional=optional,
        )


def _promises(registry: Registry) -> Iterator[Problem]:
    """Yield components and hooks whose module is missing or invalid, or whose name is missing in it.

    Nothing is imported, so errors at import, and names that are defined at run time, are not detected.
    """
    for record in registry.records:
        for wrong, names in syntax_errors(record).items():
            text = f"{record.name}: {wrong}" + (f"; {', '.join(names)} cannot be imported" if names else "")
            yield Problem("broken module", text, f"edit it, reinstall {record.dist} or report it to its author")
    for spec in _specs(registry):
        module = spec.ref.partition(":")[0]
        if not _exists(module):
            error = PluginBroken(f"{spec}: its manifest has ref = {spec.ref!r}, but there is no module {module!r}")
            yield Problem("broken component", str(error), f"reinstall {spec.dist} or report it to its author")
        elif surely_lacks(spec.ref):
            name = spec.ref.partition(":")[2]
            error = PluginBroken(f"{spec}: its manifest has ref = {spec.ref!r}, but {module} has no {name!r}")
            yield Problem("broken component", str(error), f"reinstall {spec.dist} or report it to its author")
    for record in registry.records:
        hooks = record.manifest.hooks if record.manifest and record.status == "ok" else None
        if hooks is not None and not _exists(hooks.module):
            text = f"{record.name}: its manifest has hooks.module = {hooks.module!r}, but there is no such module"
            yield Problem(
                "broken hooks", text, f"edit {record.location}, reinstall {record.dist} or report it to its author"
            )


def _exists(module: str) -> bool:
    """Return whether a module exists; True if that cannot be determined without importing its package."""
    try:
        return find_module(module) is not None
    except (KeyError, NotTrusted):  # reported by the check of the lock
        return True


def _lock(registry: Registry) -> Iterator[Problem]:
    """Yield differences from twinkle.lock, if there is a lock."""
    import os

    from twinkle_registry.settings import lock_path

    try:
        if not os.path.isfile(lock_path()):  # noqa: PTH113 - it is a text already
            return
        from twinkle_registry.resolving import open_hub
        from twinkle_registry.trust.editor import verify

        if _policy():
            return  # already reported; an unreadable lock cannot be checked
        checked = verify(registry.records, lambda scheme: open_hub(scheme, registry, context=f"{scheme}://"))
    except NotTrusted:
        return  # the registry has already reported that this lock is ignored
    except SettingsError as error:
        yield Problem("lock", str(error))
        return
    for entry in checked:
        if entry.problem:
            yield Problem("lock", f"{entry.sort} {entry.name} {entry.version[:12]}".rstrip() + f": {entry.problem}")


def _specs(registry: Registry) -> Iterator[ComponentSpec]:
    for kind in registry.kinds:
        for specs in registry.specs(kind).values():
            yield from specs
