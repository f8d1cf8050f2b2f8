"""Lines 14 to 20: sessions and telemetry."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from subprocess import PIPE

import httpx
import pytest
import server_sdk as sdk
import tinker
from server_raw import Raw, RawModel, row
from serving import Served, ledger

LEFT = 'twinkle_swaps_total{direction="out"}'


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service whose sessions end after eight seconds without a heartbeat."""
    service = ledger(tmp_path_factory.mktemp("hasty") / "data", {"times": {"session": 8.0, "poll": 2.0}}).start()
    yield service
    service.stop()


def beat(raw: Raw, session: str) -> int:
    return raw.send("/session_heartbeat", {"session_id": session, "type": "session_heartbeat"}).status_code


def until_freed(raw: Raw, kept: str, swaps: float) -> None:
    """Keep one session alive until no model is in the engine, and more have left it than so many."""
    for _ in range(120):
        assert beat(raw, kept) == 200
        models, left = raw.status()["models"], raw.figures().get(LEFT, 0.0)
        if left > swaps and "live" not in models:
            return
        time.sleep(0.5)
    raise AssertionError(f"{left - swaps} models have left, and there are {models}")


@pytest.mark.full
def test_line_14_every_session_has_an_id_of_its_own(counted: Raw) -> None:
    found = {counted.session() for _ in range(20)}
    assert len(found) == 20
    assert all(found)
    assert not any("/" in session for session in found)


def test_line_15_a_heartbeat_knows_the_living_from_the_dead(counted: Raw) -> None:
    session = counted.session()
    assert beat(counted, session) == 200
    assert beat(counted, "no-such-session") == 410
    counted.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
    assert beat(counted, session) == 410


@pytest.mark.full
def test_line_16_a_session_without_heartbeat_ends_and_its_checkpoints_stay(hasty: Served) -> None:
    with Raw(hasty.url) as raw:
        swaps = raw.figures().get(LEFT, 0.0)
        kept, left = raw.session(), raw.session()
        model = raw.model(left)
        model.forward_backward([row([1, 2, 3])])
        path = model.save("mine")
        sampler = raw.sampler(left, model_path=model.save_sampler("sampled"))
        until_freed(raw, kept, swaps)
        assert beat(raw, left) == 410
        assert raw.send("/create_model", raw.create_body(left, 1)).status_code == 410
        assert raw.send("/asample", sampler.body([1, 2])).status_code == 410
        assert raw.load(path, kept).forward([row([1, 2, 3])])
        # A run is taken up again by asking for more, and nothing of it is missing: the gradient waits for its step.
        assert raw.result(model.submit("optim_step", adam_params={}))["metrics"]["grad_norm"] == 1


CLIENT = """
import sys, time, tinker
client = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-x")
training = client.create_lora_training_client(base_model="ledger/model", rank=4).result()
datum = tinker.Datum(
    model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3], "weights": [1.0, 1.0]}
)
training.forward_backward([datum], "cross_entropy").result()
print("model", training.model_id, flush=True)
time.sleep(600)
"""


@pytest.mark.full
def test_line_115_a_client_that_is_killed_between_a_pass_and_its_step_leaves_a_healthy_service(hasty: Served) -> None:
    with Raw(hasty.url) as raw:
        swaps = raw.figures().get(LEFT, 0.0)
        model = RawModel(raw, killed_client(hasty.url), 1)
        kept = raw.session()
        until_freed(raw, kept, swaps)
        assert beat(raw, model.session) == 410
        assert (raw.status()["open_futures"], raw.status()["in_engine"]) == (0, 0)
        assert httpx.get(f"{hasty.url}/readyz", trust_env=False).status_code == 200
        assert raw.model(kept).forward_backward([row([1, 2, 3])])
        assert model.step()["metrics"]["grad_norm"] == 1, "another client goes on where it was killed"


def killed_client(url: str) -> str:
    """Let the SDK, in a process of its own, do a pass; kill it, and return its model's id."""
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    with subprocess.Popen([sys.executable, "-c", CLIENT, url], env=environment, stdout=PIPE, text=True) as process:
        assert process.stdout
        watch = threading.Timer(60, process.kill)
        watch.start()
        said = process.stdout.readline().split()
        watch.cancel()
        process.kill()
    assert said[:1] == ["model"], "the client did not get so far"
    return said[1]


@pytest.mark.parametrize("reason", ["success", "errored", "interrupted"])
def test_line_17_finishing_twice_is_as_good_as_once(counted: Raw, reason: str) -> None:
    session = counted.session()
    for _ in range(2):
        answer = counted.send(f"/sessions/{session}/finish", {"reason": {"type": reason}, "detail": None})
        assert answer.is_success, answer.text


def test_line_18_the_sdk_closes_without_complaint(counting: Served) -> None:
    with sdk.opened(counting.url) as client:
        assert client.create_sampling_client(base_model="ledger/model").result(30)
    client = sdk.tinker.ServiceClient(base_url=counting.url, api_key="tml-x")
    with client, pytest.raises(Exception, match="nothing-like-that"):
        client.create_sampling_client(base_model="nothing-like-that").result(30)
    client.close("interrupted").result(30)


def test_line_19_telemetry_is_taken_and_its_secrets_are_not_kept(counting: Served, counted: Raw) -> None:
    canary = "tml-canary-5b1f0d52c6c94f30"
    event = {"event": "GENERIC_EVENT", "event_name": "x", "event_data": {"X-API-Key": canary, "error": canary}}
    body = {"events": [event], "platform": "x", "sdk_version": "0.38.0", "session_id": "sessionless-1"}
    assert counted.post("/telemetry", body) == {"status": "accepted"}
    assert canary not in counting.log()
    for path in counting.data.rglob("*"):
        if path.is_file():
            assert canary.encode() not in path.read_bytes(), path.name


def test_line_20_sessions_are_listed_with_what_they_hold(counting: Served, counted: Raw) -> None:
    session = counted.session(user_metadata={"purpose": "listing"}, display_name="Listed")
    model = counted.model(session)
    sampler = counted.sampler(session, base_model="ledger/model")
    assert session in counted.get("/sessions", limit=100, offset=0)["sessions"]
    found = counted.get(f"/sessions/{session}")
    assert (found["training_run_ids"], found["sampler_ids"]) == ([model.id], [sampler.id])
    assert found["user_metadata"] == {"purpose": "listing"}
    assert counted.http.get("/sessions/no-such-session").status_code == 404
    rest = tinker.RestClient(base_url=counting.url, api_key="tml-x")
    assert rest.get_session(session).result(30).training_run_ids == [model.id]
