"""Formats an installed plugin for commands: its fields, why it cannot be used, and missing requirements."""

import os
import re
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from twinkle_registry.naming import canonical

if TYPE_CHECKING:
    from twinkle_registry import PluginRecord

_NAME = re.compile(r"[\w.-]+")
_METADATA = (".dist-info", ".egg-info")


def plugin_as_plain(record: "PluginRecord") -> dict[str, Any]:
    """Return one plugin as in `plugins list --json`; `kinds` maps a kind to names of components.

    `lacks` are requirements of its components that are not installed.
    """
    kinds: dict[str, list[str]] = {}
    for spec in record.manifest.components if record.manifest else ():
        kinds.setdefault(spec.kind, []).append(spec.name)
    return {
        "name": record.name,
        "version": record.version,
        "status": record.status,
        "reason": record.reason,
        "lacks": _lacking(record),
        "dist": record.dist,
        "package": record.package,
        "location": record.location,
        "kinds": {kind: sorted(names) for kind, names in sorted(kinds.items())},
        "commands": [command.name for command in record.manifest.commands] if record.manifest else [],
        "hooks": list(record.manifest.hooks.implements) if record.manifest and record.manifest.hooks else [],
    }


def reason_with_lines(record: "PluginRecord") -> str:
    """Return why a plugin cannot be used, with the lines of its manifest that cause it, as in the doctor."""
    from twinkle_cli.manifest_lines import with_lines
    from twinkle_registry import ManifestError, PluginBroken

    if record.location and isinstance(record.cause, ManifestError | PluginBroken):
        return with_lines(record.reason, record.location)
    return record.reason


def _lacking(record: "PluginRecord") -> list[str]:
    """Return the requirements of a usable plugin's components whose distribution is not on sys.path.

    `plugins list` has to be fast and checks names only; the doctor checks versions, extras and markers.
    """
    if record.manifest is None or record.status != "ok":
        return []
    requirements = dict.fromkeys(
        text for spec in record.manifest.components for text in spec.requires if ";" not in text
    )
    names = {text: _NAME.match(text) for text in requirements}
    return [text for text, name in names.items() if name and canonical(name[0]) not in _installed()]


@cache
def _installed() -> frozenset[str]:
    names: set[str] = set()
    for entry in sys.path:
        try:
            files = os.listdir(entry or ".")  # noqa: PTH208 - a third of pathlib's time
        except OSError:  # an archive, or a missing path
            continue
        names.update(canonical(file.split("-", 1)[0]) for file in files if file.endswith(_METADATA))
    return frozenset(names)
