"""The figures of a running service move with what happens in it, by exactly as much."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from server_raw import Failed, Raw, RawModel, row
from serving import Served, ledger

from twinkle_server.cli.server import main as server
from twinkle_server.telemetry.logs import tenant_mark

SLOW, HANGING, SECONDS = 40, 66, 60.0
Figures = dict[tuple[str, ...], float]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with keys, whose passes take a hundredth of a second for each token."""
    extra = {"seconds_per_token": 0.01, "hang": [HANGING]}
    settings = {"auth": True, "times": {"poll": 2.0, "deadline": 4.0, "snapshot": 1e6}, "extra": extra}
    made = ledger(tmp_path_factory.mktemp("figures") / "data", settings)
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture(scope="module")
def parties(service: Served) -> Iterator[dict[str, Raw]]:
    """Tenants with keys of their own."""
    opened = {}
    for name in ("ana", "ben"):
        made = CliRunner().invoke(server, ["keys", "create", name, "--data", str(service.data)])
        opened[name] = Raw(service.url, made.output.strip())
    yield opened
    for raw in opened.values():
        raw.http.close()


def read(service: Served) -> Figures:
    """Return all samples, by name and the values of their labels."""
    text = httpx.get(f"{service.url}/metrics", headers={"X-API-Key": service.key}, trust_env=False).text
    families = text_string_to_metric_families(text)
    return {
        (sample.name.removeprefix("twinkle_"), *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


class Change:
    """How much figures grew since this was made."""

    def __init__(self, service: Served) -> None:
        self._service = service
        self._before = read(service)

    def __call__(self, *name: str) -> float:
        return read(self._service).get(name, 0.0) - self._before.get(name, 0.0)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def test_operations_and_tokens_are_counted_once_for_whom_they_were(service: Served, parties: dict[str, Raw]) -> None:
    marks = {name: tenant_mark(name, (service.data / "secret").read_bytes()) for name in parties}
    changed = Change(service)
    for name, count in (("ana", 2), ("ben", 3)):
        model = parties[name].model()
        for _ in range(count):
            model.forward_backward([row([5, 2, 3, 4])])  # three are the model's, the fourth is a target
        with pytest.raises(Failed):
            model.forward_backward([row([5, 2, 3, 4])], "no_such_loss")
    assert changed("operations_total", "create", "done") == 2
    assert changed("operations_total", "forward_backward", "done") == 5
    assert changed("operations_total", "forward_backward", "user") == 2
    assert changed("tokens_total", "forward_backward") == 15
    assert [changed("tenant_tokens_total", marks[name]) for name in ("ana", "ben")] == [6, 9]
    assert changed("pass_tokens_total", "pass") == 15
    assert changed("operation_seconds_count", "forward_backward") == 7
    assert 0.15 < changed("pass_seconds_sum", "pass") < SECONDS


def test_tenants_who_share_a_pass_are_seen_in_it(service: Served, parties: dict[str, Raw]) -> None:
    first, second = (raw.model() for raw in parties.values())

    def together() -> bool:
        """Let both ask while a long pass of one runs; on a slow machine it may be over too early."""
        changed = Change(service)
        asked = [(first, first.submit_pass([row([SLOW] * SLOW)]))]
        asked += [(model, model.submit_pass([row([5, 2, 3])])) for model in (first, second) for _ in range(2)]
        for model, request in asked:
            model.raw.result(request, "pass")
        passes = changed("pass_tenants_count", "pass")
        assert changed("pass_operations_sum", "pass") == 5
        assert changed("pass_fill_count", "pass") == passes
        return changed("pass_tenants_sum", "pass") > passes

    assert any(together() for _ in range(10)), "no pass was shared"


@pytest.mark.full
def test_an_engine_that_dies_is_counted_and_what_is_done_again_for_it(service: Served, parties: dict[str, Raw]) -> None:
    model = parties["ana"].model()
    for _ in range(3):
        model.forward_backward([row([5, 2, 3])])
    changed = Change(service)
    pid = service.engine()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    model.forward_backward([row([5, 2, 3])])
    assert changed("engine_restarts_total", "died") == 1
    assert changed("engine_restarts_total", "hung") == 0
    assert changed("replays_total") == 4  # that it was made, and three passes
    assert changed("swaps_total", "in") == 1
    assert changed("operations_total", "forward_backward", "done") == 1, "what is done again is not counted again"
    assert changed("tokens_total", "forward_backward") == 2


@pytest.mark.full
def test_an_engine_that_hangs_is_counted_as_such(service: Served, parties: dict[str, Raw]) -> None:
    model = parties["ben"].model()
    changed = Change(service)
    bad = model.submit_pass([row([HANGING, 2, 3])])
    with pytest.raises(Failed, match="longer than 4 s, twice"):
        model.raw.result(bad, "pass", polls=30)
    assert changed("engine_restarts_total", "hung") == 2
    assert changed("engine_restarts_total", "died") == 0
    assert changed("operations_total", "forward_backward", "server") == 1


def test_models_that_leave_and_come_back_are_counted(service: Served, parties: dict[str, Raw]) -> None:
    raw = parties["ana"]
    model = raw.model()
    model.forward_backward([row([5, 2, 3])])
    changed = Change(service)
    raw.post(f"/sessions/{model.session}/finish", {"reason": {"type": "success"}})
    until(lambda: changed("swaps_total", "out") == 1)
    assert changed("snapshot_bytes_total") > 0
    assert changed("swaps_total", "in") == 0
    model.forward_backward([row([5, 2, 3])])
    assert changed("swaps_total", "in") == 1
    assert changed("replays_total") == 0, "the snapshot has it all"


def test_what_waits_is_shown_while_it_waits(service: Served, parties: dict[str, Raw]) -> None:
    model = parties["ben"].model()
    before = read(service)[("open_futures",)]
    early = model.submit("optim_step", number=2, adam_params={})
    assert read(service)[("open_futures",)] == before + 1
    first = read(service)[("queue_age_seconds",)]
    time.sleep(0.2)
    assert read(service)[("queue_age_seconds",)] >= first + 0.2
    RawModel(model.raw, model.id).step()
    model.raw.result(early)
    assert read(service)[("open_futures",)] == before


def test_status_is_read_through_the_folder_and_figures_with_the_operators_key(service: Served) -> None:
    said = CliRunner().invoke(server, ["status", "--json", "--data", str(service.data)])
    assert json.loads(said.output)["running"] is True
    for path in ("/metrics", "/twinkle/status"):
        assert httpx.get(f"{service.url}{path}", trust_env=False).status_code == 401
