"""Runs the numeric suites as other processors compute them: fewer instruction sets, other threads, other rounding.

    python scripts/instruction_sets.py          # the most and the fewest instruction sets: AMX and AVX2, say
    python scripts/instruction_sets.py --all    # all variants

Each variant is a process of its own, since the libraries read their switches when they are loaded.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUITES = (
    "plugins/torch/tests/test_numerics.py",
    "plugins/torch/tests/test_head.py",
    "plugins/torch/tests/test_head_targets.py",
    "plugins/transformers/tests/test_lora_linear.py",
    "plugins/transformers/tests/test_updates.py",
    "plugins/transformers/tests/test_packing_models.py",
    "plugins/transformers/tests/test_sampler_prefixes.py",
    "plugins/transformers/tests/test_sampler_groups.py",
    "plugins/transformers/tests/test_steps.py",
    "plugins/transformers/tests/test_policy_gradient_steps.py",
)
"""Suites whose results depend on how products round; about two minutes on one core."""
POOLS = (
    "plugins/transformers/tests/test_pool_numbers.py",
    "plugins/transformers/tests/test_weight_sync.py",
    "server/tests/engine/pool/test_pool_mixes.py",
)
"""Longer ones, whose limits follow from measured rounding: only where products round by rows, which moves them most."""
SIDE_BY_SIDE = 2
ROUNDING = "rounding by rows"
Variant = tuple[str, Mapping[str, str]]

_SETS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (
        "AMX", "amx_bf16",
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX", "ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    ),
    (
        "AVX512_BF16", "avx512_bf16",
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
         "ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    ),
    (
        "AVX512", "avx512f",
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    ),
    (
        "AVX2", "avx2",
        {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    ),
)  # fmt: skip


def processor(cpuinfo: str) -> tuple[str, list[str]]:
    """Return the name of a processor and the instruction sets of it that have a variant, from `/proc/cpuinfo`."""
    name = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.M)
    present = set(flags[1].split()) if flags else set()
    return name[1] if name else "an unnamed processor", [label for label, flag, _ in _SETS if flag in present]


def variants(cpuinfo: str) -> list[Variant]:
    """Return the variants that a processor can run, each with the environment variables that select it."""
    one = {"OMP_NUM_THREADS": "1"}
    found: list[Variant] = [("native, 1 thread", one), ("native, 2 threads", {"OMP_NUM_THREADS": "2"})]
    _, present = processor(cpuinfo)
    found += [(label, {**one, **switches}) for label, _, switches in _SETS if label in present]
    if present:  # MKL is what torch uses on x86 alone
        found.append(("MKL_CBWR=COMPATIBLE", {**one, "MKL_CBWR": "COMPATIBLE"}))
    return [*found, (ROUNDING, {**one, "TWINKLE_TEST_ROUND_BY_ROWS": "2"})]


def extremes(cpuinfo: str) -> list[Variant]:
    """Return the variants of the most and of the fewest instruction sets, or of the processor as it is."""
    _, present = processor(cpuinfo)
    return [variant for variant in variants(cpuinfo) if variant[0] in (*present[:1], *present[-1:])] or variants("")[:1]


def suites_of(variant: Variant) -> Sequence[str]:
    """Return the suites of a variant."""
    return (*SUITES, *POOLS) if variant[0] == ROUNDING else SUITES


def run(variant: Variant, suites: Sequence[str]) -> bool:
    """Run suites as one variant, print its line, and return whether all tests passed."""
    label, switches = variant
    began = time.monotonic()
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **switches}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not soak", *suites]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
    passed = done.returncode == 0
    _show(f"{label:<22}{'passed' if passed else 'FAILED':<8}{time.monotonic() - began:6.0f} s  {lines[-1]}")
    if not passed:
        log = Path(tempfile.mkdtemp(prefix="instruction-sets-")) / "output.txt"
        log.write_text(done.stdout + done.stderr)
        failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        _show("\n".join([*(f"    {line[:200]}" for line in failures), f"    the whole output is in {log}"]))
    return passed


def _show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] = ()) -> int:
    """Run variants, and return 1 if any failed.

    Args:
        arguments: `--all` for all variants; then test files and other arguments of pytest instead of `SUITES`.
    """
    suites = [argument for argument in arguments if argument != "--all"]
    choose = extremes if len(suites) == len(arguments) else variants
    path = Path("/proc/cpuinfo")
    cpuinfo = path.read_text("utf-8", "replace") if path.is_file() else ""
    name, present = processor(cpuinfo)
    _show(f"{name}: {', '.join(present) or 'no instruction set that can be switched'}")
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        results = list(pool.map(lambda variant: run(variant, suites or suites_of(variant)), choose(cpuinfo)))
    _show(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
