"""`twinkle top`: one view for terminals, lines for pipes, and nothing in a name that could control a terminal."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dashboard_runs import HOSTILE

from twinkle_server.cli.top import frame, lines_of, main

from .conftest import Site


def top(*words: str, code: int = 0, **variables: str) -> str:
    done = CliRunner(env=variables).invoke(main, words)
    if done.exit_code != code:
        raise AssertionError(f"{done.output}\n{done.exception!r}")
    return done.output + (str(done.exception) if code else "")


def test_the_folder_of_a_service_shows_all_of_it(site: Site) -> None:
    shown = top("--data", str(site.served.data), "--once")
    assert shown.startswith("ledger/model  ready, engine up")
    for expected in (
        site.run.id,
        "ana",
        "eve",
        "tokens/s",
        "forward_backward",
        "latency ms",
        f"forward: {HOSTILE[:9]}",
    ):
        assert expected.replace("forward: ", "") in shown, expected
    assert "\x1b" not in shown
    assert "ready, engine up" in top("--once", TWINKLE_SERVE_DATA=str(site.served.data))


def test_a_users_key_shows_its_tenant(site: Site) -> None:
    eve = top("--url", site.served.url, "--key", site.keys["eve"], "--once")
    assert "tenant eve" in eve
    assert site.run.id not in eve
    ana = top("--url", f"{site.served.url}/", "--once", TWINKLE_API_KEY=site.keys["ana"])
    assert site.run.id in ana
    assert "eve" not in ana.split()


def test_states_are_lines_of_json_too(site: Site) -> None:
    state = json.loads(top("--data", str(site.served.data), "--once", "--json"))
    assert {row["tenant"] for row in state["tenants"]} >= {"ana", "eve"}


def test_mistakes_are_explained(site: Site, tmp_path: Path) -> None:
    assert "either --data FOLDER or --url URL" in top(code=2)
    assert "no server runs on" in top("--data", str(tmp_path), "--once", code=1)
    assert "unknown or revoked" in top("--url", site.served.url, "--key", "tml-x", "--once", code=1)
    assert "cannot reach the service" in top("--url", "http://127.0.0.1:1", "--once", code=1)
    assert "--url must be" in top("--url", "ftp://x", "--once", code=1)


def test_in_a_terminal_the_view_is_overwritten_until_q(site: Site) -> None:
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "twinkle.cli", "top", "--data", str(site.served.data), "--interval", "0.2"]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, close_fds=True)
    os.close(child)
    try:
        output = _read_until(parent, lambda text: text.count("\x1b[H") >= 3)
        os.write(parent, b"q")
        output += _read_until(parent, lambda text: "\x1b[?1049l" in text)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    assert "\x1b[?1049h" in output
    assert "\x1b[2J" not in output, "the screen is not cleared between updates: that would flicker"
    assert "ledger/model" in output


def _read_until(descriptor: int, done: Any) -> str:
    text, end = "", time.monotonic() + 60
    while not done(text):
        assert time.monotonic() < end, text
        if select.select([descriptor], [], [], 0.5)[0]:
            try:
                text += os.read(descriptor, 65536).decode("utf-8", "replace")
            except OSError:  # the command has ended
                break
    return text


STATE = {
    "model": "m\x1b[31m", "ready": False, "engine": "starting", "up_seconds": 61.0, "engine_restarts": 2,
    "draining": False, "scope": None, "last_pass": "the last pass failed as a whole", "store": "writable",
    "rates": {"tokens_per_second": 1.5, "operations_per_second": 2, "failures": 1, "pass_tokens": 3, "pass_fill": 0.5,
              "pass_tenants": 1, "pass_operations": 1, "busy": 0.25, "history": []},
    "queue": {"unfinished": 4, "in_engine": 1, "oldest_seconds": 9.5},
    "tenants": [{"tenant": "ana", "live": 1, "detached": 0, "unfinished": 4, "tokens_per_second": 1.5,
                 "tokens_today": 7}],
    "models": [{"model": "a:train:0", "tenant": "ana", "status": "live", "place": "host", "rank": 8, "unfinished": 4,
                "bytes": 3 * 2**20}],
    "models_total": 5,
    "paths": [{"path": "fused", "exact": False, "summary": "fused off (rounding, bfloat16)"}],
    "errors": [{"time": 0.0, "tenant": "ana", "model": "a:train:0", "number": 3, "kind": "forward",
                "error": "bad\x07\x1b]0;title\x07 text\nnext"}],
}  # fmt: skip


def test_names_and_errors_cannot_control_the_terminal() -> None:
    text = "\n".join(lines_of(STATE))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "bad  ]0;title  text next" in text
    assert "the last pass failed as a whole" in text
    assert "fused off (rounding, bfloat16)" in text
    assert "and 4 more models" in text
    assert "  3.0" in text


@pytest.mark.parametrize(("width", "height"), [(20, 5), (200, 60), (1, 2)])
def test_a_frame_fits_the_terminal(width: int, height: int) -> None:
    lines = frame(lines_of(STATE, color=True), width, height, "it restarts").split("\r\n")
    assert len(lines) <= height
    for line in lines:
        visible = line.replace("\x1b[H", "").replace("\x1b[K", "").replace("\x1b[J", "")
        for code in ("\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m"):
            visible = visible.replace(code, "")
        assert len(visible) <= width
        assert "\x1b" not in visible
