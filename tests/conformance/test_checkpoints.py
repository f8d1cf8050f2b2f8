"""Lines 92 to 100 and 102 to 108: checkpoints."""

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx
import numpy as np
import pytest
import server_sdk as sdk
from server_raw import Failed, Raw, RawModel, row
from server_reference import Reference, export, fetch
from serving import Served, ledger
from tinker.types import ParsedCheckpointTinkerPath

TOKENS, OTHER = list(range(5, 25)), [200, 100, 50, 25]


@pytest.fixture
def trained(raw: Raw) -> RawModel:
    model = raw.model(lora={"rank": 4})
    model.train(TOKENS, steps=2)
    return model


def place(path: str) -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"/training_runs/{run}/checkpoints/{kind}/{name}"


def test_lines_92_93_what_is_saved_has_a_path_that_the_sdk_reads(trained: RawModel) -> None:
    for kind, path in (("weights", trained.save("a-1.x")), ("sampler_weights", trained.save_sampler("a-1.x"))):
        assert path == f"tinker://{trained.id}/{kind}/a-1.x"
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
        assert parsed.training_run_id == trained.id
    sampler = trained.freeze(0)
    assert sampler.id
    assert len(sampler.greedy([1, 2, 3], 3)) == 3


@pytest.mark.full
def test_line_94_training_goes_on_from_a_checkpoint_as_if_never_interrupted(
    served: Served, tiny: Path, tmp_path: Path
) -> None:
    adam = sdk.tinker.AdamParams(learning_rate=1e-2)

    def go(training: sdk.tinker.TrainingClient, steps: int) -> None:
        for _ in range(steps):
            training.forward_backward([sdk.row(TOKENS)], "cross_entropy").result(60)
            training.optim_step(adam).result(60)

    with sdk.opened(served.url) as client:
        training = sdk.trainer(client, str(tiny), rank=4)
        go(training, 2)
        path = training.save_state("middle").result(60).path
        go(training, 2)
        resumed = client.create_training_client_from_state_with_optimizer(path).result(60)
        go(resumed, 2)
        assert sdk.logprobs(resumed, OTHER) == sdk.logprobs(training, OTHER)
        raw = Raw(served.url)
        files = []
        for at, each in enumerate((training, resumed)):
            saved = each.save_weights_external("out").result(60).path
            files.append(fetch(raw, saved, tmp_path / str(at)) / "adapter_model.safetensors")
    assert files[0].read_bytes() == files[1].read_bytes()


def test_line_95_without_the_optimizer_weights_are_equal_and_moments_fresh(raw: Raw, trained: RawModel) -> None:
    path = trained.save("a")
    fresh, whole = raw.load(path, optimizer=False), raw.load(path, optimizer=True)
    before = trained.logprobs(OTHER)
    assert np.array_equal(fresh.logprobs(OTHER), before)
    assert np.array_equal(whole.logprobs(OTHER), before)
    for model in (fresh, whole):
        model.step(learning_rate=1e-2)  # without gradients: only old moments can move weights
    assert np.array_equal(fresh.logprobs(OTHER), before)
    assert not np.array_equal(whole.logprobs(OTHER), before)


def test_line_96_a_model_begins_from_a_checkpoint_under_its_sessions_number(raw: Raw, trained: RawModel) -> None:
    path = trained.save("a")
    session = raw.session()
    body = {"session_id": session, "model_seq_id": 3, "path": path, "optimizer": True, "type": "load_weights"}
    requests = {raw.post("/load_weights", body)["request_id"] for _ in range(2)}
    assert len(requests) == 1
    found = raw.result(requests.pop())
    assert found.get("model_id", f"{session}:train:3") == f"{session}:train:3"
    model = RawModel(raw, f"{session}:train:3")
    assert np.array_equal(model.logprobs(OTHER), trained.logprobs(OTHER))
    assert model.last == 1
    assert raw.post("/get_info", {"model_id": model.id})["lora_rank"] == 4


def test_line_97_the_older_way_to_load_works_too(raw: Raw, trained: RawModel) -> None:
    path = trained.save("a")
    info = raw.post("/weights_info", {"tinker_path": path})
    model = raw.model(base_model=info["base_model"], lora={"rank": info["lora_rank"]})
    raw.result(model.submit("load_weights", path=path, optimizer=True))
    assert model.last == 1
    assert np.array_equal(model.logprobs(OTHER), trained.logprobs(OTHER))


@pytest.mark.full
def test_a_checkpoint_of_another_shape_is_refused(raw: Raw, trained: RawModel) -> None:
    model = raw.model(lora={"rank": 8})
    with pytest.raises(Failed, match="rank") as failed:
        raw.result(model.submit("load_weights", path=trained.save("a"), optimizer=False))
    assert failed.value.category == "user"
    assert model.forward([row(TOKENS)])


@pytest.mark.full
def test_line_98_a_sampler_from_a_path_has_the_numbers_of_the_time_of_saving(raw: Raw, trained: RawModel) -> None:
    path = trained.save_sampler("a")
    then = trained.logprobs(TOKENS)
    trained.train(OTHER, steps=2)
    np.testing.assert_allclose(raw.sampler(model_path=path).scores(TOKENS)[1:], then, atol=1e-4)


def test_the_sdk_samples_from_a_checkpoint_for_training(served: Served, trained: RawModel) -> None:
    paths = [trained.save("a"), trained.save_sampler("a")]
    assert "/weights/" in paths[0]
    with sdk.opened(served.url) as client:
        samplers = [client.create_sampling_client(model_path=path).result(60) for path in paths]
        scores = [sampler.compute_logprobs(sdk.prompt(TOKENS)).result(60)[1:] for sampler in samplers]
    assert scores[0] == scores[1]
    np.testing.assert_allclose(scores[0], trained.logprobs(TOKENS), atol=1e-4)


@pytest.mark.full
def test_line_99_a_name_is_taken_unless_it_may_be_replaced(raw: Raw, trained: RawModel) -> None:
    path = trained.save("a")
    first = trained.logprobs(OTHER)
    trained.train(TOKENS)
    body = {"model_id": trained.id, "seq_id": trained.next(), "path": "a"}
    assert f"{path} already exists" in raw.refusal("/save_weights", body)
    assert np.array_equal(raw.load(path).logprobs(OTHER), first)
    assert trained.save("a", overwrite=True) == path
    assert np.array_equal(raw.load(path).logprobs(OTHER), trained.logprobs(OTHER))


NAMES = ["a/b", "..", ".", "../x", "/etc/x", "a\x00b", "", "x" * 129, "a\\b", "%2e%2e", "a b", "ü", "~", "a\n"]


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler", "save_weights_external"])
def test_line_100_a_name_can_never_become_a_path(counting: Served, counted: Raw, kind: str, name: str) -> None:
    model = counted.model()
    around = {path for path in counting.data.parent.rglob("*") if not path.is_relative_to(counting.data)}
    body = {"model_id": model.id, "seq_id": model.next(), "path": name, "type": kind}
    assert "a checkpoint name must be" in counted.refusal(f"/{kind}", body)
    assert {path for path in counting.data.parent.rglob("*") if not path.is_relative_to(counting.data)} == around
    assert counted.get(f"/training_runs/{model.id}/checkpoints")["checkpoints"] == []
    assert model.forward_backward([row([1, 2])]), "the number is used up and the model goes on"


HOSTILE = ["..%2f..%2fetc", "%2e%2e", "..", "a%00", "%252e%252e%252f", "....//"]


@pytest.mark.parametrize("name", HOSTILE)
def test_line_100_names_in_addresses_lead_nowhere(counted: Raw, name: str) -> None:
    for method, end in (("DELETE", ""), ("POST", "/publish"), ("GET", "/external_weights_urls"), ("GET", "/archive")):
        address = httpx.URL(counted.url)
        with closing(HTTPConnection(address.host, address.port, timeout=60)) as connection:  # leaves dots as they are
            connection.request(
                method, f"/api/v1/training_runs/x/checkpoints/weights/{name}{end}", headers={"X-API-Key": "tml-x"}
            )
            answer = connection.getresponse()
            assert answer.status == 404, (method, end, answer.status)
            assert json.loads(answer.read())["detail"]


def unloadable(raw: Raw, path: str) -> None:
    """Demand that nothing can be made from a checkpoint: no model, no sampler, and nobody is told of it."""
    load = {"session_id": raw.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    assert path in raw.refusal("/load_weights", load)
    sampler = {"session_id": load["session_id"], "sampling_session_seq_id": 0, "model_path": path}
    assert raw.send("/create_sampling_session", sampler).status_code == 404
    assert raw.send("/weights_info", {"tinker_path": path}).status_code == 404


def test_line_102_what_is_deleted_is_gone_from_lists_and_loading(raw: Raw, trained: RawModel) -> None:
    path, kept = trained.save("a"), trained.save("b")
    assert raw.send(place(path), method="DELETE").is_success
    assert raw.send(place(path), method="DELETE").status_code == 404
    listed = raw.get(f"/training_runs/{trained.id}/checkpoints")["checkpoints"]
    assert [checkpoint["tinker_path"] for checkpoint in listed] == [kept]
    unloadable(raw, path)
    assert trained.save("a") == path, "its name is free again"


def test_line_103_a_checkpoint_lives_as_long_as_was_asked(raw: Raw, trained: RawModel) -> None:
    path = trained.save("a", ttl_seconds=7200)

    def expires() -> str | None:
        (found,) = raw.get(f"/training_runs/{trained.id}/checkpoints")["checkpoints"]
        said: str | None = found.get("expires_at")
        return said

    from datetime import datetime

    left = datetime.fromisoformat(str(expires()).replace("Z", "+00:00")).timestamp() - time.time()
    assert 7000 < left <= 7200
    assert raw.send(f"{place(path)}/ttl", {"ttl_seconds": None}, "PUT").is_success
    assert expires() is None
    for seconds in (3599, 0, -1, 10**10):
        assert raw.send(f"{place(path)}/ttl", {"ttl_seconds": seconds}, "PUT").status_code == 400, seconds
    assert raw.send(f"{place(path)}/ttl", {"ttl_seconds": 3600}, "PUT").is_success
    assert expires() is not None


def test_line_103_a_checkpoint_whose_time_is_over_is_gone(served: Served, raw: Raw, trained: RawModel) -> None:
    path, kept = trained.save("a", ttl_seconds=7200), trained.save("b", ttl_seconds=7200)
    assert raw.load(path).forward([row(TOKENS)])
    with closing(sqlite3.connect(served.data / "twinkle.db", timeout=30)) as database, database:
        (run, _, name) = path.removeprefix("tinker://").split("/")
        changed = database.execute(
            "UPDATE checkpoints SET expires = ? WHERE run = ? AND name = ?", (time.time() - 1, run, name)
        )
        assert changed.rowcount == 1
    listed = raw.get(f"/training_runs/{trained.id}/checkpoints")["checkpoints"]
    assert [checkpoint["tinker_path"] for checkpoint in listed] == [kept]
    unloadable(raw, path)
    assert raw.send(f"{place(path)}/ttl", {"ttl_seconds": None}, "PUT").status_code == 404, "it does not come back"
    assert trained.save("a") == path, "its name is free again"


@pytest.mark.full
def test_line_104_lists_come_in_pages_of_a_stable_order(counted: Raw) -> None:
    model = counted.model()
    saved = [model.save(f"c{at}") for at in range(7)]
    pages = [counted.get("/checkpoints", limit=3, offset=offset) for offset in (0, 3, 6)]
    whole = counted.get("/checkpoints", limit=100, offset=0)
    found = [checkpoint["tinker_path"] for page in pages for checkpoint in page["checkpoints"]]
    assert found == [checkpoint["tinker_path"] for checkpoint in whole["checkpoints"]][: len(found)]
    assert set(saved) <= {checkpoint["tinker_path"] for checkpoint in whole["checkpoints"]}
    assert pages[0]["cursor"]["total_count"] == len(whole["checkpoints"])
    assert pages[1]["cursor"]["offset"] == 3
    session = counted.session()
    runs = [counted.model(session, at).id for at in range(5)]
    pages = [counted.get("/training_runs", limit=2, offset=offset, access_scope="owned") for offset in range(0, 6, 2)]
    listed = [run["training_run_id"] for page in pages for run in page["training_runs"]]
    assert len(set(listed)) == len(listed)
    everything = counted.get("/training_runs", limit=1000, offset=0)
    assert set(runs) <= {run["training_run_id"] for run in everything["training_runs"]}
    assert everything["cursor"]["total_count"] == len(everything["training_runs"])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Raw, Raw]]:
    """Two tenants of one service."""
    service = ledger(tmp_path_factory.mktemp("two") / "data", {"auth": True}).start()
    with Raw(service.url, service.key) as one, Raw(service.url, service.new_key("other")) as other:
        yield one, other
    service.stop()


@pytest.mark.full
def test_line_105_another_key_reads_a_checkpoint_only_while_it_is_public(two: tuple[Raw, Raw]) -> None:
    mine, theirs = two
    model = mine.model()
    path = model.save("a")

    unloadable(theirs, path)
    assert mine.send(f"{place(path)}/publish").is_success
    (listed,) = mine.get(f"/training_runs/{model.id}/checkpoints")["checkpoints"]
    assert listed["public"]
    assert theirs.post("/weights_info", {"tinker_path": path})["lora_rank"] == 8
    assert theirs.load(path).forward([row([1, 2])])
    assert theirs.send(place(path), method="DELETE").status_code == 404
    assert theirs.send(f"{place(path)}/publish", method="DELETE").status_code == 404
    assert mine.send(f"{place(path)}/publish", method="DELETE").is_success
    unloadable(theirs, path)


@pytest.mark.full
def test_foreign_is_what_unknown_is_on_every_route(two: tuple[Raw, Raw]) -> None:
    mine, theirs = two
    session = mine.session()
    model = mine.model(session)
    path, sampler = model.save("a"), mine.sampler(session, 0)

    def asked(model_id: str, session_id: str, sampler_id: str, saved: str) -> list[tuple[int, str]]:
        sends = [
            ("POST", "/get_info", {"model_id": model_id}),
            ("POST", "/optim_step", {"model_id": model_id, "seq_id": 99, "adam_params": {}}),
            ("POST", "/save_weights", {"model_id": model_id, "seq_id": 98, "path": "x"}),
            ("POST", "/load_weights", {"model_id": model_id, "seq_id": 97, "path": saved, "optimizer": False}),
            ("POST", "/session_heartbeat", {"session_id": session_id}),
            ("POST", f"/sessions/{session_id}/finish", {"reason": {"type": "success"}}),
            ("POST", "/create_model", theirs.create_body(session_id, 5, base_model="ledger/model")),
            ("POST", "/create_sampling_session", {"session_id": session_id, "sampling_session_seq_id": 7,
                                                  "base_model": "ledger/model"}),
            ("POST", "/weights_info", {"tinker_path": saved}),
            ("POST", "/copy_weights", {"source_path": saved}),
            ("GET", f"/training_runs/{model_id}", None), ("GET", f"/training_runs/{model_id}/checkpoints", None),
            ("GET", f"/sessions/{session_id}", None), ("GET", f"/samplers/{sampler_id}", None),
            ("DELETE", place(saved), None), ("POST", f"{place(saved)}/publish", None),
            ("PUT", f"{place(saved)}/ttl", {"ttl_seconds": 7200}),
            ("GET", f"{place(saved)}/external_weights_urls", None), ("GET", f"{place(saved)}/archive", None),
        ]  # fmt: skip
        answers = [theirs.send(path, body, method) for method, path, body in sends]
        body = RawModel(theirs, model_id)
        from server_raw import pass_body

        answers.append(theirs.send("/forward_backward", pass_body(body.id, 96, [row([1, 2])])))
        sample = {**sampler.body([1, 2]), "sampling_session_id": sampler_id}
        answers.append(theirs.send("/asample", sample))
        hidden = (model_id, session_id, sampler_id, saved)
        return [(answer.status_code, without(answer.text, hidden)) for answer in answers]

    def without(text: str, hidden: tuple[str, ...]) -> str:
        for name in sorted(hidden, key=len, reverse=True):
            text = text.replace(json.dumps(name)[1:-1], "?")
        return text

    nobody = "0" * len(session)
    foreign = asked(model.id, session, sampler.id, path)
    unknown = asked(f"{nobody}:train:0", nobody, f"{nobody}:sample:0", f"tinker://{nobody}:train:0/weights/a")
    assert foreign == unknown
    assert all(status in (404, 410) for status, _ in foreign), foreign
    assert mine.result(model.submit("optim_step", adam_params={})) is not None
    assert mine.send("/session_heartbeat", {"session_id": session}).status_code == 200


def test_line_106_weights_info_says_how_the_adapter_was_made(raw: Raw) -> None:
    model = raw.model(lora={"rank": 2, "train_mlp": False})
    for path in (model.save("a"), model.save_sampler("a")):
        found = raw.post("/weights_info", {"tinker_path": path})
        assert found["base_model"] == raw.base_model()
        assert (found["is_lora"], found["lora_rank"]) == (True, 2)
        assert (found["train_attn"], found["train_mlp"], found["train_unembed"]) == (True, False, True)


@pytest.mark.full
def test_line_107_external_files_are_peft_files_with_the_models_numbers(
    trained: RawModel, tiny: Path, tmp_path: Path
) -> None:
    files = export(trained, "out", tmp_path)
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in files.iterdir()}
    np.testing.assert_allclose(trained.logprobs(TOKENS), Reference(tiny, files).scores(TOKENS).numpy(), atol=5e-5)


@pytest.mark.full
def test_line_107_a_link_is_for_its_file_only_and_cannot_be_forged(raw: Raw, trained: RawModel) -> None:
    path = trained.save_external("out")
    urls = raw.get(f"{place(path)}/external_weights_urls")["urls"]
    url = str(httpx.URL(raw.url).join(urls["adapter_config.json"]))
    assert httpx.get(url, trust_env=False).status_code == 200
    forged = [url.replace("adapter_config.json", name) for name in ("../manifest.json", "manifest.json", "x")]
    for at in range(40, len(url), 7):
        if url[at].isalnum():
            forged.append(url[:at] + ("A" if url[at] != "A" else "B") + url[at + 1 :])
    for each in forged:
        if each != url:
            assert httpx.get(each, trust_env=False).status_code == 404, each


def test_line_108_a_run_keeps_the_metadata_it_was_given(raw: Raw) -> None:
    model = raw.model(user_metadata={"renderer_name": "role_colon"})
    model.save("a", user_metadata={"step": "1"})
    found = raw.get(f"/training_runs/{model.id}")
    assert found["user_metadata"] == {"renderer_name": "role_colon"}
    assert (found["training_run_id"], found["base_model"]) == (model.id, raw.base_model())
    (checkpoint,) = raw.get(f"/training_runs/{model.id}/checkpoints")["checkpoints"]
    assert checkpoint["user_metadata"] == {"step": "1"}
    assert found["last_checkpoint"]["tinker_path"] == checkpoint["tinker_path"]
