"""Writes `stubs/twinkle-stubs`: what our own plugins offer, for type checkers; the meta distribution ships it.

`python scripts/type_stubs.py` renews the folder, with `--check` it only says whether it is out of date.
"""

import sys
import tomllib
from pathlib import Path

from twinkle_cli.types import PACKAGE, stubs, write_stubs

ROOT = Path(__file__).resolve().parents[1]
STUBS = ROOT / "stubs" / PACKAGE


def offered() -> dict[str, dict[str, str]]:
    """Return what the manifests of all members offer: names and where they are defined, by public module."""
    names: dict[str, dict[str, str]] = {}
    for path in sorted(
        path for depth in ("*", "plugins/*") for path in ROOT.glob(f"{depth}/src/*/twinkle-plugin.toml")
    ):
        manifest = tomllib.loads(path.read_text("utf-8"))
        for component in manifest.get("component", ()):
            names.setdefault(f"twinkle.{component['kind']}", {})[component["name"]] = component["ref"]
        for export in manifest.get("export", ()):
            names.setdefault(export["module"], {})[export["name"]] = export["ref"]
    return names


def main(check: bool) -> int:
    """Renew the stubs, or report whether they are out of date."""
    wanted = {relative: text for relative, text, _ in stubs(offered())}
    found = {str(path.relative_to(STUBS)): path.read_text("utf-8") for path in STUBS.rglob("*.pyi")}
    if wanted == found:
        return 0
    if check:
        sys.stdout.write("stubs/ is out of date; run: make format\n")
        return 1
    write_stubs(STUBS, offered())
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
