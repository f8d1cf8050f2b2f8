"""The service as benchmarks start, kill and look at it: tests/support's, with figures of its processes."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
os.environ.update(TINKER_TELEMETRY="0", NO_PROXY="127.0.0.1,localhost", no_proxy="127.0.0.1,localhost")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from _server import PACKAGES, Connection, fsync_ms
from server_raw import Raw, RawModel, arrays, row  # found by the path above
from serving import Served, ledger, pool

__all__ = [
    "NAME",
    "PACKAGES",
    "Connection",
    "Processes",
    "Raw",
    "RawModel",
    "Served",
    "arrays",
    "create",
    "fsync_ms",
    "is_ready",
    "ledger",
    "metric",
    "pool",
    "ready",
    "row",
    "step",
]
NAME = "null"
"""What these benchmarks let clients call every model: `Connection` asks for it."""


@dataclass(frozen=True)
class Processes:
    """The two processes of a running service, by their numbers."""

    api: int
    engine: int

    @classmethod
    def of(cls, service: Served) -> "Processes":
        """Find them; the engine must be up."""
        engine = service.engine()
        if service.process is None or engine is None:
            raise SystemExit("the service has no engine")
        return cls(service.process.pid, engine)

    def resident_mib(self) -> tuple[float, float]:
        """Return the resident size of both."""
        return _resident_mib(self.api), _resident_mib(self.engine)

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU time of both, in the kernel's steps of 10 ms."""
        return _cpu_seconds(self.api), _cpu_seconds(self.engine)


def create(connection: Connection, seed: int, rank: int = 8) -> str:
    """Make a model whose first weights follow from a seed, in a session of its own, and return its id."""
    session = connection.json("/create_session")["session_id"]
    lora = {"rank": rank, "seed": seed, "train_attn": True, "train_mlp": True, "train_unembed": True}
    asked = connection.json("/create_model", session_id=session, model_seq_id=0, base_model=NAME, lora_config=lora)
    connection.result(asked["request_id"])
    return f"{session}:train:0"


def step(connection: Connection, model: str, number: int, learning_rate: float = 1e-3) -> None:
    """Take an optimizer step, from submission to result."""
    adam = {"learning_rate": learning_rate}
    connection.result(
        connection.json("/optim_step", model_id=model, seq_id=number, adam_params=adam)["request_id"],
    )


def metric(service: Served, name: str) -> float:
    """Return one line of `/metrics`, by its name with labels; 0 if it is not there."""
    with urlopen(Request(f"{service.url}/metrics", headers={"X-API-Key": service.key}), timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
    return 0.0


def ready(url: str, seconds: float = 60.0) -> float:
    """Wait until `/readyz` says yes, and return when that was, on `time.perf_counter`."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        if is_ready(url):
            return time.perf_counter()
        time.sleep(0.002)
    raise SystemExit(f"the service was not ready within {seconds:g} s")


def is_ready(url: str) -> bool:
    """Return whether `/readyz` says yes."""
    try:
        with urlopen(f"{url}/readyz", timeout=5):
            return True
    except OSError:
        return False


def _resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
