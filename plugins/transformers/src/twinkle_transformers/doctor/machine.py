"""Facts of the machine that decide how fast and how exact products are: processor, memory, device, kernels."""

import os
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from twinkle_transformers.memory import free_host_bytes

INSTRUCTION_SETS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "sve",
    "i8mm",
    "bf16",
)
"""Names in `/proc/cpuinfo` of the instruction sets that change the kernels of a product."""
SWITCHES = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
    "OMP_NUM_THREADS",
)  # fmt: skip
"""Environment variables that limit them, or the threads."""

_SIZE, _REPEATS = 512, 3
_FAN_IN, _FAN_OUT = 576, 1536
ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 32)
"""Row counts for which the bits of a product are compared with those of 64 rows."""


def machine_facts(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Return the facts, by name.

    Args:
        device: where products are measured.
        cpuinfo: what the kernel says of the processor.

    Returns:
        `processor`, `cores` that this process may use, `instruction_sets` of the processor, `capability` that torch
        uses, `switches` that are set, `free_bytes` and `total_bytes` of host memory, `torch`, `threads`, `device`, and
        `products` of float32 and bfloat16 as `measure_products` returns them.
    """
    lines = cpuinfo.read_text("utf-8", "replace") if cpuinfo.is_file() else ""
    flags = set((re.search(r"^(?:flags|Features)\s*:(.*)$", lines, re.M) or [""])[0].split())
    name = re.search(r"^model name\s*:\s*(.*)$", lines, re.M)
    return {
        "processor": name[1] if name else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instruction_sets": [one for one in INSTRUCTION_SETS if one in flags],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "free_bytes": free_host_bytes(),
        "total_bytes": _total_bytes(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "products": {
            str(t).removeprefix("torch."): measure_products(t, device) for t in (torch.float32, torch.bfloat16)
        },
    }


def _total_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


@torch.no_grad()
def measure_products(dtype: torch.dtype, device: torch.device) -> Mapping[str, Any]:
    """Measure products of one dtype.

    Returns:
        `gflops`: billions of floating-point operations a second in the best of 3 linear layers of 512 rows and sizes;
        `other_bits`: row counts whose products have other bits than the same rows of a product of 64 rows.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(_SIZE, _SIZE, generator=generator).to(device, dtype) for _ in range(2))
    seconds = min(_seconds(a, b) for _ in range(_REPEATS))
    rows = torch.randn(64, _FAN_IN, generator=generator).to(device, dtype)
    weight = torch.randn(_FAN_OUT, _FAN_IN, generator=generator).to(device, dtype)
    whole = torch.nn.functional.linear(rows, weight)
    other = [n for n in ROW_COUNTS if not torch.equal(torch.nn.functional.linear(rows[:n], weight), whole[:n])]
    return {"gflops": round(2 * _SIZE**3 / seconds / 1e9, 1), "other_bits": other}


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    began = time.perf_counter()
    torch.nn.functional.linear(a, b)
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - began
