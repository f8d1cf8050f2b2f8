"""`/readyz` of a running service says no while no work would be done, and yes again without anybody's help."""

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_raw import Failed, Raw, RawModel, row
from serving import Served, ledger

BROKEN, FATAL, GOOD = 66, 67, 5
SECONDS = 60.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service whose passes fail with one first token, and whose engine ends with another."""
    extra = {"whole": [BROKEN], "die": [FATAL]}
    made = ledger(tmp_path_factory.mktemp("ready") / "data", {"times": {"poll": 2.0}, "extra": extra})
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def model(service: Served) -> Iterator[RawModel]:
    with Raw(service.url) as raw:
        yield raw.model()


def ready(service: Served) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(f"{service.url}/readyz", trust_env=False)
    return answer.status_code, answer.json()


def wait(service: Served, wanted: Callable[[int, dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask until the answer is as wanted, and return what it says."""
    end = time.monotonic() + SECONDS
    with httpx.Client(trust_env=False) as client:
        while time.monotonic() < end:
            answer = client.get(f"{service.url}/readyz")
            if wanted(answer.status_code, answer.json()):
                return dict(answer.json())
    raise AssertionError(f"it never came: {ready(service)}")


def fails(model: RawModel, token: int, **options: Any) -> str:
    """Do a pass that fails, and return whose fault it is said to be."""
    with pytest.raises(Failed) as failed:
        model.forward_backward([row([token, 2, 3])], **options)
    return failed.value.category


@pytest.mark.full
def test_a_pass_that_fails_whole_is_told_until_one_works(service: Served, model: RawModel) -> None:
    assert ready(service)[0] == 200
    assert fails(model, BROKEN) == "server"
    status, facts = ready(service)
    assert (status, facts["status"], facts["engine"], facts["store"]) == (503, "not ready", "up", "writable")
    assert facts["last_pass"] == "the last pass failed as a whole; the log says why"
    assert httpx.get(f"{service.url}/healthz", trust_env=False).status_code == 200
    model.forward_backward([row([GOOD, 2, 3])])
    assert ready(service) == (200, {**facts, "status": "ready", "last_pass": "no failure"})


def test_users_mistakes_change_nothing(service: Served, model: RawModel) -> None:
    for _ in range(3):
        assert fails(model, GOOD, loss="no_such_loss") == "user"
        assert ready(service)[0] == 200
    assert fails(model, BROKEN) == "server"
    assert fails(model, GOOD, loss="no_such_loss") == "user"
    assert ready(service)[0] == 503
    model.forward_backward([row([GOOD, 2, 3])])
    assert ready(service)[0] == 200


def test_an_engine_that_died_is_told_until_the_next_one_is_up(service: Served, model: RawModel) -> None:
    service.kill_engine()
    facts = wait(service, lambda status, _: status == 503)
    assert facts["engine"] == "starting"
    assert "SIGKILL" in facts["last_pass"]
    facts = wait(service, lambda status, _: status == 200)
    assert (facts["engine"], facts["last_pass"]) == ("up", "no failure")
    bad = model.submit_pass([row([FATAL, 2, 3])])
    wait(service, lambda status, _: status == 503)
    with pytest.raises(Failed, match="the engine died, twice"):
        model.raw.result(bad, "pass", polls=30)
    wait(service, lambda status, _: status == 200)


@pytest.mark.full
def test_an_engine_that_was_stopped_is_told_until_it_goes_on(service: Served, model: RawModel) -> None:
    engine = service.engine()
    assert engine is not None
    os.kill(engine, signal.SIGSTOP)
    try:
        facts = wait(service, lambda status, _: status == 503)
        assert facts["engine"].startswith("not responding: no sign of life for ")
        assert model.raw.status()["engine"].startswith("not responding")
        request = model.submit_pass([row([GOOD, 2, 3])])
        said = model.raw.poll(request).json()
        assert (said["type"], said["queue_state"]) == ("try_again", "paused_capacity")
        assert "the engine is not responding" in said["queue_state_reason"]
    finally:
        os.kill(engine, signal.SIGCONT)
    facts = wait(service, lambda status, _: status == 200)
    assert (facts["engine"], service.engine()) == ("up", engine)
    assert model.raw.result(request, "pass")


@contextmanager
def full_disk(service: Served) -> Iterator[None]:
    """Let no file of the service's process grow."""
    assert service.process is not None
    pid = service.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@pytest.mark.full
def test_a_disk_that_takes_nothing_is_told_until_it_does(tmp_path: Path) -> None:
    service = ledger(tmp_path / "data", {"times": {"poll": 2.0}})
    try:
        service.start()
        with Raw(service.url) as raw:
            model = raw.model()
            body = {"model_id": model.id, "seq_id": 1, "adam_params": {}, "type": "optim_step"}
            with full_disk(service):
                refused = raw.send("/optim_step", body)
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) >= 1
                status, facts = ready(service)
                assert (status, facts["store"], facts["last_pass"]) == (503, "the last commit failed", "no failure")
                time.sleep(2.5)  # longer than it takes until the service looks again
                assert ready(service)[0] == 503
            wait(service, lambda status, _: status == 200)
            assert "metrics" in raw.result(raw.post("/optim_step", body)["request_id"])
    finally:
        service.stop()
