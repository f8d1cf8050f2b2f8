"""A service in a process of its own, started as people start it."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from forking import Forked
from ledger_engine import ENGINE, MODEL

READY = re.compile(r"^Twinkle serves (\S+) at (http://\S+) \(pid (\d+)\)$", re.MULTILINE)
KEY = re.compile(r"tml-[\w-]{43}")
SECONDS = 60.0


class Process:
    """One service.

    Args:
        data: its directory.
        arguments: of the command line.

    Attributes:
        fresh: start an interpreter, as people do, instead of a fork that has the modules already.
    """

    def __init__(self, data: Path, *arguments: str) -> None:
        self.data = data
        self.arguments = [
            str(MODEL), "--name", "ledger/model", "--backend", ENGINE, "--data", str(data), "--port", "0", *arguments,
        ]  # fmt: skip
        self.logs = data.parent / f"{data.name}-logs"
        self.logs.mkdir(exist_ok=True)
        self.starts = 0
        self.fresh = False
        self.url = self.key = ""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def said(self) -> str:
        """What this start has written to standard output."""
        return (self.logs / f"{self.starts}.out").read_text()

    @property
    def log(self) -> str:
        """What all starts have written to standard error."""
        return "".join(path.read_text() for path in sorted(self.logs.glob("*.err")))

    def start(self) -> "Process":
        """Start, and wait for the ready line."""
        self.starts += 1
        out, err = (self.logs / f"{self.starts}.{end}" for end in ("out", "err"))
        with out.open("wb") as output, err.open("wb") as errors:
            kind = subprocess.Popen if self.fresh else Forked
            self.process = kind(
                [sys.executable, "-m", "twinkle_server", *self.arguments],
                stdout=output,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"},
            )
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            if found := READY.search(self.said):
                self.url = found[2]
                if key := KEY.search(self.said):
                    self.key = key[0]
                return self
            time.sleep(0.02)
        raise AssertionError(f"not ready:\n{self.said}\n{self.log}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it, and return the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(SECONDS)
        finally:
            self.process.kill()
            self.process.wait()

    def client(self, key: str | None = None) -> httpx.Client:
        """Return a client with a key, the operator's by default."""
        return httpx.Client(base_url=self.url, headers={"X-API-Key": key or self.key}, trust_env=False, timeout=SECONDS)

    def engine(self) -> int:
        """Return the number of the engine's process."""
        assert self.process is not None
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent == self.process.pid and b"twinkle_server.engine" in (entry / "cmdline").read_bytes():
                return int(entry.name)
        raise AssertionError("no engine")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A running service with keys; its first start."""
    process = Process(tmp_path_factory.mktemp("service") / "data")
    try:
        yield process.start()
    finally:
        if process.process is not None:
            process.stop()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo what a command that runs in this process does to logging."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
