"""Lines 14 to 20: sessions and telemetry."""

import time
from collections.abc import Iterator

import pytest
import server_sdk as sdk
import tinker
from server_raw import Raw, row
from serving import Served, ledger


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service whose sessions end after two seconds without a heartbeat."""
    service = ledger(tmp_path_factory.mktemp("hasty") / "data", {"times": {"session": 2.0, "poll": 2.0}}).start()
    yield service
    service.stop()


def beat(raw: Raw, session: str) -> int:
    return raw.send("/session_heartbeat", {"session_id": session, "type": "session_heartbeat"}).status_code


def silent(raw: Raw, kept: str, left: str) -> int:
    """Keep one session alive, and ask for the other's after times longer than the service waits."""
    for _ in range(8):
        for _ in range(6):
            time.sleep(0.5)
            assert beat(raw, kept) == 200
        if (status := beat(raw, left)) != 200:
            return status
    return 200


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


def test_lines_16_115_a_session_without_heartbeat_ends_and_its_checkpoints_stay(hasty: Served) -> None:
    with Raw(hasty.url) as raw:
        kept, left = raw.session(), raw.session()
        model = raw.model(left)
        model.forward_backward([row([1, 2, 3])])
        path = model.save("mine")
        sampler = raw.sampler(left, model_path=model.save_sampler("sampled"))
        assert silent(raw, kept, left) == 410
        late = raw.send("/optim_step", {"model_id": model.id, "seq_id": model.last + 1, "adam_params": {}})
        assert late.status_code in (200, 400, 404, 410)
        if late.status_code == 200:  # a run may be taken up again, and then nothing of it is missing
            assert raw.result(late.json()["request_id"])["metrics"]["grad_norm:mean"] == 1
        assert raw.send("/asample", sampler.body([1, 2])).status_code in (400, 404, 410)
        assert raw.load(path, kept).forward([row([1, 2, 3])])
        assert raw.http.get("/get_server_capabilities").status_code == 200


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
