"""The real training service in processes of its own: started, killed, started again on the same data.

Servers listen on a free port of 127.0.0.1; whatever happens in a test, `Served.stop` ends what was started, by its id.
"""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from forking import Forked
from ledger_engine import ENGINE, MODEL

SCRIPT = Path(__file__).with_name("server_process.py")
READY = re.compile(r"at (https?://127\.0\.0\.1:\d+)")
KEY = re.compile(r"tml-[\w-]{20,}")
START_SECONDS = 60.0
DRAIN_SECONDS = 30.0
"""In which SIGTERM ends a service, whatever it is doing."""


@dataclass
class Served:
    """One service on one data folder, running or not.

    Attributes:
        data: its data folder.
        command: that starts it.
        environment: more variables of the process.
        url: of the running service.
        key: that the first start printed, if keys are needed.
        verify: context that trusts the certificate of the service, if it has one.
    """

    data: Path
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    url: str = ""
    key: str = "tml-nobody-checks-this-key"
    verify: ssl.SSLContext | bool = True
    process: subprocess.Popen[str] | None = None
    output: list[str] = field(default_factory=list)
    _reader: threading.Thread | None = None
    _ready: threading.Event = field(default_factory=threading.Event)

    def start(self, *, wait: bool = True, **environment: str) -> "Served":
        """Start the service; with `wait`, return when it is ready to take work."""
        assert self.process is None or self.process.poll() is not None, "it runs already"
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        variables |= {**self.environment, **environment}
        self._ready.clear()
        self.output.clear()
        self.process = Forked(self.command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        if wait:
            self.wait_ready()
        return self

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout
        for line in process.stdout:
            self.output.append(line)
            if key := KEY.search(line):
                self.key = key[0]
            if address := READY.search(line):
                self.url = address[1]
                self._ready.set()
        self._ready.set()
        process.stdout.close()

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until `/readyz` says yes."""
        end = time.monotonic() + seconds
        self._ready.wait(seconds)
        with httpx.Client(trust_env=False, timeout=5, verify=self.verify) as client:
            while time.monotonic() < end:
                if self.process is None or self.process.poll() is not None:
                    break
                try:
                    if client.get(f"{self.url}/readyz").status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                time.sleep(0.05)
        raise AssertionError("the service did not get ready:\n" + "".join(self.output)[-6000:])

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def engine(self) -> int | None:
        """Return the process id of the engine, the service's only child that runs our code."""
        assert self.process
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except (OSError, ValueError, IndexError):
                continue
            if parent == self.process.pid and b"twinkle_server.engine" in command:
                return int(entry.name)
        return None

    def kill_engine(self) -> bool:
        """Kill the engine at once; False if there is none at the moment."""
        pid = self.engine()
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended by itself
            return False
        return True

    def kill(self) -> None:
        """Kill the service at once, as a power cut does; its engine follows by itself."""
        if self.process is not None:
            self.process.kill()
            self._ended()

    def stop(self, seconds: float = DRAIN_SECONDS) -> int | None:
        """End the service with SIGTERM and return its exit code; kill it, and fail, if it does not end in time."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self._ended()
            raise AssertionError("SIGTERM did not end the service:\n" + "".join(self.output)[-6000:]) from None
        self._ended()
        return self.process.returncode

    def _ended(self) -> None:
        assert self.process
        self.process.wait(20)
        if self._reader:
            self._reader.join(20)  # until the engine has let go of the pipe, too

    def new_key(self, name: str) -> str:
        """Return a key of another tenant, made by the command while the service runs."""
        command = [sys.executable, "-m", "twinkle.cli", "server", "keys", "create", name, "--data", str(self.data)]
        with Forked(command, stdout=subprocess.PIPE, text=True) as process:
            shown, _ = process.communicate(timeout=60)
        found = KEY.search(shown)
        assert found, shown
        return found[0]

    def log(self) -> str:
        """Return all that the processes have written so far."""
        return "".join(self.output)


def ledger(data: Path, settings: Mapping[str, Any] | None = None, **environment: str) -> Served:
    """Return a service, not started, whose engine counts what was applied instead of training.

    Args:
        data: its directory.
        settings: fields of `twinkle_server.settings.Settings`, with `limits` and `times` as mappings, and `extra` for
            the backend.
        **environment: more variables of the process.
    """
    fields: dict[str, Any] = {"model": str(MODEL), "name": "ledger/model", "backend": ENGINE, "auth": False, "port": 0}
    fields |= settings or {}
    fields["extra"] = {"marks": str(data), **fields.get("extra", {})}
    return _with_settings(data, fields, environment)


def pool(data: Path, model: Path, settings: Mapping[str, Any] | None = None, **environment: str) -> Served:
    """Return a service, not started, that trains adapters of a tiny model; arguments as those of `ledger`."""
    fields = {"model": str(model), "auth": False, "port": 0, **(settings or {})}
    return _with_settings(data, fields, environment)


def _with_settings(data: Path, fields: Mapping[str, Any], environment: Mapping[str, str]) -> Served:
    command = [sys.executable, str(SCRIPT), json.dumps({"data": str(data), **fields})]
    return Served(data, command, dict(environment))


def commanded(words: list[str]) -> Served:
    """Return the service of a command `twinkle serve ...`, not started, on a free port.

    Its data folder is that of `--data`, or of the file of `--config`.
    """
    if "--data" in words:
        data = Path(words[words.index("--data") + 1])
    else:
        data = Path(yaml.safe_load(Path(words[words.index("--config") + 1]).read_text("utf-8"))["data"])
    return Served(data, [sys.executable, "-m", "twinkle.cli", *words[1:], "--port", "0"])
