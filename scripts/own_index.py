"""Writes registry/index/twinkle.toml: which of our own distributions offers which component.

`python scripts/own_index.py` renews the file from the manifests, with `--check` it only says whether it is out of date.
"""

import json
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INDEX = ROOT / "registry" / "index" / "twinkle.toml"
HEAD = "# The components of our own distributions; scripts/own_index.py writes this file.\nschema = 1\n"


def index() -> str:
    """Return the text of the file."""
    entries, exports, successors = [], [], []
    for path in (path for depth in ("*", "plugins/*") for path in ROOT.glob(f"{depth}/src/*/twinkle-plugin.toml")):
        manifest = tomllib.loads(path.read_text("utf-8"))
        entries += [(manifest["name"], component) for component in manifest.get("component", ())]
        exports += [(row["module"], row["name"], manifest["name"]) for row in manifest.get("export", ())]
        successors += [(manifest["name"], former) for former in manifest.get("formerly", ())]
    components = [entry(*pair) for pair in sorted(entries, key=lambda e: (e[0], e[1]["kind"], e[1]["name"]))]
    rest = [*(export(*row) for row in sorted(exports)), *(successor(*row) for row in sorted(successors))]
    return HEAD + "".join([*components, *rest])


def export(module: str, name: str, package: str) -> str:
    """Return the table of one attribute that a plugin adds to a namespace of core."""
    values = {"module": module, "name": name, "package": package}
    return "\n".join(["", "[[export]]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""])


def successor(package: str, former: str) -> str:
    """Return the table of a distribution that parts of another one moved to."""
    return "\n".join(["", "[[successor]]", f"package = {json.dumps(package)}", f"of = {json.dumps(former)}", ""])


def entry(package: str, component: dict[str, str]) -> str:
    """Return one table."""
    values = {key: component.get(key, "") for key in ("kind", "name")}
    values |= {"package": package, "summary": component.get("summary", ""), "author": "Twinkle"}
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join(["", "[[component]]", *lines, ""])


def main(check: bool) -> int:
    """Renew the file, or report that it is out of date."""
    text = index()
    if INDEX.is_file() and INDEX.read_text("utf-8") == text:
        return 0
    if check:
        sys.stdout.write("registry/index/twinkle.toml is out of date; run: python scripts/own_index.py\n")
        return 1
    INDEX.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
