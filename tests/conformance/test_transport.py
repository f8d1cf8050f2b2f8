"""Lines 1 to 13: transport, keys, configuration."""

import asyncio
import gzip
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import server_sdk as sdk
from server_proxy import Proxy, proxied
from server_raw import PROTOBUF, Raw, row
from serving import Served, ledger


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service that wants keys."""
    service = ledger(tmp_path_factory.mktemp("guarded") / "data", {"auth": True}).start()
    yield service
    service.stop()


def routes(url: str) -> list[tuple[str, str]]:
    """Return method and path of every route of the protocol that the SDK calls."""
    path = "/training_runs/x:train:0/checkpoints/weights/a"
    posts = [
        "client/config", "client/dynamic_config", "create_session", "session_heartbeat", "sessions/x/finish",
        "telemetry", "create_model", "get_info", "forward_backward", "optim_step", "save_weights",
        "save_weights_for_sampler", "save_weights_external", "load_weights", "create_sampling_session", "asample",
        "retrieve_future", "cancel_future", "weights_info", "copy_weights", "sessions/search",
    ]  # fmt: skip
    gets = ["get_server_capabilities", "training_runs", "training_runs/x:train:0", "checkpoints", "sessions",
            "sessions/x", "samplers/x:sample:0", f"{path[1:]}/external_weights_urls"]  # fmt: skip
    more = [("DELETE", path), ("POST", f"{path}/publish"), ("DELETE", f"{path}/publish"), ("PUT", f"{path}/ttl")]
    return [("POST", f"/{name}") for name in posts] + [("GET", f"/{name}") for name in gets] + more


def test_line_1_client_config_is_an_object_whatever_the_request_says(raw: Raw) -> None:
    assert isinstance(raw.post("/client/config", {"sdk_version": "0.38.0", "of_tomorrow": [1, {"a": None}]}), dict)


def test_line_2_dynamic_config_is_an_object(raw: Raw) -> None:
    assert isinstance(raw.post("/client/dynamic_config", {"sdk_version": "0.38.0"}), dict)


@pytest.mark.sample(1)
@pytest.mark.parametrize("key", [None, "tml-" + "x" * 43, "eyJ.a.b", "", "tml-"])
def test_line_3_without_a_known_key_every_route_answers_401_with_words(guarded: Served, key: str | None) -> None:
    with Raw(guarded.url, key) as raw:
        for method, path in routes(guarded.url):
            answer = raw.send(path, None if method in ("GET", "DELETE") else {}, method)
            assert answer.status_code == 401, (method, path, answer.status_code)
            assert answer.json()["detail"], (method, path)


def test_line_4_a_key_is_enough(guarded: Served) -> None:
    answer = httpx.post(
        f"{guarded.url}/api/v1/create_session", json={}, headers={"X-API-Key": guarded.key}, trust_env=False
    )
    assert guarded.key.startswith("tml-")
    assert answer.status_code == 200
    assert answer.json()["session_id"]


@pytest.mark.full
def test_line_5_the_sdk_asks_what_is_served(served: Served, tiny: Path) -> None:
    with sdk.opened(served.url, "tml-x") as client, pytest.warns(FutureWarning):
        models = client.get_server_capabilities().supported_models
    assert [model.model_name for model in models] == [str(tiny)]


def test_line_6_the_sdk_takes_an_address_with_a_prefix_and_a_slash_at_its_end(served: Served, tiny: Path) -> None:
    async def behind() -> object:
        async with proxied(Proxy(served.url, prefix="/some/where")) as proxy:
            return await asyncio.to_thread(ask, proxy.url + "/")

    def ask(url: str) -> object:
        with sdk.opened(url) as client:
            return client.create_sampling_client(base_model=str(tiny)).result(60)

    assert asyncio.run(behind())


def test_line_7_fields_that_nobody_knows_are_ignored(raw: Raw) -> None:
    model = raw.model(of_tomorrow={"deep": [1]})
    model.forward_backward([row([1, 2, 3])])
    request = model.submit("optim_step", adam_params={"learning_rate": 1e-3, "of_tomorrow": "x"}, of_tomorrow=7)
    assert raw.result(request) is not None


def test_lines_8_51_what_is_left_out_has_its_default_and_null_is_taken(raw: Raw, tmp_path: Path) -> None:
    session = str(raw.post("/create_session", {})["session_id"])
    body = {"session_id": session, "model_seq_id": 0, "base_model": raw.base_model(), "lora_config": {"rank": 4}}
    request = raw.post("/create_model", body)["request_id"]
    model_id = raw.result(request)["model_id"]
    request = raw.post("/optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})["request_id"]
    assert raw.result(request) is not None
    request = raw.post("/save_weights", {"model_id": model_id, "seq_id": 2, "path": "a"})["request_id"]
    assert raw.result(request)["path"] == f"tinker://{model_id}/weights/a"
    ttl = raw.send(f"/training_runs/{model_id}/checkpoints/weights/a/ttl", {"ttl_seconds": None}, "PUT")
    assert ttl.is_success
    finish = raw.send(f"/sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    assert finish.is_success


BAD_BODIES = [  # what is no JSON or protobuf at all, or names no path, is 400; JSON of another form is 422
    ("/create_session", b"{", 422),
    ("/create_model", b"[]", 422),
    ("/create_model", b"{}", 422),
    ("/create_model", b'{"session_id": 7, "model_seq_id": "x"}', 422),
    ("/optim_step", b'{"model_id": null}', 422),
    ("/optim_step", b"\xff\xfe", 422),
    ("/asample", b"{}", 422),
    ("/asample", b'{"num_samples": -1, "prompt": 3}', 422),
    ("/retrieve_future", b"{}", 422),
    ("/session_heartbeat", b"null", 422),
    ("/weights_info", b'{"tinker_path": "no path"}', 400),
    ("/forward_backward", b"\x0a\xff\xff\xff\xff\x0f", 400),
    ("/forward_backward", b"hello", 400),
    ("/forward_backward", b"", 400),
    ("/create_session", b"[" * 5000 + b"]" * 5000, 400),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("path", "body", "status"), BAD_BODIES)
def test_line_9_what_makes_no_sense_is_answered_in_words_and_not_to_be_sent_again(
    raw: Raw, path: str, body: bytes, status: int
) -> None:
    kind = PROTOBUF if path == "/forward_backward" else "application/json"
    answer = raw.http.post(path, content=body, headers={"Content-Type": kind})
    assert answer.status_code == status, answer.text[:200]
    assert answer.json()["detail"]
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("path", ["/api/v1/nothing", "/nothing", "/api/v2/create_session"])
def test_line_10_an_unknown_route_is_a_404_in_json(served: Served, path: str) -> None:
    answer = httpx.get(served.url + path, headers={"X-API-Key": "tml-x"}, trust_env=False)
    assert answer.status_code == 404
    assert answer.json()["detail"]


def test_line_11_a_large_answer_can_be_read_by_who_accepts_gzip(raw: Raw) -> None:
    rows = [row(list(range(1, 120)))] * 8
    request = raw.model().submit_pass(rows)
    raw.result(request, "pass")
    body = {"request_id": request, "allow_metadata_only": False}
    answers = [
        raw.send("/retrieve_future", body, headers={"Accept": PROTOBUF, "Accept-Encoding": encoding})
        for encoding in ("identity", "gzip, deflate, zstd", "gzip;q=0")
    ]
    assert answers[0].content == answers[1].content == answers[2].content
    if answers[1].headers.get("content-encoding") == "gzip":
        assert int(answers[1].headers["content-length"]) == len(gzip.compress(answers[0].content))


@pytest.mark.parametrize("path", ["/healthz", "/api/v1/healthz"])
def test_line_12_health_needs_no_key(guarded: Served, path: str) -> None:
    answer = httpx.get(guarded.url + path, trust_env=False)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_line_13_what_is_listed_can_be_trained(raw: Raw) -> None:
    models = raw.get("/get_server_capabilities")["supported_models"]
    assert models
    for listed in models:
        assert listed["trainable"]
        assert raw.model(base_model=listed["model_name"], lora={"rank": 2}).id
