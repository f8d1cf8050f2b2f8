"""Sessions, models, samplers, checkpoints, keys, audit and usage: what they say of themselves."""

import base64
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from twinkle_server.errors import BadRequest, Gone, NotFound, SequenceConflict
from twinkle_server.ids import CheckpointPath
from twinkle_server.operations import Snapshot
from twinkle_server.store import Store, models, samplers
from twinkle_server.store.records import AuditEntry, Checkpoint, Key, Model, Sampler, Session, Usage
from twinkle_server.store.sessions import SessionSearch
from twinkle_server.store.tenants import day_of

Run = Callable[[Awaitable[Any]], Any]
NOW = 100.0


@pytest.fixture
def session(store: Store, run: Run) -> Session:
    made = Session("ada-s", "ada", 1.0, 1.0, tags=["a"], metadata={"k": "v"}, project="p", display_name="Run 1")
    run(store.sessions.create(made))
    return made


@pytest.fixture
def model(store: Store, run: Run, session: Session) -> Model:
    made = Model(
        "ada-s:train:0", "ada", session.id, 0, "base", 8, 2.0, 2.0, seed=3, train_mlp=False, metadata={"x": "y"}
    )
    run(store.database.write(lambda connection: models.add(connection, made)))
    return made


def checkpoint(name: str = "one", **more: Any) -> Checkpoint:
    known: dict[str, Any] = {"kind": "weights", "folder": f"checkpoints/{name}", "size": 10, "created": 5.0}
    return Checkpoint("ada", "ada-s:train:0", name=name, digest="d", base="base", rank=8, **{**known, **more})


def sampler(number: int = 0, **more: Any) -> Sampler:
    return Sampler(f"ada-s:sample:{number}", "ada", "ada-s", number, "base", 3.0, **more)


def test_a_session_is_read_as_it_was_written(store: Store, run: Run, session: Session) -> None:
    assert run(store.sessions.get("ada", session.id)) == session


def test_a_heartbeat_counts_until_the_session_ends(store: Store, run: Run, session: Session) -> None:
    run(store.sessions.heartbeat("ada", session.id, 50.0))
    assert run(store.sessions.silent(50.0)) == []
    assert [each.id for each in run(store.sessions.silent(50.1))] == [session.id]
    assert run(store.sessions.end("ada", session.id, "expired", 60.0, "expired"))
    assert not run(store.sessions.end("ada", session.id, "finished", 61.0))
    for unknown in (session.id, "never"):
        with pytest.raises(Gone):
            run(store.sessions.heartbeat("ada", unknown, 70.0))
    ended = run(store.sessions.get("ada", session.id))
    assert (ended.status, ended.ended, ended.reason, ended.last_heartbeat) == ("expired", 60.0, "expired", 50.0)
    assert run(store.sessions.all_active()) == []


def test_nothing_new_is_made_in_a_session_that_has_ended_or_never_was(store: Store, run: Run, model: Model) -> None:
    run(store.sessions.end("ada", "ada-s", "finished", 60.0))
    late = replace(model, id="ada-s:train:1", number=1)
    for make in (
        lambda connection: models.add(connection, late),
        lambda connection: samplers.add(connection, sampler()),
    ):
        with pytest.raises(Gone, match="has finished; create a new one"):
            run(store.database.write(make))
    with pytest.raises(NotFound):
        run(store.database.write(lambda connection: models.add(connection, replace(late, session="never"))))


def test_sessions_are_listed_newest_first_with_their_number(store: Store, run: Run) -> None:
    for number in range(5):
        run(store.sessions.create(Session(f"s{number}", "ada", float(number // 2), 0.0)))
    page = run(store.sessions.page("ada", 2, 1))
    assert ([each.id for each in page.rows], page.total) == (["s3", "s2"], 5)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (SessionSearch(), ["s2", "s1", "s0"]),
        (SessionSearch(session="s1"), ["s1"]),
        (SessionSearch(projects=["p1", "p2"]), ["s2", "s1"]),
        (SessionSearch(metadata={"both": "x", 'odd "$.key': "1"}), ["s1"]),
        (SessionSearch(metadata={"both": "y"}), []),
        (SessionSearch(display_name="EN 1%"), ["s1"]),
        (SessionSearch(display_name="%"), ["s1"]),
        (SessionSearch(statuses=["finished", "expired"]), ["s2"]),
    ],
)
def test_sessions_are_found_by_what_they_are(store: Store, run: Run, wanted: SessionSearch, found: list[str]) -> None:
    for number in range(3):
        metadata = {"both": "x", 'odd "$.key': str(number)}
        name = f"seven {number}{'%' if number == 1 else ''}"
        run(
            store.sessions.create(
                Session(
                    f"s{number}", "ada", float(number), 0.0, metadata=metadata, project=f"p{number}", display_name=name
                )
            )
        )
    run(store.sessions.end("ada", "s2", "finished", NOW))
    assert [each.id for each in run(store.sessions.search("ada", wanted)).rows] == found


def test_a_search_goes_on_where_it_stopped_though_new_sessions_come(store: Store, run: Run) -> None:
    for number in range(7):
        run(store.sessions.create(Session(f"s{number}", "ada", float(number // 3), 0.0)))
    seen, cursor = [], None
    for _ in range(10):
        page = run(store.sessions.search("ada", SessionSearch(limit=2, cursor=cursor)))
        seen += [each.id for each in page.rows]
        run(store.sessions.create(Session(f"later{len(seen)}", "ada", 99.0, 0.0)))
        cursor = page.cursor
        if cursor is None:
            break
    assert seen == ["s6", "s5", "s4", "s3", "s2", "s1", "s0"]


@pytest.mark.parametrize("cursor", ["x", "====", base64.b64encode(b"no number").decode(), "\u00e9"])
def test_an_invented_cursor_is_the_users_fault(store: Store, run: Run, cursor: str) -> None:
    with pytest.raises(BadRequest, match="the cursor must be"):
        run(store.sessions.search("ada", SessionSearch(cursor=cursor)))


def test_a_session_can_be_put_into_a_project(store: Store, run: Run, session: Session) -> None:
    run(store.sessions.set_project("ada", session.id, "other"))
    assert run(store.sessions.get("ada", session.id)).project == "other"
    with pytest.raises(NotFound):
        run(store.sessions.set_project("ada", "never", "other"))


def test_a_model_lives_through_its_states(store: Store, run: Run, model: Model) -> None:
    assert run(store.models.get("ada", model.id)) == model
    assert run(store.models.count("ada")) == 1
    run(store.models.set_status("ada", model.id, "detached", 50.0))
    assert run(store.models.count("ada")) == 0
    assert run(store.models.with_status("detached", before=50.0)) == []
    assert [each.id for each in run(store.models.with_status("detached", before=50.1))] == [model.id]
    run(store.models.set_status("ada", model.id, "live", 60.0))
    assert run(store.models.get("ada", model.id)).detached is None
    run(store.journal.snapshotted(Snapshot(model.id, 4, "snapshots/a", "d", 5)))
    assert run(store.models.get("ada", model.id)).snapshot == Snapshot(model.id, 4, "snapshots/a", "d", 5)
    assert run(store.models.gone("ada", model.id, 70.0, "unloaded")) == ["snapshots/a"]
    gone = run(store.models.get("ada", model.id))
    assert (gone.status, gone.reason, gone.snapshot) == ("gone", "unloaded", None)
    with pytest.raises(NotFound):
        run(store.models.set_status("ada", "never", "live", 1.0))


def test_a_models_number_is_its_own(store: Store, run: Run, model: Model) -> None:
    with pytest.raises(SequenceConflict, match="model 0 of this session already exists"):
        run(store.database.write(lambda connection: models.add(connection, replace(model, rank=4))))


def test_models_are_listed_newest_first_and_by_session(store: Store, run: Run, model: Model) -> None:
    for number in (2, 1):
        late = replace(model, id=f"ada-s:train:{number}", number=number, created=10.0 - number, project=f"p{number}")
        run(store.database.write(lambda connection, late=late: models.add(connection, late)))
    page = run(store.models.page("ada", 2, 0))
    assert ([each.number for each in page.rows], page.total) == ([1, 2], 3)
    assert [each.number for each in run(store.models.page("ada", 5, 0, "p2")).rows] == [2]
    assert [each.number for each in run(store.models.of_session("ada", "ada-s"))] == [0, 1, 2]


def test_a_sampling_session_may_be_made_twice_if_it_is_the_same(store: Store, run: Run, session: Session) -> None:
    run(store.samplers.create(sampler(path="tinker://a")))
    run(store.samplers.create(sampler(path="tinker://a")))
    assert run(store.samplers.get("ada", "ada-s:sample:0")) == sampler(path="tinker://a")
    assert run(store.samplers.count("ada")) == 1
    with pytest.raises(SequenceConflict):
        run(store.samplers.create(sampler(path="tinker://b")))
    assert [run(store.samplers.join("ada", "ada-s:sample:0")) for _ in range(3)] == [1, 2, 3]


def test_inflight_sampling_sessions_move_together_and_snapshots_do_not(store: Store, run: Run, model: Model) -> None:
    write = store.database.write
    run(store.samplers.create(sampler(0, folder="checkpoints/frozen")))
    run(store.samplers.create(sampler(1, inflight=model.id)))
    assert run(write(lambda connection: samplers.inflight_folder(connection, "ada", model.id))) is None
    assert run(write(lambda connection: samplers.move_inflight(connection, "ada", model.id, "checkpoints/1"))) == []
    run(store.samplers.create(sampler(2, inflight=model.id)))
    moved = run(write(lambda connection: samplers.move_inflight(connection, "ada", model.id, "checkpoints/2")))
    assert moved == ["checkpoints/1"]
    assert run(write(lambda connection: samplers.inflight_folder(connection, "ada", model.id))) == "checkpoints/2"
    folders = [each.folder for each in run(store.samplers.of_session("ada", "ada-s"))]
    assert folders == ["checkpoints/frozen", "checkpoints/2", "checkpoints/2"]


def test_a_session_and_its_sampling_sessions_end_in_one_commit(store: Store, run: Run) -> None:
    for owner in ("ada-s", "ada-t"):
        run(store.sessions.create(Session(owner, "ada", NOW, NOW)))
        run(store.samplers.create(Sampler(f"{owner}:sample:0", "ada", owner, 0, "base", NOW, folder="checkpoints/x")))
    before = store.database.commits
    assert run(store.sessions.end("ada", "ada-s", "finished", NOW + 1))
    assert store.database.commits == before + 1
    ended = [run(store.samplers.get("ada", f"{owner}:sample:0")).ended for owner in ("ada-s", "ada-t")]
    assert ended == [NOW + 1, None]
    assert not run(store.sessions.end("ada", "ada-s", "finished", NOW + 2))
    assert run(store.samplers.get("ada", "ada-s:sample:0")).ended == NOW + 1


def test_a_checkpoint_is_read_as_it_was_written(store: Store, run: Run) -> None:
    made = checkpoint(metadata={"a": "b"}, has_optimizer=True, train_attn=False, expires=NOW + 1, project="p")
    assert run(store.checkpoints.create(made)) is None
    found = run(store.checkpoints.get("ada", made.path, NOW))
    assert found == replace(made, id=found.id)
    assert found.id > 0


def test_a_name_is_taken_until_it_is_overwritten_deleted_or_expired(store: Store, run: Run) -> None:
    run(store.checkpoints.create(checkpoint()))
    with pytest.raises(BadRequest, match=r"tinker://ada-s:train:0/weights/one already exists.*overwrite=True"):
        run(store.checkpoints.create(checkpoint(folder="checkpoints/b")))
    run(store.checkpoints.create(checkpoint(kind="sampler_weights")))
    assert run(store.checkpoints.create(checkpoint(folder="checkpoints/b"), overwrite=True)) == "checkpoints/one"
    assert run(store.checkpoints.get("ada", checkpoint().path, NOW)).folder == "checkpoints/b"
    assert run(store.checkpoints.delete("ada", checkpoint().path, NOW)) == "checkpoints/b"
    with pytest.raises(NotFound):
        run(store.checkpoints.delete("ada", checkpoint().path, NOW))
    assert run(store.checkpoints.create(checkpoint(folder="checkpoints/c", expires=10.0))) is None
    assert run(store.checkpoints.create(checkpoint(folder="checkpoints/d", created=10.0))) == "checkpoints/c"


def test_an_expired_checkpoint_is_not_there(store: Store, run: Run) -> None:
    run(store.checkpoints.create(checkpoint("a", expires=NOW, public=True)))
    run(store.checkpoints.create(checkpoint("b")))
    path = checkpoint("a").path
    assert run(store.checkpoints.get("ada", path, NOW - 1)).name == "a"
    for ask in (store.checkpoints.get, store.checkpoints.find, store.checkpoints.delete):
        with pytest.raises(NotFound, match=r"checkpoint tinker:.* does not exist"):
            run(ask("ada", path, NOW))
    with pytest.raises(NotFound):
        run(store.checkpoints.set_expiry("ada", path, NOW, None))
    assert [each.name for each in run(store.checkpoints.page("ada", NOW)).rows] == ["b"]
    assert run(store.checkpoints.bytes("ada", NOW)) == 10
    assert [each.name for each in run(store.checkpoints.expire(NOW))] == ["a"]
    assert run(store.checkpoints.expire(NOW)) == []


def test_checkpoints_are_listed_newest_first_in_a_stable_order(store: Store, run: Run) -> None:
    for number in range(5):
        run(store.checkpoints.create(checkpoint(f"c{number}", created=float(number // 3))))
    pages = [run(store.checkpoints.page("ada", NOW, 2, offset)) for offset in (0, 2, 4)]
    assert [each.name for page in pages for each in page.rows] == ["c4", "c3", "c2", "c1", "c0"]
    assert {page.total for page in pages} == {5}
    assert run(store.checkpoints.page("ada", NOW, run="another")).rows == []


def test_the_newest_checkpoint_of_each_kind_is_known(store: Store, run: Run) -> None:
    for name, kind, created in (("a", "weights", 3.0), ("b", "weights", 4.0), ("c", "sampler_weights", 1.0)):
        run(store.checkpoints.create(checkpoint(name, kind=kind, created=created)))
    latest = run(store.checkpoints.latest("ada", ["ada-s:train:0", "never"], NOW))
    assert {key: each.name for key, each in latest.items()} == {
        ("ada-s:train:0", "weights"): "b",
        ("ada-s:train:0", "sampler_weights"): "c",
    }


def test_expiry_and_publication_can_be_changed(store: Store, run: Run) -> None:
    run(store.checkpoints.create(checkpoint()))
    path = checkpoint().path
    with pytest.raises(NotFound):
        run(store.checkpoints.find("eve", path, NOW))
    run(store.checkpoints.publish("ada", path, NOW, True))
    assert run(store.checkpoints.find("eve", path, NOW)).public
    run(store.checkpoints.publish("ada", path, NOW, False))
    with pytest.raises(NotFound):
        run(store.checkpoints.find("eve", path, NOW))
    run(store.checkpoints.set_expiry("ada", path, NOW, NOW + 5))
    with pytest.raises(NotFound):
        run(store.checkpoints.get("ada", path, NOW + 5))
    run(store.checkpoints.set_expiry("ada", path, NOW, None))
    assert run(store.checkpoints.get("ada", path, NOW + 5)).expires is None


def test_only_the_newest_checkpoints_are_kept_where_that_is_wanted(store: Store, run: Run) -> None:
    for number in range(5):
        run(store.checkpoints.create(checkpoint(f"c{number}", created=float(number))))
    run(store.checkpoints.create(checkpoint("other", kind="sampler_weights", created=0.0)))
    gone = run(store.checkpoints.surplus("ada", "ada-s:train:0", "weights", 2, NOW))
    assert [each.name for each in gone] == ["c2", "c1", "c0"]
    assert [each.name for each in run(store.checkpoints.page("ada", NOW)).rows] == ["c4", "c3", "other"]


def test_a_session_knows_its_checkpoints(store: Store, run: Run, model: Model) -> None:
    for name in ("a", "b"):
        run(store.checkpoints.create(checkpoint(name)))
    run(store.checkpoints.create(checkpoint("gone", expires=NOW)))
    assert run(store.checkpoints.of_sessions("ada", ["ada-s", "never"], NOW)) == {"ada-s": (2, 20)}


def test_a_key_has_its_name_to_itself_until_it_is_revoked(store: Store, run: Run) -> None:
    key = Key("id", "ada", "laptop", "user", "prefix", "hash", 1.0, quotas={"adapters": 3})
    run(store.keys.create(key))
    assert run(store.keys.all()) == [key]
    with pytest.raises(BadRequest, match=r"'laptop'.*another name"):
        run(store.keys.create(replace(key, id="id2", prefix="prefix2")))
    assert run(store.keys.revoke("laptop", 9.0)).quotas == {"adapters": 3}
    with pytest.raises(NotFound, match="no active key 'laptop'"):
        run(store.keys.revoke("laptop", 9.0))
    run(store.keys.create(replace(key, id="id2", prefix="prefix2")))
    assert [each.id for each in run(store.keys.all())] == ["id2"]
    assert [each.id for each in run(store.keys.all(revoked=True))] == ["id", "id2"]


def test_what_was_done_is_read_by_time_and_event(store: Store, run: Run) -> None:
    for time, event in ((1.0, "login"), (2.0, "delete"), (3.0, "login")):
        run(store.audit.record(AuditEntry(time, "ada", event, {"at": time})))
    assert [each.time for each in run(store.audit.entries("ada"))] == [3.0, 2.0, 1.0]
    assert [each.details for each in run(store.audit.entries("ada", 1.5, 3.0))] == [{"at": 2.0}]
    assert [each.time for each in run(store.audit.entries("ada", event="login", limit=1))] == [3.0]
    assert run(store.audit.forget(2.5)) == 2


def test_what_was_used_is_added_up_by_day(store: Store, run: Run) -> None:
    assert day_of(86399.0) == "1970-01-01"
    for tokens in (5, 7):
        run(store.usage.add(Usage("ada", "2026-01-02", "training", tokens, 1)))
    run(store.usage.add(Usage("ada", "2026-01-03", "training", 1)))
    assert run(store.usage.between("ada", "2026-01-01", "2026-01-03")) == [
        Usage("ada", "2026-01-02", "training", 12, 2)
    ]


def test_a_path_from_a_client_finds_its_checkpoint(store: Store, run: Run) -> None:
    run(store.checkpoints.create(checkpoint()))
    assert run(store.checkpoints.get("ada", CheckpointPath.parse("tinker://ada-s:train:0/weights/one"), NOW)).size == 10
