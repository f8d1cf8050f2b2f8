"""A fake hub, and a process in which the real client libraries talk to it; tests send expressions there."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from twinkle.testing import FakeHub
from twinkle_testing.fakehub import TOKEN

WORKER = Path(__file__).with_name("worker.py")


class Told(Exception):
    """An error in the other process, as `Type: text`; `kinds` are the names of its classes."""

    def __init__(self, kinds: list[str], text: str) -> None:
        super().__init__(f"{kinds[0]}: {text}")
        self.kinds = kinds


class Client:
    """The other process: `client("HubOperation.download_model(id)", id="hf://a/b")` returns the value as JSON."""

    told = Told

    def __init__(self, environment: dict[str, str]) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "MODELSCOPE_"))}
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, expression: str, environment: dict[str, str] | None = None, **names: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"expression": expression, "names": names, "environment": environment or {}}
        self._process.stdin.write(json.dumps(asked, default=str) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise Told(answer["kinds"], answer["error"])
        return answer["value"]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def hub() -> Iterator[FakeHub]:
    with FakeHub({TOKEN: "tester", "hf_other": "other"}) as running:
        yield running


@pytest.fixture(scope="session")
def client(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    running = Client(hub.environment(tmp_path_factory.mktemp("home")))
    yield running
    running.close()


@pytest.fixture
def asked(hub: FakeHub) -> Callable[..., list[str]]:
    """Return the requests since the test began whose text holds all of the given words."""
    before = len(hub.requests)

    def since(*words: str) -> list[str]:
        return [request for request in hub.requests[before:] if all(word in request for word in words)]

    return since


@pytest.fixture(params=["hf", "ms"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A repository's name that no other test uses."""
    return f"acme/r{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]}"


@pytest.fixture
def run(hub: FakeHub, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script in a process of its own, whose clients talk to the fake hub."""

    def start(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "OMP_NUM_THREADS": "1", **hub.environment(tmp_path / "home"), **environment},
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return start
