"""Quotas of a key hold in a running service, and cost nothing that was accepted."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from server_history import read_ledger
from server_raw import Failed, Raw, RawModel, pass_body, row
from serving import Served, ledger

from twinkle_server.cli.server import main as server

SECONDS = 60.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with keys that looks after its checkpoints all the time."""
    times = {"poll": 2.0, "upkeep": 0.2}
    made = ledger(tmp_path_factory.mktemp("quotas") / "data", {"auth": True, "times": times})
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def tenant(service: Served, request: pytest.FixtureRequest) -> Iterator[Callable[..., Raw]]:
    """Makes a tenant of the test's own, with quotas as options of the command, and connects."""
    opened: list[Raw] = []

    def make(*quotas: str) -> Raw:
        words = ["keys", "create", request.node.name, "--data", str(service.data), *quotas]
        opened.append(Raw(service.url, CliRunner().invoke(server, words).output.strip()))
        return opened[-1]

    yield make
    for raw in opened:
        raw.http.close()


def send(model: RawModel, number: int, tokens: int = 1) -> httpx.Response:
    """Ask for a pass over a row of so many tokens, and return whatever is answered."""
    return model.raw.send("/forward_backward", pass_body(model.id, number, [row([5] * (tokens + 1))]))


@pytest.mark.full
def test_tokens_that_come_too_fast_come_again_under_their_number(tenant: Callable[..., Raw]) -> None:
    model = tenant("--tokens-per-second", "20").model()
    first, second = send(model, 1, 190), send(model, 2, 120)  # what ten seconds bring may come at once
    assert (first.status_code, second.status_code) == (200, 200), "a debt is made before it is felt"
    refused = send(model, 3, 10)
    assert refused.status_code == 429
    assert "20 tokens per second" in refused.json()["detail"]
    assert 1 <= int(refused.headers["retry-after"]) <= 6
    for answer in (first, second):
        assert model.raw.result(answer.json()["request_id"], "pass"), "what was accepted is done all the same"
    end = time.monotonic() + SECONDS
    while (answer := send(model, 3, 10)).status_code == 429 and time.monotonic() < end:
        time.sleep(int(answer.headers["retry-after"]))
    assert answer.status_code == 200
    assert model.raw.result(answer.json()["request_id"], "pass")


@pytest.mark.full
def test_no_more_operations_wait_than_a_key_may_have(tenant: Callable[..., Raw]) -> None:
    model = tenant("--operations", "2").model()
    waiting = [send(model, number) for number in (2, 3)]
    assert [answer.status_code for answer in waiting] == [200, 200]
    refused = send(model, 4)
    assert refused.status_code == 429
    assert "limit of this key: 2" in refused.json()["detail"]
    again = send(model, 3)
    assert (again.status_code, again.json()) == (200, waiting[1].json()), "one that came before takes no room"
    awaited = send(model, 1)
    assert awaited.status_code == 200, "the others wait for it"
    for answer in (awaited, *waiting):
        model.raw.result(answer.json()["request_id"], "pass")
    last = send(model, 4)
    assert last.status_code == 200
    model.raw.result(last.json()["request_id"], "pass")
    model.last = 4
    assert len(read_ledger(model.forward([row([1, 2])]))[0]) == 4


def test_the_newest_checkpoints_stay(tenant: Callable[..., Raw], service: Served) -> None:
    raw = tenant("--keep", "2")
    model, other = raw.model(), raw.model()

    def names(of: RawModel) -> list[str]:
        listed = raw.get(f"/training_runs/{of.id}/checkpoints")["checkpoints"]
        return sorted(entry["checkpoint_id"] for entry in listed)

    saved = [model.save(name) for name in ("a", "b", "c")]
    model.save_sampler("a")
    other.save("a")
    wait(lambda: names(model) == ["sampler_weights/a", "weights/b", "weights/c"])
    assert names(other) == ["weights/a"]
    with pytest.raises(Failed, match=r"checkpoint tinker:.* does not exist"):
        raw.load(saved[0])
    assert raw.load(saved[2]).id
    model.save("d")
    wait(lambda: names(model) == ["sampler_weights/a", "weights/c", "weights/d"])


def test_without_quotas_everything_stays(tenant: Callable[..., Raw]) -> None:
    raw = tenant()
    model = raw.model()
    saved: list[Any] = [model.save(name) for name in "abcd"]
    time.sleep(1.0)  # rounds of upkeep
    listed = raw.get(f"/training_runs/{model.id}/checkpoints")["checkpoints"]
    assert {entry["tinker_path"] for entry in listed} == set(saved)


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
