"""The failpoints of the server, read from its source."""

import re

from house import ROOT

REACH = r"\breach\(\s*\"([^\"]+)\""
SOURCE = ROOT / "server" / "src" / "twinkle_server"


def failpoints() -> list[str]:
    """Return every failpoint of the source."""
    found = {
        name
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "failpoints.py"
        for name in re.findall(REACH, path.read_text("utf-8"))
    }
    return sorted(found)
