"""What was acknowledged is there after SIGKILL at any moment, once; what was not is whole or absent."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle_server.store import Store, open_store

Run = Callable[[Awaitable[Any]], Any]
LARGE = 200_000
WRITER = """
import asyncio, os, sys
from pathlib import Path
from twinkle_server.operations import Outcome, Submission
from twinkle_server.settings import Limits
from twinkle_server.store import open_store

store = open_store(Path(sys.argv[1]), limits=Limits(small_bytes=100_000))
start = int(sys.argv[2])


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())


async def client(queue):
    for number in range(start, start + 10_000):
        size = 200_000 if number % 5 == 0 else 100
        payload = f"{queue} {number} ".encode() * size
        accepted, operation = await store.journal.submit(
            Submission("ada", queue, "optim_step", payload[:size], number)
        )
        say("submitted", queue, number, accepted.request)
        if number % 3:
            await store.journal.finish([Outcome(operation.id, payload[:size])])
            say("finished", queue, number, accepted.request)


async def main():
    say("ready")
    await asyncio.gather(*(client(f"queue{index}") for index in range(8)))


asyncio.run(main())
"""


def killed(data: Path, start: int, seconds: float, failpoint: str = "") -> list[list[str]]:
    """Run the writer until it is killed; returns what it said of what it was told is durable."""
    environment = {**os.environ, "FAILPOINT": failpoint}
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(data), str(start)], stdout=subprocess.PIPE, env=environment
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        time.sleep(seconds)
        if not failpoint:
            child.send_signal(signal.SIGKILL)
        output, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == -signal.SIGKILL
    whole = output[: output.rfind(b"\n") + 1].decode()
    return [line.split() for line in whole.splitlines()]


def content(queue_id: str, number: int) -> bytes:
    size = LARGE if number % 5 == 0 else 100
    return (f"{queue_id} {number} ".encode() * size)[:size]


def check(store: Store, run: Run, said: list[list[str]]) -> None:
    """Compare the log with what was acknowledged."""
    queues = {f"queue{index}": run(store.journal.after(f"queue{index}", -1)) for index in range(8)}
    requests = {operation.request: operation for operations in queues.values() for operation in operations}
    for what, queue_id, number, request in said:
        operation = requests[request]
        assert (operation.queue_id, operation.number) == (queue_id, int(number))
        if what == "finished":
            future = run(store.journal.future(request, "ada"))
            assert (future.status, future.result) == ("done", content(queue_id, int(number)))
    for queue_id, operations in queues.items():
        numbers = [operation.number for operation in operations]
        assert len(set(numbers)) == len(numbers)
        for operation in operations:
            assert run(store.journal.payload(operation.id)) == content(queue_id, operation.number)


def integrity(store: Store) -> str:
    return store.database.write_now(
        lambda connection: connection.exec_driver_sql("PRAGMA integrity_check").scalar_one()
    )


@pytest.mark.full
@pytest.mark.parametrize("rounds", [3, pytest.param(100, marks=pytest.mark.soak)])
def test_acknowledged_operations_survive_kills_at_random_moments(tmp_path: Path, run: Run, rounds: int) -> None:
    chance = random.Random(rounds)
    said: list[list[str]] = []
    for round_ in range(rounds):
        said += killed(tmp_path, round_ * 10_000, chance.uniform(0.0, 0.4))
        if rounds <= 3 or round_ % 10 == 9:
            store = open_store(tmp_path)
            assert integrity(store) == "ok"
            check(store, run, said)
            store.close()
    assert len(said) > rounds


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", ["store.before_commit", "store.after_commit", "blob.before_rename", "blob.after_rename"]
)
@pytest.mark.parametrize("visit", [25, pytest.param(100, marks=pytest.mark.soak)])
def test_acknowledged_operations_survive_a_kill_at_each_failpoint(
    tmp_path: Path, run: Run, name: str, visit: int
) -> None:
    said = killed(tmp_path, 0, 0.0, f"{name}:{visit}")
    store = open_store(tmp_path)
    check(store, run, said)
    named = run(store.retention.payload_files()), run(store.retention.result_files())
    there = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("payloads", "results")]
    assert all(names <= files for names, files in zip(named, there, strict=True))
    store.close()


FULL = """
import asyncio, resource, signal, sys
from pathlib import Path
from twinkle_server.errors import Unavailable
from twinkle_server.operations import Submission
from twinkle_server.store import open_store

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = open_store(Path(sys.argv[1]))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]


async def submit(number):
    try:
        accepted, _ = await store.journal.submit(Submission("ada", "queue", "optim_step", b"p" * 3000, number))
    except Unavailable:
        print("refused", number)
    else:
        print("submitted", number, accepted.request)


async def main():
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
    for first in range(0, 400, 10):
        await asyncio.gather(*(submit(number) for number in range(first, first + 10)))
    print("healthy", store.database.healthy)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    for number in range(400, 420):
        await submit(number)
    print("healthy", store.database.healthy)


asyncio.run(main())
store.close()
"""


def test_writes_that_the_kernel_refuses_are_refused_and_nothing_else_is_lost(tmp_path: Path, run: Run) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    said = [line.split() for line in done.stdout.splitlines()]
    assert [words[1] for words in said if words[0] == "healthy"] == ["False", "True"]
    submitted = {int(words[1]): words[2] for words in said if words[0] == "submitted"}
    refused = {int(words[1]) for words in said if words[0] == "refused"}
    assert refused
    assert set(range(400, 420)) <= set(submitted)
    store = open_store(tmp_path)
    assert integrity(store) == "ok"
    found = {operation.number: operation.request for operation in run(store.journal.pending())}
    assert submitted.items() <= found.items()
    assert not refused & set(found)
    store.close()
