"""Snapshots and replay: a model that is made again is the model that was."""

import json
import os
import resource
from pathlib import Path

import pytest
from server_engine import Engine, engine, request

from twinkle_server.engine import files, messages
from twinkle_server.engine.messages import Message
from twinkle_server.operations import Save


def train(made: Engine, queue_id: str, start: int, steps: int, first: int) -> int:
    """Do steps of two passes each, and return the next number."""
    number = start
    for token in range(first, first + 2 * steps, 2):
        made.backward(queue_id, number, token)
        made.backward(queue_id, number + 1, token + 1)
        made.step(queue_id, number + 2)
        number += 3
    return number


def snapshots(made: Engine) -> list[Message]:
    return [message for message in made.seen if message.type == messages.SNAPSHOTTED]


@pytest.mark.full
def test_a_snapshot_holds_everything_up_to_the_number_that_it_tells(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.create("m")
        number = train(made, "m", 1, 3, 10)
        made.done(made.backward("m", number, 99))
        made.send(messages.SNAPSHOT, queue_id="m")
        told = made.wait(messages.SNAPSHOTTED).head
        assert (told["queue_id"], told["number"]) == ("m", number)
        manifest = files.verify(tmp_path / told["folder"], told["digest"])
        assert manifest.size == told["size"]
        assert manifest.facts == {"lane": "m", "number": number}
    with engine(tmp_path) as made:
        made.send(messages.RESTORE, queue_id="m", folder=told["folder"])
        assert made.wait(messages.RESTORED).head == {"queue_id": "m", "error": None}
        assert made.ledger("m", number + 1) == ([10, 11, 12, 13, 14, 15], [99])


def test_a_snapshot_is_written_after_so_many_steps(tmp_path: Path) -> None:
    with engine(tmp_path, snapshot_steps=2) as made:
        made.create("m")
        train(made, "m", 1, 2, 10)
        told = made.wait(messages.SNAPSHOTTED).head
        assert told["number"] == 6


@pytest.mark.full
def test_a_model_that_changed_is_snapshotted_after_some_time_without_any_message(tmp_path: Path) -> None:
    with engine(tmp_path, snapshot=0.05) as made:
        made.create("m")
        assert made.wait(messages.SNAPSHOTTED).head["number"] == 0
        made.done(made.run("m", 1, "forward", request([1], forward=True)))
        made.backward("m", 2, 5)
        assert made.wait(messages.SNAPSHOTTED).head["number"] == 2


@pytest.mark.full
def test_large_payloads_make_a_snapshot_due(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.create("m")
        payload = request(*[[1] * 750_000] * 2, forward=True)
        for number in range(1, 5):
            made.run("m", number, "forward", payload)
        assert made.wait(messages.SNAPSHOTTED).head["number"] == 4


@pytest.mark.full
def test_failed_and_cancelled_operations_are_counted(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.create("m")
        made.done(made.run("m", 1, "forward_backward", request()))
        made.send(messages.SNAPSHOT, queue_id="m")
        assert made.wait(messages.SNAPSHOTTED).head["number"] == 1


def test_a_model_that_was_never_made_is_never_snapshotted(tmp_path: Path) -> None:
    with engine(tmp_path, snapshot=0.01) as made:
        made.done(made.backward("m", 1, 5))
        made.send(messages.SNAPSHOT, queue_id="m")
        made.send(messages.DETACH, queue_id="m")
        made.wait(messages.DETACHED)
        assert not snapshots(made)


def test_restoring_from_nothing_and_doing_everything_again_gives_the_same(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.send(messages.RESTORE, queue_id="m", folder=None)
        made.create("m", replay=True)
        made.backward("m", 1, 5, replay=True)
        saved = made.run("m", 2, "save", Save("checkpoints/one", "weights").dump(), replay=True)
        looked = made.run("m", 3, "forward", request([1], forward=True), replay=True)
        made.step("m", 4, replay=True)
        made.backward("m", 5, 6)
        assert made.ledger("m", 6) == ([5], [6])
        assert made.done(saved).head["error"] is None
        assert made.done(looked).body == b""
        assert not (tmp_path / "checkpoints").exists(), "what was published stays as it is"


def test_a_restored_model_forgets_what_it_was(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.create("m")
        made.done(made.backward("m", 1, 5))
        made.send(messages.SNAPSHOT, queue_id="m")
        folder = made.wait(messages.SNAPSHOTTED).head["folder"]
        made.backward("m", 2, 6)
        made.send(messages.RESTORE, queue_id="m", folder=folder)
        assert made.ledger("m", 2) == ([], [5])


def _flip(folder: Path) -> None:
    (folder / "ledger.json").write_text('{"rank": 8}')


def _other(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["facts"]["lane"] = "somebody else's"
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _gone(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.sample(2)
@pytest.mark.parametrize("harm", [_flip, _other, _gone])
def test_a_snapshot_that_is_damaged_is_told_and_nothing_runs_on_it(tmp_path: Path, harm: object) -> None:
    assert callable(harm)
    with engine(tmp_path) as made:
        made.create("m")
        made.send(messages.SNAPSHOT, queue_id="m")
        folder = made.wait(messages.SNAPSHOTTED).head["folder"]
        made.create("other")
        harm(tmp_path / folder)
        made.send(messages.RESTORE, queue_id="m", folder=folder)
        lost = made.backward("m", 1, 5)
        fine = made.backward("other", 1, 5)
        assert made.wait(messages.RESTORED).head["error"]
        outcome = made.done(lost).head
        assert outcome["category"] == "server"
        assert "could not be read" in outcome["error"]
        assert made.done(fine).head["error"] is None
        made.send(messages.RESTORE, queue_id="m", folder=None)
        made.create("m")
        assert made.ledger("m", 1) == ([], [])


@pytest.mark.full
def test_want_of_descriptors_is_told_as_passing_and_costs_no_model(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.create("m")
        made.send(messages.SNAPSHOT, queue_id="m")
        folder = made.wait(messages.SNAPSHOTTED).head["folder"]
        before = resource.prlimit(made.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(made.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        made.send(messages.RESTORE, queue_id="m", folder=folder)
        lost = made.backward("m", 1, 5)
        told = made.wait(messages.RESTORED).head
        assert told["error"]
        assert told["later"]
        assert made.done(lost).head["category"] == "server"
        resource.prlimit(made.process.pid, resource.RLIMIT_NOFILE, before)
        made.send(messages.RESTORE, queue_id="m", folder=folder)
        assert made.ledger("m", 1) == ([], [])


@pytest.mark.full
@pytest.mark.parametrize("lacking", ["memory", "whole"])
def test_a_replay_that_fails_says_whether_that_may_pass_and_nothing_runs_on_what_is_left(
    tmp_path: Path, lacking: str
) -> None:
    with engine(tmp_path, extra={lacking: [6]}, snapshot=0.01) as made:
        made.send(messages.RESTORE, queue_id="m", folder=None)
        made.create("m", replay=True)
        made.done(made.backward("m", 1, 5, replay=True))
        failed = made.done(made.backward("m", 2, 6, replay=True)).head
        assert failed["error"]
        assert failed.get("later", False) == (lacking == "memory")
        behind = [made.backward("m", 3, 7, replay=True), made.backward("m", 4, 8)]
        assert all("could not be read" in made.done(each).head["error"] for each in behind)
        assert all(told.head["number"] < 2 for told in snapshots(made))
        fresh = made.done(made.backward("other", 1, 6)).head
        assert "later" not in fresh, "what was never done fails once and for all"


def test_a_model_is_let_go_of_when_its_snapshot_is_on_the_disk(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.create("m")
        made.backward("m", 1, 5)
        made.send(messages.DETACH, queue_id="m")
        made.wait(messages.DETACHED)
        [told] = snapshots(made)
        assert told.head["number"] == 1
        assert made.done(made.backward("m", 2, 6)).head["category"] == "user", "it is not there"
        made.send(messages.RESTORE, queue_id="m", folder=told.head["folder"])
        assert made.ledger("m", 2) == ([], [5])
        made.send(messages.DETACH, queue_id="m")
        made.wait(messages.DETACHED)
        assert len(snapshots(made)) == 1, "nothing changed since"


@pytest.mark.full
def test_a_model_is_kept_while_the_disk_takes_no_snapshot(tmp_path: Path) -> None:
    environment = {**os.environ, "FAILPOINT": "files.before_rename:1:enospc"}
    with engine(tmp_path, environment=environment, snapshot=0.5, snapshot_steps=1) as made:
        made.create("m")
        made.backward("m", 1, 5)
        made.step("m", 2)
        assert made.ledger("m", 3) == ([5], [])
        made.send(messages.DETACH, queue_id="m")
        made.wait(messages.DETACHED)
        [told] = snapshots(made)
        assert (tmp_path / told.head["folder"]).exists()


def test_draining_ends_what_runs_and_snapshots_what_changed(tmp_path: Path) -> None:
    with engine(tmp_path, extra={"seconds_per_token": 0.05}) as made:
        for queue_id in ("a", "b", "c"):
            made.done(made.create(queue_id))
        running = made.backward("a", 1, 5)
        made.begun(running)
        made.send(messages.DRAIN)
        waiting = made.backward("b", 1, 6)
        made.wait(messages.DRAINED)
        assert {told.head["queue_id"]: told.head["number"] for told in snapshots(made)} == {"a": 1, "b": 0, "c": 0}
        assert made.done(running).head["error"] is None
        assert not any(m.type == messages.DONE and m.head["id"] == waiting for m in made.seen)


def test_draining_does_not_wait_for_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "FAILPOINT": "files.before_rename:1:eio"}
    with engine(tmp_path, environment=environment) as made:
        made.done(made.create("m"))
        made.send(messages.DRAIN)
        made.wait(messages.DRAINED)
        assert not snapshots(made)


@pytest.mark.sample(2)
@pytest.mark.parametrize("point", ["before_write", "before_manifest", "before_rename", "after_rename", "after_publish"])
def test_a_process_that_dies_while_it_writes_a_snapshot_leaves_none_that_is_torn(tmp_path: Path, point: str) -> None:
    with engine(tmp_path, environment={**os.environ, "FAILPOINT": f"files.{point}"}) as made:
        made.create("m")
        made.send(messages.SNAPSHOT, queue_id="m")
        with pytest.raises(AssertionError, match="ended"):
            made.wait(messages.SNAPSHOTTED)
    for folder in (tmp_path / "snapshots").iterdir():
        if not folder.name.startswith(files.TEMPORARY):
            assert files.verify(folder).facts["lane"] == "m"
