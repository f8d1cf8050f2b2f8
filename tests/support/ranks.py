"""Starts a script under torchrun, on gloo and one thread a rank, and returns what it printed."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def torchrun(
    script: Path, *arguments: object, ranks: int, environment: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run `script` in `ranks` processes and wait for all of them."""
    return subprocess.run(
        command(script, *arguments, ranks=ranks),
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def command(script: Path, *arguments: object, ranks: int) -> list[str]:
    """Return the command that starts a script under torchrun, on a port of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, str(script), *map(str, arguments)]
