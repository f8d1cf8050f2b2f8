"""Which requirements of a plugin are not installed at all, told from names alone: `plugins list` has no time for more.

Versions, extras and markers are the doctor's.
"""

import os
import re
import sys
from functools import cache

from twinkle_registry import PluginRecord
from twinkle_registry.naming import canonical

_NAME = re.compile(r"[\w.-]+")
_METADATA = (".dist-info", ".egg-info")


def lacking(record: PluginRecord) -> list[str]:
    """Return the requirements of a usable plugin's components whose distribution is nowhere on sys.path."""
    if record.manifest is None or record.status != "ok":
        return []
    wanted = dict.fromkeys(text for spec in record.manifest.components for text in spec.requires if ";" not in text)
    found = {text: _NAME.match(text) for text in wanted}
    return [text for text, name in found.items() if name and canonical(name[0]) not in _installed()]


@cache
def _installed() -> frozenset[str]:
    names: set[str] = set()
    for entry in sys.path:
        try:
            files = os.listdir(entry or ".")  # noqa: PTH208 - a third of pathlib's time
        except OSError:  # an archive, or a path that leads nowhere
            continue
        names.update(canonical(file.split("-", 1)[0]) for file in files if file.endswith(_METADATA))
    return frozenset(names)
