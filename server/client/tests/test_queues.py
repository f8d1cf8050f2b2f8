"""The queue of a model: whatever is lost, each call is carried out once, in order, and no number is left out."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from twinkle_client import errors, wire
from twinkle_client.http import Connection
from twinkle_client.queues import AdapterQueue, WaitLog

Fault = Callable[[str, int], str]
"""Returns what happens to a request, from its method and its place among all: "", "before", "after" or "stop"."""


class Service:
    """A service with one queue, over a network that breaks as told.

    Attributes:
        log: what each number was used for: a method, or "skip".
        requests: methods, in the order of arrival.
    """

    def __init__(self, fault: Fault = lambda method, place: "", slow: bool = False) -> None:
        self.fault, self.slow = fault, slow
        self.log: dict[int, tuple[str, bytes]] = {}
        self.requests: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        method = request.url.path.rpartition("/")[2] if request.method == "POST" else "future"
        self.requests.append(method)
        fault = self.fault(method, len(self.requests))
        if fault == "before":
            raise httpx.ConnectError("refused")
        answer = self.answer(method, request)
        if fault == "after":
            raise httpx.ReadError("reset")
        if fault == "stop":
            raise KeyboardInterrupt
        return answer

    def answer(self, method: str, request: httpx.Request) -> httpx.Response:
        if method == "future":
            return self.result(int(request.url.path.rpartition("/")[2]))
        number, call = int(request.url.params["seq_id"]), (method, request.content)
        if self.log.setdefault(number, call) != call:
            return httpx.Response(409, json={"detail": f"number {number} was used by another request"})
        if method == "refused":
            del self.log[number]
            return httpx.Response(413, json={"detail": "the body is too large"})
        return (
            httpx.Response(202, json={}, headers={"x-twinkle-request": str(number)})
            if self.slow
            else self.result(number)
        )

    def result(self, number: int) -> httpx.Response:
        body = wire.pack({"value": number})
        return httpx.Response(200, content=body, headers={"content-type": wire.CONTENT_TYPE})

    def done(self) -> list[str]:
        """Return the methods that are carried out, in order: those before the first number that is missing."""
        assert sorted(self.log) == list(range(1, len(self.log) + 1)), "a number is missing: later calls wait for it"
        return [self.log[number][0] for number in sorted(self.log) if self.log[number][0] != "skip"]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle_client.http.time.sleep", lambda seconds: None)


def queue_of(service: Service, **options: float) -> tuple[AdapterQueue, Connection]:
    transport = httpx.MockTransport(service)
    connection = Connection("http://service:1", "k", transport=transport, async_transport=transport, **options)
    return AdapterQueue(connection, "/models/m"), connection


def first(method: str, fault: str) -> Fault:
    """Return a fault of the first request of a method."""
    left = [fault]
    return lambda found, place: left.pop() if found == method and left else ""


def train(queue: AdapterQueue, connection: Connection, method: str = "train") -> int:
    value: int = connection.run(queue.call(method, {"rows": [1, 2]}))
    return value


@pytest.mark.parametrize("fault", ["before", "after"])
@pytest.mark.parametrize("where", ["train", "future"])
@pytest.mark.parametrize("slow", [False, True])
def test_a_call_that_failed_and_is_made_again_is_carried_out_once(fault: str, where: str, slow: bool) -> None:
    service = Service(first(where, fault), slow)
    queue, connection = queue_of(service, retry_seconds=0.0)
    if where == "train" or slow:
        with pytest.raises(errors.ConnectionFailed):
            train(queue, connection)
    assert train(queue, connection) == 1
    assert train(queue, connection) == 2, "another call of the same kind is another call"
    assert service.done() == ["train", "train"]


@pytest.mark.parametrize("where", ["train", "future"])
@pytest.mark.parametrize("again", ["train", "step"])
def test_an_interrupted_call_leaves_no_number_out_and_is_not_carried_out_twice(where: str, again: str) -> None:
    service = Service(first(where, "stop"), slow=True)
    queue, connection = queue_of(service)
    with pytest.raises(KeyboardInterrupt):
        train(queue, connection)
    train(queue, connection, again)
    train(queue, connection, "save")
    assert service.done() == (["train", "save"] if again == "train" else ["train", "step", "save"])


def test_an_interrupted_call_that_never_arrived_is_given_up() -> None:
    async def stuck(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/train"):
            await asyncio.sleep(60.0)
        return service(request)

    service = Service()
    connection = Connection("http://service:1", "k", async_transport=httpx.MockTransport(stuck))
    queue = AdapterQueue(connection, "/models/m")

    async def work() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.run_async(queue.call("train", {})), 0.05)
        assert await connection.run_async(queue.call("step", {})) == 2
        await connection.close_async()

    asyncio.run(work())
    assert service.log.keys() == {1, 2}
    assert service.done() == ["step"]


def test_a_number_that_could_not_be_given_up_is_given_up_before_the_next_call() -> None:
    down = [True]
    service = Service(lambda method, place: "before" if down[0] else "")
    queue, connection = queue_of(service, retry_seconds=0.0)
    for method in ("train", "step"):
        with pytest.raises(errors.ConnectionFailed):
            train(queue, connection, method)
    down[0] = False
    assert train(queue, connection, "step") == 2
    assert service.done() == ["step"]


@pytest.mark.parametrize("skip", ["", "before"])
def test_a_refused_call_uses_up_its_number(skip: str) -> None:
    service = Service(first("skip", skip))
    queue, connection = queue_of(service, retry_seconds=0.0)
    with pytest.raises(errors.RequestRefused, match="too large"):
        train(queue, connection, "refused")
    assert train(queue, connection) == 2
    assert service.done() == ["train"]


def test_the_log_shows_each_change_of_what_a_call_waits_for_once(caplog: pytest.LogCaptureFixture) -> None:
    log = WaitLog("sample")
    caplog.set_level("INFO", "twinkle")
    for state in ({}, {"done": 0, "total": 8}, {"done": 0, "total": 8}, {"done": 3, "total": 8, "reason": "busy"}):
        log.add({"status": "pending", "queue_state": "active", **state})
    assert [record.getMessage() for record in caplog.records] == [
        "sample waits (0 of 8 prompts are complete)",
        "sample waits (3 of 8 prompts are complete; active: busy)",
    ]
