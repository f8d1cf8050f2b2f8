"""Sessions: begun, heard of, ended, found; and what a client asks before it has one."""

from datetime import UTC, datetime
from typing import Any

import httpx
import pytest


@pytest.fixture
def client(served) -> httpx.Client:
    return served.http()


def begin(client: httpx.Client, **fields: Any) -> str:
    body = {"tags": ["t"], "user_metadata": None, "sdk_version": "0.38.0", "type": "create_session", **fields}
    return str(client.post("/create_session", json=body).json()["session_id"])


def test_sessions_have_names_that_nobody_can_guess(client):
    first, second = begin(client), begin(client)
    assert first != second
    assert len(first) == 32
    assert "/" not in first


def test_a_session_whose_answer_was_lost_is_not_begun_a_second_time(served, client):
    def begun(client: httpx.Client, key: str, **fields: Any) -> str:
        answer = client.post("/create_session", json={"tags": [], **fields}, headers={"X-Idempotency-Key": key})
        return str(answer.json()["session_id"])

    first = begun(client, "one")
    assert client.post("/session_heartbeat", json={"session_id": first}).status_code == 200
    assert begun(client, "one") == first
    others = {begun(client, "two"), begun(client, "one", tags=["t"]), begun(served.http("b"), "one")}
    assert len({first, *others}) == 4
    assert len(client.get("/sessions").json()["sessions"]) == 3
    assert len(served.http("b").get("/sessions").json()["sessions"]) == 1


def test_a_heartbeat_of_a_session_that_is_not_there_ends_the_clients_loop(served, client):
    session_id = begin(client)
    beat = {"session_id": session_id, "type": "session_heartbeat"}
    assert client.post("/session_heartbeat", json=beat).json() == {"type": "session_heartbeat"}
    foreign = served.http("b").post("/session_heartbeat", json=beat)
    unknown = client.post("/session_heartbeat", json={"session_id": "none"})
    assert (foreign.status_code, unknown.status_code) == (410, 410)
    assert foreign.json()["detail"].replace(session_id, "none") == unknown.json()["detail"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("reason", ["success", "errored", "interrupted"])
def test_a_session_ends_once_however_often_it_is_said(served, client, reason: str):
    session_id = begin(client)
    body = {"reason": {"type": reason}, "detail": None}
    assert [client.post(f"/sessions/{session_id}/finish", json=body).status_code for _ in range(2)] == [200, 200]
    assert served.service.finished == [session_id]
    assert client.post("/session_heartbeat", json={"session_id": session_id}).status_code == 410
    assert served.http("b").post(f"/sessions/{session_id}/finish", json=body).status_code == 404


def test_sessions_are_found_by_what_they_said_of_themselves(client):
    mine = begin(client, display_name="Night run 7", user_metadata={"k": "v"}, project_id="p1")
    other = begin(client)
    client.post(f"/sessions/{other}/finish", json={"reason": {"type": "errored"}, "detail": "boom"})

    def search(**fields: Any) -> list[str]:
        answer = client.post("/sessions/search", json={"owner": {"type": "own"}, **fields})
        assert answer.status_code == 200, answer.text
        return [found["session_id"] for found in answer.json()["sessions"]]

    assert search() == [other, mine]
    assert search(display_name="night") == search(user_metadata={"k": "v"}) == search(project_ids=["p1"]) == [mine]
    assert search(statuses=[{"type": "active"}]) == [mine]
    assert search(statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == [other]
    assert search(statuses=[{"type": "client_finished", "reasons": ["success"]}]) == []
    assert search(statuses=[{"type": "failed"}]) == []
    assert search(owner={"type": "user", "owner_urns": ["somebody"]}) == []
    assert search(session_id=mine) == [mine]


def test_pages_of_a_search_follow_each_other(client):
    made = [begin(client) for _ in range(5)][::-1]
    found: list[str] = []
    cursor = None
    for _ in range(3):
        answer = client.post("/sessions/search", json={"limit": 2, **({"cursor": cursor} if cursor else {})}).json()
        found += [item["session_id"] for item in answer["sessions"]]
        cursor = answer.get("next_cursor")
    assert (found, cursor) == (made, None)


def test_a_summary_says_when_and_how_it_ended(client):
    session_id = begin(client)
    client.post(f"/sessions/{session_id}/finish", json={"reason": {"type": "errored"}, "detail": "boom"})
    [summary] = client.post("/sessions/search", json={}).json()["sessions"]
    assert summary["status"] == {"type": "client_finished", "reason": {"type": "errored"}, "detail": "boom"}
    age = datetime.now(UTC) - datetime.fromisoformat(summary["created_at"])
    assert 0 <= age.total_seconds() < 600


def test_a_session_is_listed_described_and_put_into_a_project(served, client):
    session_id = begin(client, display_name="x")
    assert client.get("/sessions?limit=5&offset=0&access_scope=owned").json() == {"sessions": [session_id]}
    described = client.get(f"/sessions/{session_id}").json()
    assert described == {"training_run_ids": [], "sampler_ids": [], "display_name": "x"}
    assert client.put(f"/sessions/{session_id}/project", json={"project_id": "p"}).status_code == 200
    assert client.get(f"/sessions/{session_id}/trace_export").json()["status"] == "failed"
    other = served.http("b")
    assert other.get(f"/sessions/{session_id}").status_code == 404
    assert other.put(f"/sessions/{session_id}/project", json={"project_id": "p"}).status_code == 404
    assert other.get(f"/sessions/{session_id}/trace_export").status_code == 404
    assert other.get("/sessions").json() == {"sessions": []}


def test_optional_parts_of_the_protocol_are_off(client):
    config = client.post("/client/config", json={"sdk_version": "0.38.0", "more": 1}).json()
    assert not any(value is True for value in config.values())
    assert config["fwdbwd_max_chunk_len"] == 64
    assert client.post("/client/dynamic_config", json={"sdk_version": "0.38.0"}).json()["sample_cancel_enabled"] is True


def test_telemetry_is_taken_and_not_read(client):
    assert client.post("/telemetry", json={"events": [{"event": "X"}]}).json() == {"status": "accepted"}
    assert client.post("/telemetry", content=b"\xff").status_code == 200


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/create_session", 405),
        ("POST", "/auth/token", 404),
        ("GET", "/training_runs?limit=-1", 422),
        ("GET", "/training_runs?limit=x", 422),
        ("GET", "/audit?day=yesterday", 400),
        ("GET", "/audit?day=2026-13-40", 400),
    ],
)
def test_what_is_not_there_is_answered_in_words(client, method: str, path: str, status: int):
    answer = client.request(method, path)
    assert answer.status_code == status
    assert len(answer.json()["detail"]) > 10


@pytest.mark.sample(27)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"session_id": 5}', b'{"session_id": ""}', b"{" * 100000]
)
@pytest.mark.parametrize(
    "path",
    [
        "/session_heartbeat",
        "/create_model",
        "/get_info",
        "/optim_step",
        "/save_weights",
        "/load_weights",
        "/asample",
        "/create_sampling_session",
        "/retrieve_future",
        "/weights_info",
        "/copy_weights",
        "/forward_backward",
    ],
)
def test_a_body_of_another_form_is_refused_in_words(client, path: str, body: bytes):
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 410, 422), answer.text
    assert answer.json()["detail"]


def test_a_key_is_needed_everywhere(served):
    nobody = httpx.Client(base_url=f"{served.url}/api/v1", trust_env=False)
    served.clients.append(nobody)
    for method, path in (("POST", "/create_session"), ("GET", "/get_server_capabilities"), ("GET", "/sessions")):
        assert nobody.request(method, path).status_code == 401


def test_an_account_sees_what_it_did_and_used(client):
    assert client.get("/audit?event_type=all&day=2026-01-01").json() == {"entries": []}
    usage = client.get("/billing/usage/events?starting_on=2026-01-01&ending_before=2026-02-01").json()
    assert usage == {"data": [], "sessions": {}}
    [storage] = client.get("/billing/usage/checkpoints/current").json()["data"]
    assert (storage["checkpoint_count"], storage["size_bytes"]) == (0, 0)
    assert client.get("/auth/apikey/me").status_code == 200
    assert client.delete("/auth/apikey/me").status_code == 404
