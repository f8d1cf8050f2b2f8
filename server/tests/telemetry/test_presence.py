"""Commands find the server that runs, and none that was killed."""

import asyncio
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from twinkle_server.cli.status import ready
from twinkle_server.store.opening import open_store
from twinkle_server.telemetry.status import FILE, Presence, announce, ask, find, read_figures, withdraw


def test_a_server_that_runs_is_found_until_it_withdraws(tmp_path: Path) -> None:
    here = Presence(os.getpid(), "http://127.0.0.1:1", "model", 1.0)
    assert find(tmp_path) is None
    announce(tmp_path, here)
    assert find(tmp_path) == here
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    withdraw(tmp_path)
    withdraw(tmp_path)
    assert find(tmp_path) is None


def test_a_server_withdraws_only_itself(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        successor = Presence(other.pid, "http://127.0.0.1:1", "model", 1.0)
        announce(tmp_path, successor)
        withdraw(tmp_path)
        assert find(tmp_path) == successor
        other.communicate(b"\n")
    withdraw(tmp_path)
    assert not (tmp_path / FILE).exists()


def test_one_that_was_killed_is_not(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    announce(tmp_path, Presence(child.pid, "http://127.0.0.1:1", "model", 1.0))
    assert find(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"pid": "x"}', b"\xff"])
def test_a_file_that_says_nothing_is_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert find(tmp_path) is None


class Handler(BaseHTTPRequestHandler):
    """Answers with what the server was given."""

    def do_GET(self) -> None:
        status, body = self.server.said  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("status", "body", "queues"),
    [(200, b'{"queues": 3}', 3), (500, b"{}", None), (200, b"<", None), (200, b"[]", None)],
)
def test_the_running_server_is_asked(tmp_path: Path, status: int, body: bytes, queues: int | None) -> None:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.said = (status, body)  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        announce(tmp_path, Presence(os.getpid(), f"http://127.0.0.1:{server.server_port}", "model", 1.0))
        said = ask(tmp_path)
        thread.join(10)
    assert (said or {}).get("queues") == queues


@pytest.mark.parametrize(("draining", "begin"), [(True, "not ready: draining"), (False, "not ready: engine starting")])
def test_who_asks_whether_it_is_ready_gets_the_reason(tmp_path: Path, draining: bool, begin: str) -> None:
    facts = {"engine": "up" if draining else "starting", "last_pass": "no failure", "store": "writable"}
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.said = (503, orjson.dumps({"status": "not ready", **facts, "draining": draining, "paths": []}))  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        announce(tmp_path, Presence(os.getpid(), f"http://127.0.0.1:{server.server_port}", "model", 1.0))
        result = CliRunner().invoke(ready, ["--data", str(tmp_path)])
        thread.join(10)
    assert result.exit_code == 1
    assert result.output.startswith(begin), result.output
    assert "store writable" in result.output


def test_a_server_that_does_not_answer_is_no_trouble(tmp_path: Path) -> None:
    announce(tmp_path, Presence(os.getpid(), "http://127.0.0.1:1", "model", 1.0))
    assert ask(tmp_path) is None


def test_the_database_tells_figures(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data", serve=False)
    try:
        found = asyncio.run(read_figures(store.database))
    finally:
        store.close()
    assert found == {
        "sessions": {},
        "models": {},
        "operations": {"waiting": 0, "oldest_seconds": 0.0},
        "checkpoints": {"count": 0, "bytes": 0},
        "keys": 0,
        "tenants": {},
    }


def test_its_token_is_at_no_time_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    write = Path.write_bytes

    def noted(path: Path, data: bytes) -> int:
        written = write(path, data)
        modes.append(path.stat().st_mode & 0o777)
        return written

    monkeypatch.setattr(Path, "write_bytes", noted)
    before = os.umask(0o022)
    try:
        announce(tmp_path, Presence(os.getpid(), "http://127.0.0.1:1", "tiny", 1.0, "token"))
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert (tmp_path / "server.json").stat().st_mode & 0o777 == 0o600
