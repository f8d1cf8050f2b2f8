"""What an operator changes and sees while the service runs: quotas, weights, and the use of each tenant."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from server_raw import Raw, row
from serving import Served, ledger

from twinkle_server.cli.server import main as server

from .test_quotas import send

SECONDS = 30.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = ledger(tmp_path_factory.mktemp("operating") / "data", {"auth": True, "times": {"poll": 2.0}})
    try:
        yield made.start()
    finally:
        made.stop()


def run(service: Served, *arguments: str) -> str:
    result = CliRunner().invoke(server, [*arguments, "--data", str(service.data)])
    assert result.exit_code == 0, result.output
    return result.output.strip()


def wait(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.05)
    return found


def test_a_quota_is_changed_while_the_service_runs_and_its_use_is_shown(service: Served) -> None:
    key = run(service, "keys", "create", "ana", "--operations", "1")
    with Raw(service.url, key) as raw:
        model = raw.model()
        assert send(model, 2).status_code == 200
        assert send(model, 3).status_code == 429
        changed = run(service, "keys", "set", "ana", "--operations", "50", "--weight", "2.5")
        assert "operations=50" in changed
        assert "weight=2.5" in changed
        wait(lambda: send(model, 3).status_code == 200, "the quota of the running service did not change")
        listed = json.loads(run(service, "keys", "list", "--json"))
        assert {entry["name"]: entry["quotas"] for entry in listed}["ana"] == {"operations": 50, "weight": 2.5}
        run(service, "keys", "set", "ana", "--operations", "none")
        assert "operations" not in run(service, "keys", "list")
        first = send(model, 1)
        for answer in (first, send(model, 2), send(model, 3)):
            raw.result(answer.json()["request_id"], "pass")
        model.last = 3
        model.forward_backward([row([1, 2, 3, 4])])
        model.save("a")

        def used() -> Any:
            found = json.loads(run(service, "status", "--json"))["tenants"]["ana"]
            return found if found["trained_tokens"] >= 6 and found["checkpoints"]["count"] else None

        found = wait(used, "the use of the tenant is not in the status")
        assert found["trained_tokens"] == found["trained_tokens_today"] == 3 * 1 + 3
        assert found["sampled_tokens"] == 0
        assert (found["models"], found["waiting"], found["weight"]) == (1, 0, 2.5)
        assert found["checkpoints"]["bytes"] > 0
        assert found["requests"] >= 6
        overview = httpx.get(f"{service.url}/twinkle/overview", headers={"X-API-Key": service.key}, trust_env=False)
        shown = {entry["tenant"]: entry["tokens_today"] for entry in overview.json()["tenants"]}
        assert shown["ana"] == 6, "requests are no tokens"
        assert "tenant ana: trained 6 tokens (6 today)" in run(service, "status")
        with pytest.raises(AssertionError, match="specify what to change"):
            run(service, "keys", "set", "ana")
        events = raw.get("/audit", event_type="key.quotas")["entries"]
        assert [entry["event_details"]["after"] for entry in events] == [
            {"weight": 2.5},
            {"operations": 50, "weight": 2.5},
        ]


def test_a_user_does_not_see_what_others_use(service: Served) -> None:
    key = run(service, "keys", "create", "ben")
    with Raw(service.url, key) as raw:
        assert raw.http.get(f"{service.url}/twinkle/status").status_code == 403
    with Raw(service.url, service.key) as raw:
        assert "ben" in raw.http.get(f"{service.url}/twinkle/status").json()["tenants"]
