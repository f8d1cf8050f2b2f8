"""One process writes: a dead owner is replaced at once, a living one never, and a replaced one cannot write."""

import asyncio
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, update

from twinkle_server.errors import LeaseLost, StoreError
from twinkle_server.operations import Outcome, Snapshot, Submission
from twinkle_server.store import Store, lease, open_store
from twinkle_server.store.lease import Owner
from twinkle_server.store.tables import lease as table


def leave(store: Store, **columns: Any) -> None:
    """End as a killed process does, with a row that says something else."""

    def work(connection: Connection) -> None:
        connection.execute(update(table).values(columns))

    if columns:
        store.database.write_now(work)
    assert store.lease is not None
    store.lease.drop()
    store.database.close()


def test_a_clean_end_lets_anybody_follow(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        store = open_store(tmp_path)
        assert store.lease is not None
        epochs.append(store.lease.epoch)
        store.close()
    assert epochs == [1, 2, 3]


def test_a_second_server_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    code = "import sys, pathlib; from twinkle_server.store import open_store; open_store(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert f"is served by process {Owner.current().pid} on" in done.stderr
    assert "since 20" in done.stderr
    first.close()


def test_a_killed_owner_is_replaced_at_once(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, pathlib; from twinkle_server.store import open_store;"
        "open_store(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=60)
    assert killed.returncode == -9
    store = open_store(tmp_path)
    assert store.lease is not None
    assert store.lease.epoch == 2
    store.close()


def test_a_reused_process_number_is_not_taken_for_the_owner(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        started = lease.started(other.pid)
        assert started is not None
        leave(open_store(tmp_path), pid=other.pid, started=started)
        with pytest.raises(StoreError, match=f"served by process {other.pid} .*stop it first"):
            open_store(tmp_path)
        leave(open_store(tmp_path, take_over=True), pid=other.pid, started=started - 1)
        open_store(tmp_path).close()
    finally:
        other.communicate(timeout=60)


def test_an_owner_on_another_machine_is_never_assumed_dead(tmp_path: Path) -> None:
    leave(open_store(tmp_path), host="elsewhere", boot="another")
    with pytest.raises(StoreError, match=r"on elsewhere since .*, on another machine.*--take-over"):
        open_store(tmp_path)
    store = open_store(tmp_path, take_over=True)
    store.close()


def test_an_owner_from_before_a_reboot_is_dead(tmp_path: Path) -> None:
    leave(open_store(tmp_path), boot="before", pid=1, started=lease.started(1))
    open_store(tmp_path).close()


def test_an_owner_in_another_container_of_this_machine_is_dead_when_its_lock_is_free(tmp_path: Path) -> None:
    leave(open_store(tmp_path), host="container-0")
    open_store(tmp_path).close()


def test_beside_a_server_keys_can_be_read_and_operations_cannot_be_written(tmp_path: Path) -> None:
    server = open_store(tmp_path)
    beside = open_store(tmp_path, serve=False)
    assert asyncio.run(beside.keys.all()) == []
    with pytest.raises(LeaseLost):
        asyncio.run(beside.journal.submit(Submission("ada", "lane", "sample", b"{}", 0)))
    beside.close()
    server.close()


def test_whoever_lost_the_lease_writes_nothing_more(tmp_path: Path, run: Any, a_model: Any, store: Store) -> None:
    model, operation = run(a_model())
    owner = replace(Owner.current(), pid=1)
    journal = store.journal
    assert store.lease is not None
    newer = lease.take(store.database, store.data, -1, take_over=True, owner=owner)
    assert newer.epoch == store.lease.epoch + 1
    for write in (
        journal.submit(Submission(model.tenant, model.id, "optim_step", b"{}", 1)),
        journal.finish([Outcome(operation.id, b"{}")]),
        journal.blame([operation.id]),
        journal.snapshotted(Snapshot(model.id, 0, "snapshots/x", "d", 1)),
    ):
        with pytest.raises(LeaseLost, match="another process now serves this data folder"):
            run(write)
    assert [(each.id, each.attempts) for each in run(journal.pending())] == [(operation.id, 0)]
    assert run(journal.snapshot(model.id)) is None


def test_the_time_of_a_start_is_known_for_the_living_only() -> None:
    assert lease.started(Owner.current().pid) == Owner.current().started > 0
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait(30)
    for _ in range(100):
        if lease.started(done.pid) is None:
            break
        time.sleep(0.01)
    assert lease.started(done.pid) is None
