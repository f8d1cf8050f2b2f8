"""Lines 61 to 69: futures."""

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest
from server_raw import PROTOBUF, Failed, Raw, row
from serving import Served, ledger


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with keys, for two tenants; a decode step takes a moment."""
    times = {"poll": 2.0, "gap_pause": 0.3, "gap_fail": 30.0}
    settings = {"auth": True, "local_metrics": True, "times": times, "extra": {"seconds_per_decode": 0.02}}
    service = ledger(tmp_path_factory.mktemp("two") / "data", settings).start()
    yield service
    service.stop()


def never_done(raw: Raw) -> str:
    """Return a future that waits for a number which nobody sends."""
    return raw.model().submit("optim_step", 2, adam_params={})


def long_sample(raw: Raw) -> str:
    """Return the future of a sample that takes at least twenty seconds: one of 1,002 decode steps."""
    model = raw.model()
    model.forward_backward([row([at, 2, 3]) for at in range(3, 1003)])
    model.step()
    promise = model.freeze(0).submit([1], params={"max_tokens": 10_000})
    return str(promise["request_id"])


@pytest.mark.full
def test_line_61_a_poll_is_held_and_then_says_try_again(two: Served) -> None:
    with Raw(two.url, two.key) as raw:
        request = never_done(raw)
        start = time.monotonic()
        answer = raw.poll(request)
        waited = time.monotonic() - start
    assert answer.status_code == 200
    assert (answer.json()["type"], answer.json()["request_id"]) == ("try_again", request)
    assert 1.0 <= waited < 40.0


@pytest.mark.full
def test_line_62_polls_that_wait_hold_nobody_up(two: Served) -> None:
    with Raw(two.url, two.key) as raw:
        request = never_done(raw)

    async def herd() -> tuple[list[int], list[float]]:
        limits, headers = httpx.Limits(max_connections=400), {"X-API-Key": two.key}
        async with httpx.AsyncClient(trust_env=False, timeout=60, limits=limits, headers=headers) as client:
            body = {"request_id": request, "allow_metadata_only": False}
            polls = [
                asyncio.create_task(client.post(f"{two.url}/api/v1/retrieve_future", json=body)) for _ in range(200)
            ]
            await asyncio.sleep(1.0)
            waited = []
            for _ in range(5):
                start = time.monotonic()
                assert (await client.get(f"{two.url}/healthz")).status_code == 200
                waited.append(time.monotonic() - start)
            return [answer.status_code for answer in await asyncio.gather(*polls)], waited

    statuses, waited = asyncio.run(herd())
    assert len(statuses) == 200
    assert set(statuses) == {200}
    assert sorted(waited)[2] < 1.0


def test_line_63_work_that_failed_is_a_200_with_error_and_category(counted: Raw) -> None:
    request = counted.model().submit_pass([row([1, 2])], "no_such_loss")
    for proto in (False, True):
        answer = counted.poll(request, proto)
        assert answer.status_code == 200
        assert answer.json()["category"] == "user"
        assert "no_such_loss" in answer.json()["error"]


def test_lines_64_66_a_result_can_be_read_again_and_is_whole(counted: Raw) -> None:
    request = counted.model().submit_pass([row([1, 2, 3])])
    counted.result(request, "pass")
    answers = [counted.poll(request, proto=True) for _ in range(3)]
    assert len({answer.content for answer in answers}) == 1
    assert all(answer.headers["content-type"].startswith(PROTOBUF) for answer in answers)
    peek = counted.send(
        "/retrieve_future", {"request_id": request, "allow_metadata_only": True}, headers={"Accept": PROTOBUF}
    )
    assert (peek.status_code, peek.content) == (200, answers[0].content), "metadata alone are never answered"


@pytest.mark.parametrize("request_id", ["x", "0" * 32, "../../etc/passwd", "7", "a" * 5000, "\x00"])
def test_line_65_a_future_that_was_never_given_is_a_404(counted: Raw, request_id: str) -> None:
    waited = []
    for _ in range(3):
        start = time.monotonic()
        answer = counted.poll(request_id)
        waited.append(time.monotonic() - start)
        assert answer.status_code == 404
        assert answer.json()["detail"]
    assert min(waited) < 1.0, "what was never given is not waited for"


@pytest.mark.full
def test_line_65_a_result_that_is_no_longer_kept_is_a_410(tmp_path_factory: pytest.TempPathFactory) -> None:
    times = {"read_result": 0.5, "kept_result": 0.5, "poll": 2.0}
    service = ledger(tmp_path_factory.mktemp("brief") / "data", {"times": times}).start()
    try:
        with Raw(service.url) as raw:
            request = raw.model().submit_pass([row([1, 2, 3])])
            raw.result(request, "pass")
            for _ in range(60):
                time.sleep(0.5)
                if (status := raw.poll(request, proto=True).status_code) != 200:
                    break
            assert status == 410
    finally:
        service.stop()


@pytest.mark.full
def test_line_67_a_future_says_why_it_waits(two: Served) -> None:
    with Raw(two.url, two.key) as raw:
        answer = raw.poll(never_done(raw)).json()
        assert (answer["type"], answer["queue_state"]) == ("try_again", "paused_capacity")
        assert answer["queue_state_reason"].startswith("number 1 of this model has not arrived")
        request = long_sample(raw)
        answer = raw.poll(request, proto=True).json()
        raw.post("/cancel_future", {"request_id": request})
    assert (answer["type"], answer["queue_state"]) == ("try_again", "active")
    assert "queue_state_reason" not in answer, "it runs, and waits for nobody"


@pytest.mark.full
def test_line_68_a_sample_that_nobody_wants_is_dropped(two: Served) -> None:
    cancelled = 'twinkle_operations_total{kind="sample",outcome="cancelled"}'
    decoding = 'twinkle_pass_seconds_sum{kind="sample"}'
    with Raw(two.url, two.key) as raw:
        before = raw.figures()
        request = long_sample(raw)
        for _ in range(200):
            if raw.figures().get(decoding, 0.0) > before.get(decoding, 0.0):
                break
            time.sleep(0.1)
        else:
            raise AssertionError("it was never decoded")
        assert raw.send("/cancel_future", {"request_id": request}).json() == {}
        answer = raw.poll(request, proto=True)
        assert answer.json() == {"error": "the request was cancelled", "category": "user"}
        assert raw.sampler().sample([1]), "the engine has heard of it now"
        figures = raw.figures()
        assert figures[cancelled] == before.get(cancelled, 0.0) + 1
        time.sleep(1.5)  # decoding would be told of every half second
        assert raw.figures()[decoding] == figures[decoding], "it is still decoded"


@pytest.mark.full
def test_line_69_nobody_reads_anothers_future(two: Served) -> None:
    with Raw(two.url, two.key) as mine, Raw(two.url, two.new_key("other")) as theirs:
        model = mine.model()
        request = model.submit_pass([row([1, 2, 3])])
        mine.result(request, "pass")
        foreign, unknown = theirs.poll(request), theirs.poll("0" * len(request))
        assert foreign.status_code == unknown.status_code == 404
        assert foreign.json()["detail"].replace(request, "") == unknown.json()["detail"].replace("0" * len(request), "")
        assert theirs.send("/cancel_future", {"request_id": request}).status_code == 404
        assert mine.result(request, "pass")


def test_a_failed_future_is_raised_by_the_plain_client_too(counted: Raw) -> None:
    with pytest.raises(Failed):
        counted.model().forward_backward([row([1, 2])], "no_such_loss")
