"""Lines of a running service say which operation, of which model and whose, by fields; no line names a tenant."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from server_raw import Failed, Raw, row

from twinkle_server.cli.server import main as server
from twinkle_server.telemetry.logs import tenant_mark

from .conftest import Process

TENANT = "margarethe"
Lines = list[dict[str, Any]]


def work(raw: Raw) -> dict[str, Any]:
    """Do something well, something badly, something too often; return ids to look for."""
    session = raw.session()
    body = raw.create_body(session)
    asked = [raw.send("/create_model", body) for _ in range(2)]
    model = raw.model(session)
    with pytest.raises(Failed):
        model.forward([row([1, 2])], "no_such_loss")
    model.submit("optim_step", number=7, adam_params={})
    full = raw.send("/optim_step", {"model_id": model.id, "seq_id": 8, "adam_params": {}, "type": "optim_step"})
    assert full.status_code == 429, full.text
    bad = raw.post("/optim_step", {"model_id": model.id, "seq_id": 2, "adam_params": {"beta1": "x"}})
    ids = {"model": model.id, "future": asked[0].json()["request_id"], "refused": bad["request_id"]}
    return ids | {"requests": [answer.headers["x-request-id"] for answer in (*asked, full)]}


def run(data: Path, level: str) -> tuple[dict[str, Any], Lines, str]:
    """Let a tenant work with a service that logs at a level; return ids, the lines, and the tenant's mark."""
    process = Process(data, "--log-level", level).start()
    try:
        made = CliRunner().invoke(server, ["keys", "create", TENANT, "--data", str(data), "--operations", "1"])
        with Raw(process.url, made.output.strip()) as raw:
            ids = work(raw)
    finally:
        assert process.stop() == 0
    assert TENANT not in process.log
    return (
        ids,
        [json.loads(line) for line in process.log.splitlines()],
        tenant_mark(TENANT, (data / "secret").read_bytes()),
    )


@pytest.fixture(scope="module")
def detailed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Lines, str]:
    return run(tmp_path_factory.mktemp("detailed") / "data", "debug")


def of(lines: Lines, **fields: Any) -> Lines:
    """Return the lines with these fields."""
    return [line for line in lines if fields.items() <= line.items()]


def test_an_operation_is_followed_from_its_request_to_its_end(detailed: tuple[dict[str, Any], Lines, str]) -> None:
    ids, lines, mark = detailed
    created = {"event": "operation", "model": ids["model"], "kind": "create", "number": 0, "tenant": mark}
    story = of(lines, **created, future=ids["future"])
    assert [line["outcome"] for line in story if line["outcome"] != "known"] == ["taken", "done"]
    first, second, _ = ids["requests"]
    assert {line["request"] for line in story if line["outcome"] in ("taken", "done")} == {first}
    assert [line["outcome"] for line in of(story, request=second)] == ["known"]
    [done] = of(story, outcome="done")
    assert done["operation"] > 0
    assert done["seconds"] >= 0


@pytest.mark.full
def test_failures_and_refusals_are_told_at_the_ordinary_level(tmp_path: Path) -> None:
    ids, lines, mark = run(tmp_path / "data", "info")
    ours = {"model": ids["model"], "tenant": mark}
    [failed] = of(lines, **ours, event="operation", kind="forward", number=1, outcome="user")
    assert (failed["level"], failed["tokens"]) == ("info", 1)
    assert "request" in failed
    [impossible] = of(lines, **ours, event="operation", future=ids["refused"])
    assert (impossible["kind"], impossible["number"], impossible["outcome"]) == ("optim_step", 2, "user")
    [refused] = of(lines, event="refused", status=429)
    assert refused["request"] == ids["requests"][2]
    assert of([refused], **ours, kind="optim_step", number=8, outcome="refused", route="/api/v1/optim_step")
    assert not of(lines, outcome="done")
    assert not of(lines, outcome="taken")
