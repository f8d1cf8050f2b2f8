"""CPU time of `twinkle plugins list` with 60 further plugins, and of what else a person asks of them.

    python benchmarks/plugins_list.py

The plugins are made on the spot: 55 whole ones of four components each, and five with something wrong. In milliseconds
over a bare interpreter, with compiled modules as an installation has them. Goals: `list` at most 200 ms, also when the
registry remembers nothing (`TWINKLE_CACHE=0`), and no heavy module imported by any of them.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from os import environ
from pathlib import Path

from _pairs import describe_machine
from startup import CLI, cpu_ms, plugins

REPETITIONS = 7
HEAVY = ("torch", "transformers", "datasets", "numpy", "pyarrow", "pandas", "pydantic", "huggingface_hub", "modelscope")
CASES = (  # arguments, cache, goal
    (("list",), "1", 200),
    (("list",), "0", 200),
    (("list", "--json"), "1", 200),
    (("list", "loss"), "1", 200),
    (("search", "focal"), "1", None),
    (("doctor",), "1", None),
)
LOADED = "import atexit, json, sys; atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))\n"
BROKEN = {  # by the text that a manifest is changed in
    "wrong key": ('summary = "One of many"', 'sumary = "One of many"'),
    "unknown kind": ('kind = "loss"', 'kind = "los"'),
    "newer core": ('core = ">=0.1,<1"', 'core = ">=9"'),
    "not TOML": ("schema = 1", "schema = "),
    "two of one name": ("Acme", "Shared"),
}


def main() -> int:
    """Run the benchmark and print its table; exit code 1 when a goal is missed."""
    print(describe_machine(["twinkle-core", "pluggy", "click"]))
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        site = plugins(Path(folder, "site"), 60)
        spoil(site)
        # Who sets this measures the compiler.
        environment = {name: value for name, value in environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPATH": str(site), "TWINKLE_CACHE_DIR": str(Path(folder, "cache"))}
        listed = statuses(environment)
        print(f"{len(listed)} plugins: " + ", ".join(f"{listed.count(each)} {each}" for each in sorted(set(listed))))
        print(f"{'':32}{'ms over bare':>14}{'min':>7}{'max':>7}{'goal':>7}")
        for arguments, cache, goal in CASES:
            extra = over_bare({**environment, "TWINKLE_CACHE": cache}, arguments)
            middle = statistics.median(extra)
            missed += goal is not None and middle > goal
            name = f"plugins {' '.join(arguments)}{', no cache' if cache == '0' else ''}"
            print(f"{name:32}{middle:>14.0f}{min(extra):>7.0f}{max(extra):>7.0f}{goal or '':>7}")
            if heavy := heavy_modules(environment, arguments):
                missed += 1
                print(f"plugins {' '.join(arguments)} imports {', '.join(heavy)}")
    return 1 if missed else 0


def spoil(site: Path) -> None:
    """Break the first five plugins, each in another way."""
    for number, (old, new) in enumerate(BROKEN.values()):
        manifest = site / f"acme_{number}" / "twinkle-plugin.toml"
        manifest.write_text(manifest.read_text("utf-8").replace(old, new), "utf-8")


def statuses(environment: dict[str, str]) -> list[str]:
    """Return the status of every plugin that is found."""
    command = [sys.executable, "-c", CLI, "plugins", "list", "--json"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return [str(row["status"]) for row in json.loads(done.stdout)]


def heavy_modules(environment: dict[str, str], arguments: tuple[str, ...]) -> list[str]:
    """Return which heavy modules a command leaves imported."""
    command = [sys.executable, "-c", LOADED + CLI, "plugins", *arguments]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    return [name for name in HEAVY if name in loaded]


def over_bare(environment: dict[str, str], arguments: tuple[str, ...]) -> list[float]:
    """Return milliseconds of CPU over `python -c pass`, pair by pair; the first pair fills the cache."""
    code = f"import sys\ntry:\n    {CLI.replace('; ', chr(10) + '    ')}\nexcept SystemExit:\n    pass"
    pairs = [
        (cpu_ms(environment, code, "plugins", *arguments), cpu_ms(environment, "pass")) for _ in range(REPETITIONS + 1)
    ]
    return [ours - bare for ours, bare in pairs[1:]]


if __name__ == "__main__":
    sys.exit(main())
