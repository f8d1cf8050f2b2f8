"""How every benchmark of a GPU measures: CUDA events, contestants in turn, peak of the device's memory."""

import argparse
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import TypeVar

import torch

WARM_UPS = 3
Contestants = Mapping[str, Callable[[], object]]
T = TypeVar("T")


def arguments(doc: str | None, given: Sequence[str] | None) -> argparse.Namespace | None:
    """Return the options; None, after a line that says so, where there is no GPU.

    `--tiny` runs every path on whatever device there is, with sizes that mean nothing.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if not torch.cuda.is_available() and not options.tiny:
        print("there is no CUDA device: nothing is measured")
        return None
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.repetitions = min(options.repetitions, 2) if options.tiny else max(options.repetitions, 10)
    print(describe(options.device))
    return options


def describe(device: torch.device) -> str:
    """Return device, clocks and versions in one line."""
    names = ("torch", "transformers", "peft")
    versions = ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)])
    if device.type != "cuda":
        return f"{versions}; no GPU: the times below mean nothing"
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{versions}, CUDA {torch.version.cuda}; {torch.cuda.get_device_name(device)}, {memory:.0f} GiB, {clocks()}"


def clocks() -> str:
    """Return the clocks and the power limit as the driver tells them."""
    if shutil.which("nvidia-smi") is None:
        return "clocks unknown"
    query = "--query-gpu=clocks.sm,clocks.max.sm,power.limit"
    done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return f"SM clock now, SM clock at most, power limit: {lines[0]}" if lines else "clocks unknown"


def in_turn(contestants: Contestants, device: torch.device, repetitions: int) -> dict[str, list[float]]:
    """Run functions in turn, in changing order, and return the milliseconds of each, after three rounds to warm up."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(repetitions + WARM_UPS):
        for name in sorted(contestants, reverse=bool(number % 2)):
            found[name].append(milliseconds(contestants[name], device))
    return {name: values[WARM_UPS:] for name, values in found.items()}


def milliseconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call, from CUDA events where the device has them."""
    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    before.record()
    function()
    after.record()
    torch.cuda.synchronize(device)
    return float(before.elapsed_time(after))


def extra_mib(function: Callable[[], object], device: torch.device) -> float:
    """Return how far the device's memory rises above what is in use, in MiB; NaN without a GPU."""
    if device.type != "cuda":
        function()
        return float("nan")
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def that_fit(contestants: Mapping[str, Callable[[], T]]) -> dict[str, Callable[[], T]]:
    """Return the contestants that do not run out of the device's memory; name the others."""
    kept = {}
    for name, function in contestants.items():
        try:
            function()
        except torch.OutOfMemoryError:
            print(f"{name}: out of memory")
            torch.cuda.empty_cache()
        else:
            kept[name] = function
    return kept


def faster(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Return the median of the paired ratios."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def distance(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference over the norm."""
    return float((ours.double() - wanted.double()).norm() / wanted.double().norm())
