"""Programs of the unmodified cookbook in processes of their own, where every address but this machine's is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

from serving import Served

BLOCK = """\
import socket
_real = socket.socket.connect
def _connect(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost"):
        raise OSError(f"no way out to {address}")
    return _real(self, address)
socket.socket.connect = _connect
"""


def run(service: Served, program: list[str], folder: Path, *options: str) -> list[dict[str, float]]:
    """Run a recipe's program to its end and return the lines of its metrics."""
    log = folder / "log"
    execute(service, [*program, f"log_path={log}", *options], folder)
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def execute(service: Served, words: list[str], folder: Path) -> str:
    """Run Python with some arguments in a process of its own and return what it wrote."""
    guard = folder / "guard"
    guard.mkdir(exist_ok=True)
    (guard / "sitecustomize.py").write_text(BLOCK)
    environment = {
        **os.environ, "TINKER_BASE_URL": service.url, "TINKER_API_KEY": service.key, "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1,localhost", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(guard),
        "HF_HOME": str(folder / "hf"),
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, *words], env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}\n{service.log()[-3000:]}"
    return ended.stdout
