"""How every benchmark here measures: contestants in turn, CPU time, median of paired ratios."""

import platform
import re
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "asimd", "sve", "bf16")
"""Those that change the kernels of a product, as `twinkle doctor` lists them; not every benchmark imports Twinkle."""


@dataclass(frozen=True)
class Ratio:
    """Paired ratios ours / theirs: median, minimum and maximum."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} (min {self.low:.3f}, max {self.high:.3f})"


def paired(
    ours: Callable[[], object], theirs: Callable[[], object], repetitions: int = 7
) -> tuple[float, float, Ratio]:
    """Run two functions in turn and return their median CPU seconds and the ratio; the first pair is dropped."""
    pairs = []
    for index in range(repetitions + 1):
        order = (ours, theirs) if index % 2 else (theirs, ours)
        seconds = {function: _seconds(function, time.process_time) for function in order}
        pairs.append((seconds[ours], seconds[theirs]))
    kept = pairs[1:]
    ratios = [a / b for a, b in kept]
    return (
        statistics.median(a for a, _ in kept),
        statistics.median(b for _, b in kept),
        Ratio(statistics.median(ratios), min(ratios), max(ratios)),
    )


def in_turn(
    contestants: Mapping[str, Callable[[], object]],
    repetitions: int = 5,
    *,
    warm: bool = False,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Run several functions in turn, in changing order, and return the CPU seconds of each.

    Entry i of every list is of the same round, for `ratio`. The first round is dropped, unless all ran before (`warm`).
    Where other processes compute, `clock=time.perf_counter` gives wall time instead.
    """
    dropped = 0 if warm else 1
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(repetitions + dropped):
        for name in sorted(contestants, reverse=bool(index % 2)):
            seconds[name].append(_seconds(contestants[name], clock))
    return {name: values[dropped:] for name, values in seconds.items()}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the paired ratios of two lists of `in_turn`."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def describe_machine(packages: Sequence[str]) -> str:
    """Return Python, package versions, processor and its instruction sets in one line."""
    path = Path("/proc/cpuinfo")
    cpuinfo = path.read_text("utf-8", "replace") if path.is_file() else ""
    name = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.M)
    flags = set((re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.M) or [""])[0].split())
    sets = " ".join(flag for flag in _INSTRUCTION_SETS if flag in flags) or "no known instruction set"
    processor = f"{name[1] if name else 'unnamed processor'} ({platform.machine()}, {sets})"
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"Python {platform.python_version()}, {versions}; {processor}"


def peak_kib() -> int:
    """Return this process's peak resident size.

    From the kernel's high-water mark where there is one: `ru_maxrss` survives `exec`, so a child shows its parent's.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _seconds(function: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    function()
    return clock() - start
