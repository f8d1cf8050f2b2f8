"""A named place kills the process, or raises a disk's error, at the visit that the environment names."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
from twinkle_server.failpoints import reach
for turn in range(4):
    reach("other.place")
    try:
        reach("some.place")
    except OSError as problem:
        print("errno", problem.errno, flush=True)
    print(turn, flush=True)
"""


def _run(failpoint: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"FAILPOINT": failpoint} if failpoint is not None else {})}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_nothing_happens_without_it() -> None:
    assert _run(None).stdout.split() == ["0", "1", "2", "3"]


def test_the_first_visit_kills_at_once() -> None:
    done = _run("some.place")
    assert done.returncode == -9
    assert done.stdout == ""


def test_a_later_visit_is_counted() -> None:
    done = _run("some.place:3")
    assert done.returncode == -9
    assert done.stdout.split() == ["0", "1"]


@pytest.mark.parametrize(("action", "number"), [("enospc", 28), ("eio", 5)])
def test_a_disk_can_fail_once(action: str, number: int) -> None:
    done = _run(f"some.place:2:{action}")
    assert done.returncode == 0
    assert done.stdout.split("\n")[:3] == ["0", f"errno {number}", "1"]


def test_a_wrong_setting_is_told() -> None:
    done = _run("some.place:0")
    assert done.returncode == 1
    assert "visit >= 1" in done.stderr
