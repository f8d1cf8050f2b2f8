"""CPU time of `import twinkle`, `twinkle --help` and `twinkle plugins list` over a bare interpreter's.

    python benchmarks/startup.py

With our own plugins, and with 60 further ones installed (made on the spot). Goals: import at most 40 ms, `--help` at
most 80 ms with our own plugins and 120 ms with 60 more, `plugins list` at most 200 ms with 60 more.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _pairs import describe_machine

CLI = "from twinkle.cli import main; main()"
REPETITIONS = 15
CASES = (  # name, code, arguments, goals in ms: with our own plugins, with 60 more
    ("import twinkle", "import twinkle", (), 40, None),
    ("twinkle --help", CLI, ("--help",), 80, 120),
    ("twinkle plugins list", CLI, ("plugins", "list"), None, 200),
)


def main() -> int:
    """Run the benchmark and print its table; exit code 1 when a goal is missed."""
    print(describe_machine(["twinkle-core", "pluggy", "click"]))
    print(f"{'':24}{'plugins':>10}{'ms over bare':>14}{'min':>7}{'max':>7}{'goal':>7}")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        more = plugins(Path(folder, "site"), 60)
        for name, code, arguments, goal, goal_with_more in CASES:
            for label, path, limit in (("ours", None, goal), ("ours + 60", more, goal_with_more)):
                extra = over_bare(code, arguments, path, Path(folder, f"cache-{label}"))
                middle = statistics.median(extra)
                missed += limit is not None and middle > limit
                shown = "" if limit is None else f"{limit}"
                print(f"{name:24}{label:>10}{middle:>14.0f}{min(extra):>7.0f}{max(extra):>7.0f}{shown:>7}")
    return 1 if missed else 0


def over_bare(code: str, arguments: tuple[str, ...], path: Path | None, cache: Path) -> list[float]:
    """Return milliseconds of CPU over `python -c pass`, pair by pair; the first pair fills the caches."""
    environment = {**os.environ, "TWINKLE_CACHE_DIR": str(cache)}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    pairs = [(cpu_ms(environment, code, *arguments), cpu_ms(environment, "pass")) for _ in range(REPETITIONS + 1)]
    return [ours - bare for ours, bare in pairs[1:]]


def cpu_ms(environment: dict[str, str], code: str, *arguments: str) -> float:
    """Return user plus system milliseconds of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, *arguments]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def plugins(site: Path, count: int) -> Path:
    """Install `count` small plugins of four components each below `site`."""
    for number in range(count):
        package = site / f"acme_{number}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text('"""A plugin."""\n')
        components = [
            f'[[component]]\nkind = "loss"\nname = "Acme{number}Loss{part}"\nref = "acme_{number}.loss:L{part}"\n'
            f'summary = "One of many"\nrequires = ["torch>=2.6"]\n'
            for part in range(4)
        ]
        head = f'schema = 1\ncore = ">=0.1,<1"\nname = "acme-{number}"\n\n'
        (package / "twinkle-plugin.toml").write_text(head + "\n".join(components))
        info = site / f"acme_{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-{number}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[twinkle]\nacme = acme_{number}\n")
    return site


if __name__ == "__main__":
    sys.exit(main())
