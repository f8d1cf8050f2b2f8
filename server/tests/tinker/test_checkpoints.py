"""Checkpoints over plain HTTP: saved, listed, shared, copied, taken away, deleted; names are never paths."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

BASE = "/models/of/tiny/v1"


@pytest.fixture
def client(served) -> httpx.Client:
    return served.http()


def result(client: httpx.Client, promise: httpx.Response) -> dict[str, Any]:
    assert promise.status_code == 200, promise.text
    body: dict[str, Any] = client.post("/retrieve_future", json={"request_id": promise.json()["request_id"]}).json()
    return body


def begin(client: httpx.Client) -> str:
    return str(client.post("/create_session", json={}).json()["session_id"])


def new_model(client: httpx.Client, session_id: str, number: int = 0, rank: int = 8) -> str:
    body = {"session_id": session_id, "model_seq_id": number, "base_model": BASE, "lora_config": {"rank": rank}}
    return str(result(client, client.post("/create_model", json=body))["model_id"])


@pytest.fixture
def model(client: httpx.Client) -> str:
    return new_model(client, begin(client))


def save(client: httpx.Client, model: str, number: int, name: str | None = "a", **fields: Any) -> dict[str, Any]:
    path = fields.pop("route", "/save_weights")
    return result(client, client.post(path, json={"model_id": model, "seq_id": number, "path": name, **fields}))


def test_each_kind_of_checkpoint_has_its_path(client, model):
    weights = save(client, model, 1)
    sampler = save(client, model, 2, route="/save_weights_for_sampler")
    external = save(client, model, 3, route="/save_weights_external")
    assert weights == {"type": "save_weights", "path": f"tinker://{model}/weights/a"}
    assert sampler == {"type": "save_weights_for_sampler", "path": f"tinker://{model}/sampler_weights/a"}
    assert external["path"] == f"tinker://{model}/external_weights/a"
    assert external["size_bytes"] == 7


def test_an_unnamed_save_makes_a_sampling_session(client, model):
    made = save(client, model, 1, None, route="/save_weights_for_sampler", sampling_session_seq_id=2, kind="inflight")
    session_id = model.partition(":")[0]
    assert made["sampling_session_id"] == f"{session_id}:sample:2"
    assert client.get(f"/samplers/{made['sampling_session_id']}").json()["base_model"] == BASE
    assert client.get(f"/sessions/{session_id}").json()["sampler_ids"] == [f"{session_id}:sample:2"]


def test_samples_of_an_inflight_client_name_the_model_and_no_weights(served, client, model):
    made = save(client, model, 1, None, route="/save_weights_for_sampler", sampling_session_seq_id=0, kind="inflight")
    body = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_session_id": made["sampling_session_id"], "seq_id": 0}
    assert client.post("/asample", json=body).status_code == 200
    payload = orjson.loads(served.service.submissions[-1].payload)
    assert (payload["source"], payload["inflight"]) == (None, model)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "a checkpoint name must be"),
        (".", "a checkpoint name must be"),
        ("..", "a checkpoint name must be"),
        ("a/b", "a checkpoint name must be"),
        ("../a", "a checkpoint name must be"),
        ("a\0b", "a checkpoint name must be"),
        ("ä", "a checkpoint name must be"),
        ("a" * 129, "a checkpoint name must be"),
        (None, "path is required"),
    ],
)
def test_a_name_that_could_be_a_path_fails_and_uses_up_its_number(served, client, model, name: str | None, words: str):
    answer = save(client, model, 1, name)
    assert answer["category"] == "user"
    assert words in answer["error"]
    assert save(client, model, 2)["path"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("route", "fields", "words"),
    [
        ("/save_weights", {"ttl_seconds": 10}, "3600"),
        ("/save_weights", {"overwrite": "perhaps"}, "overwrite"),
        ("/save_weights_external", {"age_encryption_recipients": ["age1"]}, "age_encryption_recipients[0] must be"),
        (
            "/save_weights_for_sampler",
            {"sampling_session_seq_id": 1},
            "sampling_session_seq_id (for a sampling session) is required",
        ),
        ("/save_weights_for_sampler", {"kind": "other"}, "kind"),
        ("/save_weights_for_sampler", {"kind": "inflight"}, "inflight"),
    ],
)
def test_a_save_that_makes_no_sense_fails_and_uses_up_its_number(client, model, route, fields, words: str):
    answer = save(client, model, 1, route=route, **fields)
    assert answer["category"] == "user"
    assert words in answer["error"]
    assert save(client, model, 2)["path"]


def test_a_name_is_used_again_only_where_that_is_asked_for(client, model):
    save(client, model, 1)
    assert "already exists" in save(client, model, 2)["error"]
    assert save(client, model, 3, overwrite=True)["path"]
    assert client.get("/checkpoints").json()["cursor"]["total_count"] == 1


@pytest.mark.full
def test_a_repeated_save_is_the_same_save(served, client, model):
    body = {"model_id": model, "seq_id": 1, "path": "a"}
    promises = [client.post("/save_weights", json=body).json() for _ in range(2)]
    assert promises[0] == promises[1]
    assert [made.kind for made in served.service.submissions] == ["create", "save"]


def test_lists_say_how_long_they_are_and_keep_their_order(client, model):
    for number in range(1, 6):
        save(client, model, number, f"c{number}")
    pages = [client.get(f"/checkpoints?limit=2&offset={offset}").json() for offset in (0, 2, 4)]
    names = [found["checkpoint_id"] for page in pages for found in page["checkpoints"]]
    assert names == [f"weights/c{number}" for number in (5, 4, 3, 2, 1)]
    assert pages[1]["cursor"] == {"offset": 2, "limit": 2, "total_count": 5}
    of_run = client.get(f"/training_runs/{model}/checkpoints").json()
    assert len(of_run["checkpoints"]) == 5


def test_the_life_of_a_checkpoint_is_set_and_cleared(client, model):
    save(client, model, 1, ttl_seconds=7200)
    route = f"/training_runs/{model}/checkpoints/weights/a"
    assert client.get("/checkpoints").json()["checkpoints"][0]["expires_at"]
    assert client.put(f"{route}/ttl", json={"ttl_seconds": None}).status_code == 200
    assert "expires_at" not in client.get("/checkpoints").json()["checkpoints"][0]
    assert client.put(f"{route}/ttl", json={"ttl_seconds": 3599}).status_code == 400
    assert client.put(f"{route}/ttl", json={"ttl_seconds": 3600}).status_code == 200
    assert client.put(f"{route}/ttl", json={}).status_code == 422


def test_others_see_a_checkpoint_only_while_it_is_public(served, client, model):
    other = served.http("b")
    path = save(client, model, 1, route="/save_weights_for_sampler")["path"]
    route = f"/training_runs/{model}/checkpoints/sampler_weights/a"
    source = {"sampling_session_seq_id": 0, "model_path": path}

    def seen() -> list[int]:
        session_id = begin(other)
        return [
            other.post("/weights_info", json={"tinker_path": path}).status_code,
            other.post("/create_sampling_session", json={"session_id": session_id, **source}).status_code,
            other.get(f"{route}/archive", follow_redirects=False).status_code,
        ]

    assert seen() == [404, 404, 404]
    assert other.post(f"{route}/publish").status_code == 404
    assert client.post(f"{route}/publish").status_code == 200
    assert seen() == [200, 200, 302]
    assert client.delete(f"{route}/publish").status_code == 200
    assert seen() == [404, 404, 404]


def test_nobody_elses_checkpoint_can_be_changed_even_while_it_is_public(served, client, model):
    other = served.http("b")
    save(client, model, 1)
    route = f"/training_runs/{model}/checkpoints/weights/a"
    client.post(f"{route}/publish")
    assert other.delete(route).status_code == 404
    assert other.delete(f"{route}/publish").status_code == 404
    assert other.put(f"{route}/ttl", json={"ttl_seconds": None}).status_code == 404
    assert other.get(f"/training_runs/{model}/checkpoints").status_code == 404
    assert other.get(f"/training_runs/{model}").status_code == 404
    assert client.get("/checkpoints").json()["checkpoints"][0]["public"] is True


def test_a_deleted_checkpoint_is_nowhere(client, model):
    path = save(client, model, 1)["path"]
    route = f"/training_runs/{model}/checkpoints/weights/a"
    assert client.delete(route).status_code == 200
    assert client.delete(route).status_code == 404
    assert client.post("/weights_info", json={"tinker_path": path}).status_code == 404
    load = {"session_id": model.partition(":")[0], "model_seq_id": 1, "path": path, "optimizer": True}
    assert "does not exist" in result(client, client.post("/load_weights", json=load))["error"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "route", ["other/a", "weights/..", "weights/%2e%2e", "weights/a%00", "weights/%2Fetc%2Fpasswd", "weights//a"]
)
def test_a_route_that_could_be_a_path_is_not_there(client, model, route: str):
    assert client.delete(f"/training_runs/{model}/checkpoints/{route}").status_code in (404, 405)


def test_a_new_model_comes_from_a_checkpoint_with_its_shape(served, client):
    session_id = begin(client)
    path = save(client, new_model(client, session_id, rank=4), 1)["path"]
    load = {"session_id": session_id, "model_seq_id": 1, "path": path, "optimizer": True, "base_model": BASE}
    answer = result(client, client.post("/load_weights", json=load))
    assert answer == {"type": "load_weights", "path": path, "model_id": f"{session_id}:train:1"}
    payload = orjson.loads(served.service.submissions[-1].payload)
    assert (payload["rank"], payload["optimizer"], payload["source"].partition("/")[0]) == (4, True, "checkpoints")
    assert client.post("/get_info", json={"model_id": answer["model_id"]}).json()["lora_rank"] == 4


def test_loading_into_a_model_wants_the_same_shape(client):
    session_id = begin(client)
    path = save(client, new_model(client, session_id, rank=4), 1)["path"]
    same, other = new_model(client, session_id, 1, rank=4), new_model(client, session_id, 2, rank=8)
    load = {"seq_id": 1, "path": path, "optimizer": False}
    assert result(client, client.post("/load_weights", json={"model_id": same, **load}))["path"] == path
    assert "rank 4" in result(client, client.post("/load_weights", json={"model_id": other, **load}))["error"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"path": "tinker://a/sampler_weights/b"}, "sampler checkpoint"),
        ({"path": "/etc/passwd"}, "a checkpoint path must be"),
        ({"path": "tinker://a/weights/b"}, "does not exist"),
        ({"base_model": "other"}, "got 'other'"),
        ({"weights_access_token": "x"}, "publish"),
        ({"optimizer_config": {"type": "dimuon"}}, "'dimuon'"),
    ],
)
def test_what_cannot_be_loaded_fails_as_the_users_fault(client, fields: dict[str, Any], words: str):
    session_id = begin(client)
    path = save(client, new_model(client, session_id), 1)["path"]
    load = {"session_id": session_id, "model_seq_id": 1, "path": path, "optimizer": False, **fields}
    answer = result(client, client.post("/load_weights", json=load))
    assert answer["category"] == "user"
    assert words in answer["error"]


def test_a_load_of_nothing_says_how_it_is_addressed(client):
    assert client.post("/load_weights", json={"path": "tinker://a/weights/b"}).status_code == 422


def test_a_copy_lives_on_its_own_and_a_repeated_one_is_the_same(served, client, model):
    path = save(client, model, 1)["path"]
    headers = {"X-Idempotency-Key": "one"}
    body = {"source_path": path, "destination_project_id": "p", "ttl_seconds": 7200}
    copies = [client.post("/copy_weights", json=body, headers=headers).json()["tinker_path"] for _ in range(2)]
    assert copies[0] == copies[1] != path
    client.delete(f"/training_runs/{model}/checkpoints/weights/a")
    assert client.post("/weights_info", json={"tinker_path": copies[0]}).json()["lora_rank"] == 8
    session_id = begin(client)
    body = {"source_path": copies[0], "session_id": session_id, "model_seq_id": 0}
    answers = [client.post("/copy_weights", json=body).json() for _ in range(2)]
    assert answers == [{"tinker_path": f"tinker://{session_id}:train:0/weights/a"}] * 2
    assert client.get(f"/training_runs/{session_id}:train:0").json()["last_checkpoint"]["tinker_path"]
    taken = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
    assert client.post("/create_model", json=taken).status_code == 409
    body = {"source_path": copies[0], "session_id": model.partition(":")[0], "model_seq_id": 0}
    assert client.post("/copy_weights", json=body).status_code == 409
    assert served.http("b").post("/copy_weights", json={"source_path": path}).status_code == 404


def test_another_copy_under_the_same_number_is_refused(client, model):
    body = {"source_path": save(client, model, 1)["path"], "session_id": begin(client), "model_seq_id": 0}
    copy = client.post("/copy_weights", json=body).json()
    other = save(client, model, 2, name="b")["path"]
    for changed in ({"source_path": other}, {"ttl_seconds": 7200}, {"destination_project_id": "p"}):
        answer = client.post("/copy_weights", json={**body, **changed})
        assert (answer.status_code, "model_seq_id" in answer.text) == (409, True), changed
    assert client.post("/copy_weights", json=body).json() == copy


@pytest.mark.parametrize("numbered", [True, False])
def test_a_copy_that_is_asked_for_twice_at_once_is_made_once(client, model, numbered: bool):
    body: dict[str, Any] = {"source_path": save(client, model, 1)["path"]}
    if numbered:
        body |= {"session_id": begin(client), "model_seq_id": 0}
    with ThreadPoolExecutor(4) as threads:
        asked = [
            threads.submit(client.post, "/copy_weights", json=body, headers={"X-Idempotency-Key": "k"}) for _ in "1234"
        ]
    answers = [each.result() for each in asked]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len({answer.json()["tinker_path"] for answer in answers}) == 1


def test_copies_that_make_no_sense_are_refused(client, model):
    path = save(client, model, 1)["path"]
    assert client.post("/copy_weights", json={"source_path": path, "session_id": "x"}).status_code == 422
    assert client.post("/copy_weights", json={"source_path": path, "ttl_seconds": 1}).status_code == 400
    assert client.post("/copy_weights", json={"source_path": "x"}).status_code == 400
    foreign = client.post("/copy_weights", json={"source_path": path}, headers={"X-Tinker-Weights-Access-Token": "t"})
    assert foreign.status_code == 400


def test_an_archive_is_fetched_by_a_link_that_needs_no_key(served, client, model):
    save(client, model, 1)
    answer = client.get(f"/training_runs/{model}/checkpoints/weights/a/archive", follow_redirects=False)
    assert (answer.status_code, bool(answer.headers["expires"])) == (302, True)
    fetched = httpx.get(answer.headers["location"], headers={"X-API-Key": served.key("b")}, trust_env=False)
    assert fetched.headers["content-type"] == "application/x-tar"
    assert b"weights" in fetched.content


def test_links_to_files_are_for_external_weights_alone(client, model):
    save(client, model, 1)
    save(client, model, 2, route="/save_weights_external")
    route = f"/training_runs/{model}/checkpoints"
    assert client.get(f"{route}/weights/a/external_weights_urls").status_code == 400
    found = client.get(f"{route}/external_weights/a/external_weights_urls").json()
    assert list(found["urls"]) == ["a.bin"]
    assert found["expires"]


def test_nothing_is_written_outside_the_folder_of_checkpoints(served, client, model):
    save(client, model, 1)
    folders = {
        Path(made.payload and orjson.loads(made.payload).get("folder", "")) for made in served.service.submissions
    }
    assert {folder.parts[0] for folder in folders if folder.parts} == {"checkpoints"}
