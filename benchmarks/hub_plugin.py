"""CPU time of loading a locked hub plugin from the cache, over the same package installed by pip.

    python benchmarks/hub_plugin.py

A plugin of one module and one of 20 modules (about 2,000 lines) are made on the spot, once as a repository that is
added and locked, once as an installed package with compiled modules. A new process each time finds all plugins and
resolves the loss by its name, which is timed. The hub plugin is looked up in lock and policy, its files are hashed,
and its modules are compiled anew, since a stored `.pyc` is never run. Goals: at most 40 ms more with one module, 80 ms
more with 20.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _pairs import describe_machine
from startup import CLI

REPETITIONS = 11
CASES = ((1, 40), (20, 80))
RESOLVE = """
import time, twinkle, twinkle.loss
start = time.process_time()
twinkle.registry().resolve("BenchLoss", "loss")
print(1000 * (time.process_time() - start))
"""
MANIFEST = """schema = 1
core = ">=0.1,<1"
name = "acme-bench"

[[component]]
kind = "loss"
name = "BenchLoss"
ref = ".loss:BenchLoss"
"""
LOSS = '''"""A loss."""

from twinkle.loss import Loss
{imports}

class BenchLoss(Loss):
    """Nothing."""

    def __call__(self, inputs, outputs):
        """Return nothing."""
'''
FUNCTION = '''
def f{number}(x: float, y: float = {number}) -> float:
    """Return something."""
    total = x + y
    for i in range({number}):
        total = total * i + y
    return total
'''


def main() -> int:
    """Run the benchmark and print its table; exit code 1 when a goal is missed."""
    print(describe_machine(["twinkle-core", "twinkle-registry", "twinkle-hub"]))
    print(f"{'ms of CPU':12}{'installed':>10}{'Hub':>7}{'more':>7}{'min':>7}{'max':>7}{'goal':>7}")
    missed = 0
    for modules, goal in CASES:
        with tempfile.TemporaryDirectory() as folder:
            ours, plain = measure(Path(folder), modules)
        more = [a - b for a, b in zip(ours, plain, strict=True)]
        middle = statistics.median(more)
        missed += middle > goal
        name = f"{modules} module{'s' if modules > 1 else ''}"
        print(f"{name:12}{statistics.median(plain):>10.0f}{statistics.median(ours):>7.0f}", end="")
        print(f"{middle:>7.0f}{min(more):>7.0f}{max(more):>7.0f}{goal:>7}")
    return 1 if missed else 0


def measure(folder: Path, modules: int) -> tuple[list[float], list[float]]:
    """Return milliseconds of CPU for the hub plugin and for the installed one, round by round; the first is dropped."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    repository = write_package(folder / "acme_bench", modules)
    site = folder / "site"
    shutil.copytree(repository, site / "acme_bench")
    info = site / "acme_bench-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-bench\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text("[twinkle]\nacme = acme_bench\n", "utf-8")
    nothing = {**clean, "TWINKLE_CACHE_DIR": str(folder / "cache"), "TWINKLE_LOCK": str(folder / "empty" / "no.lock")}
    (folder / "empty").mkdir()
    installed = {**nothing, "PYTHONPATH": str(site)}
    locked = {**nothing, "TWINKLE_LOCK": str(folder / "twinkle.lock")}
    add = [sys.executable, "-c", CLI, "plugins", "add", f"file://{repository}", "--yes"]
    subprocess.run(add, env=locked, check=True, stdout=subprocess.DEVNULL)
    ours, plain = [], []
    for _ in range(REPETITIONS + 1):
        ours.append(resolved(locked))
        plain.append(resolved(installed))
    return ours[1:], plain[1:]


def resolved(environment: dict[str, str]) -> float:
    """Return how many milliseconds of CPU it takes to find and import the loss."""
    command = [sys.executable, "-c", RESOLVE]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def write_package(folder: Path, modules: int) -> Path:
    """Write a plugin whose loss imports all its other modules, of 100 lines each."""
    folder.mkdir()
    (folder / "__init__.py").write_text('"""A plugin."""\n', "utf-8")
    (folder / "twinkle-plugin.toml").write_text(MANIFEST, "utf-8")
    parts = [f"part{number}" for number in range(modules - 1)]
    for part in parts:
        text = "\n".join(FUNCTION.format(number=number) for number in range(11))
        (folder / f"{part}.py").write_text(f'"""A part."""\n\n{text}', "utf-8")
    imports = f"\nfrom . import {', '.join(parts)}\n" if parts else ""
    (folder / "loss.py").write_text(LOSS.replace("{imports}", imports), "utf-8")
    return folder


if __name__ == "__main__":
    sys.exit(main())
