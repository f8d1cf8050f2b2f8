"""Seconds from `twinkle plugins new` to a green `twinkle plugins test`, as an author waits for them.

Each command is a process of its own, in a virtual environment that sees the packages of this one:

    python benchmarks/plugin_author.py [KIND ...]
"""

import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

KINDS = ("loss", "reward", "patch")


def timed(what: str, *command: str | Path, folder: Path) -> float:
    """Run a command, print how long it took, and return that in seconds; what fails ends the benchmark."""
    begin = time.perf_counter()
    done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{what} failed:\n{done.stdout}{done.stderr}")
    print(f"  {what:28} {seconds:6.2f} s")
    return seconds


def environment(folder: Path) -> Path:
    """Make a virtual environment that sees what this one has, editable installations too; return its `bin`."""
    venv.create(folder, with_pip=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    ours = [entry for entry in sys.path if entry.endswith("site-packages")]
    lines = "".join(f"import site; site.addsitedir({entry!r})\n" for entry in ours)
    (site / "ours.pth").write_text(lines, "utf-8")
    return folder / "bin"


def main(kinds: list[str]) -> None:
    """Make, install and test one plugin of each kind."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        python = environment(folder / "environment") / "python"
        twinkle = [python, "-m", "twinkle.cli"]
        for kind in kinds:
            name = f"acme-{kind.replace('_', '-')}"
            print(f"{kind}:")
            pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
            total = timed("twinkle plugins new", *twinkle, "plugins", "new", kind, name, folder=folder)
            total += timed("pip install -e", *pip, "-e", f"./{name}", folder=folder)
            total += timed("twinkle plugins test", *twinkle, "plugins", "test", name, folder=folder)
            print(f"  {'from new to green':28} {total:6.2f} s")


if __name__ == "__main__":
    main(sys.argv[1:] or list(KINDS))
