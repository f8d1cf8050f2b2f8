"""The failpoints of the server, read from its source."""

import re

from house import ROOT

REACH = r"\breach\(\s*\"([^\"]+)\""
SOURCE = ROOT / "server" / "src" / "twinkle_server"


BY_HAND = ("trash.", "aside.", "backup.", "restore.")
"""Areas that upkeep and an operator's commands reach; tests of their own kill them there."""


def served_failpoints() -> list[str]:
    """Return the failpoints that requests reach."""
    return [name for name in failpoints() if not name.startswith(BY_HAND)]


def failpoints() -> list[str]:
    """Return every failpoint of the source."""
    found = {
        name
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "failpoints.py"
        for name in re.findall(REACH, path.read_text("utf-8"))
    }
    return sorted(found)
