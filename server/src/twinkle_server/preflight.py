"""Checks of settings before a start, each of which raises its own error; `together` reports what all of them find."""

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from twinkle import registry
from twinkle.errors import ConfigError, TwinkleError
from twinkle_registry import check_requirements
from twinkle_registry.naming import nearest_or_all
from twinkle_server import tls
from twinkle_server.data.rules import bare
from twinkle_server.errors import StoreError
from twinkle_server.limits.forwarded import networks
from twinkle_server.settings import Settings
from twinkle_server.store.filesystem import check_local
from twinkle_server.tenancy.auth import is_loopback

Check = Callable[[], object]
COLLECTORS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables of OpenTelemetry that name a collector, the most specific one first."""
_DATA_FILES: Final = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
"""Ends of names that are files and not ids at a hub."""


def together(checks: Sequence[Check]) -> None:
    """Run all checks, and raise what they found.

    Raises:
        TwinkleError: the error of the only check that failed.
        StoreError: the same.
        ConfigError: several checks failed; one line for each different problem.
    """
    errors: dict[str, Exception] = {}
    for check in checks:
        try:
            check()
        except (TwinkleError, StoreError) as error:
            errors.setdefault(str(error), error)
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        raise ConfigError("\n  ".join([f"{len(errors)} problems in the settings", *errors]))


def safety(settings: Settings) -> list[Check]:
    """Return the checks that need nothing but the settings and their certificate; `twinkle serve` runs them, too."""
    return [
        partial(_check_access, settings),
        partial(_check_prefix, settings.root_path),
        *(partial(networks, (text,)) for text in settings.trusted_proxies),
        partial(tls.context, settings),
        partial(check_collector, settings),
    ]


def components(settings: Settings) -> list[Check]:
    """Return the checks that the components of the settings are installed; `twinkle serve` runs them, too."""
    from twinkle_server.engine.provider import check_installed

    return [
        partial(check_installed, settings.backend),
        *(partial(_check_loss, name) for name in settings.losses or ()),
        *(partial(_check_plugin, name) for name in settings.in_process_losses),
        partial(check_template, settings.template),
    ]


def _check_access(settings: Settings) -> None:
    if not settings.auth and not is_loopback(settings.host):
        raise ConfigError(
            f"--no-auth would accept requests from anyone who can reach {settings.host}; remove it, or serve 127.0.0.1"
        )


def _check_prefix(prefix: str) -> None:
    if prefix and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", prefix):
        raise ConfigError(f"--root-path must be a path such as /twinkle, without a slash at its end, got {prefix!r}")


def collector(settings: Settings, environment: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Return the collector of traces and what names it: `--otlp-endpoint`, or a variable; None if there is none."""
    if settings.otlp_endpoint is not None:
        return settings.otlp_endpoint, "--otlp-endpoint"
    return next(((environment[name], name) for name in COLLECTORS if environment.get(name)), None)


def check_collector(settings: Settings) -> None:
    """Refuse a collector that is not a URL.

    Raises:
        ConfigError: names the flag or the variable.
    """
    if (found := collector(settings)) is None:
        return
    url, source = found
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"{source} must be a URL such as http://127.0.0.1:4318, got {url!r}")


def _check_loss(name: str) -> None:
    """Refuse a loss that requests could not use.

    Raises:
        ComponentNotFound: no plugin offers a loss of this name.
        ConfigError: it is not declared as safe for tenants.
    """
    spec = registry().find(name, "loss")
    if not (spec.tenant_safe and "served" in spec.runtimes):
        raise ConfigError(
            f'--loss {name}: its manifest must declare `tenant_safe = true` and the runtime `"served"`; '
            "remove the option, or declare them if the loss is safe"
        )


def _check_plugin(name: str) -> None:
    """Refuse a plugin of `losses.in_process` that is not installed."""
    known = [record.name for record in registry().records]
    if name not in known:
        raise ConfigError(f"--loss-in-process {name}: no such plugin is installed; {nearest_or_all(name, known)}")


def check_template(name: str) -> None:
    """Refuse a template of the chat endpoints that is not installed; a reference is checked by `check_reference`.

    The default is not required: a service without chat templates still trains and samples token ids.

    Raises:
        ComponentNotFound: no plugin offers the template.
        RequirementMissing: the template needs a package that is not installed.
    """
    if name != Settings.__dataclass_fields__["template"].default and ":" not in name:
        check_requirements(registry().find(name, "template"))


def check_reference(settings: Settings) -> None:
    """Import a template that is given by a reference such as `package.module:Class`.

    Raises:
        TwinkleError: it does not exist, or is not a template.
    """
    if ":" in settings.template:
        registry().resolve(settings.template, "template")


def check_writable(data: Path) -> None:
    """Refuse a data folder that cannot be created or written, or is on a network file system. Nothing is changed.

    Raises:
        ConfigError: the file system refuses.
        StoreError: the file system is a remote one.
    """
    folder = next(path for path in (data, *data.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):  # has no name where the file system supports that
            pass
    except OSError as error:
        action = "write" if folder == data else "create"
        raise ConfigError(
            f"--data {data}: cannot {action} it: {folder}: {error.strerror}; use a folder that this user can write"
        ) from error
    check_local(folder)


def data_sets(sets: Mapping[str, str]) -> list[Check]:
    """Return the checks of the data sets that requests may name."""
    return [partial(_check_ids, sets), *(partial(_check_set, name, place) for name, place in sets.items())]


def _check_ids(sets: Mapping[str, str]) -> None:
    by_id: dict[str, str] = {}
    for name in sets:
        if (first := by_id.setdefault(bare(name), name)) != name:
            raise ConfigError(f"datasets.sets: {first!r} and {name!r} are the same id; remove one")


def _check_set(name: str, place: str) -> None:
    from twinkle.hub.local import reference_of, scheme_of

    path = Path(place).expanduser()
    if scheme_of(place) is None and path.exists():
        return
    reference = None if path.suffix.lower() in _DATA_FILES else reference_of(place, bare=True)
    scheme = None if reference is None else scheme_of(reference)
    if scheme is None:
        raise ConfigError(f"datasets.sets: {name!r}: {place} does not exist; use a file, a folder or the id at a hub")
    check_requirements(registry().find(scheme, "hub"))
