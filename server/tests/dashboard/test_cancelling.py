"""Training that waits in the engine is cancelled, from the dashboard and by the SDK, and what has begun is not."""

import html
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
import tinker
from server_raw import Failed, Raw, RawModel, row
from server_sdk import SECONDS, opened, trainer
from server_sdk import row as sdk_row
from serving import Served, ledger

from .test_pages import token

TOKENS = 2048
"""Of a pass, which takes 0.3 s."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = ledger(tmp_path_factory.mktemp("slow") / "data", {"extra": {"seconds_per_token": 0.3 / TOKENS}}).start()
    try:
        yield served
    finally:
        served.stop()


def queue_passes(model: RawModel, count: int) -> list[str]:
    """Submit passes of one row each; the first, which takes 3 s, has begun."""
    futures = [model.submit_pass([row([9, *[2] * 10 * TOKENS])])]
    futures += [model.submit_pass([row([number + 5, *[2] * TOKENS])]) for number in range(1, count)]
    states: list[str] = []
    with httpx.Client(base_url=model.raw.url, trust_env=False) as client:
        while states != ["running", *["queued in the engine"] * (count - 1)]:
            page = client.get("/ui/operations").text
            states = re.findall(r'<td class="wide">(running|queued in the engine|waits[^<]*)', page)
            assert len(states) == count, (states, "the first pass has ended")
    return futures


def submit(client: httpx.Client, path: str) -> str:
    """Confirm an action, and return the text of the page that it leads to."""
    answer = client.post(path, data={"csrf": token(client.get(path).text)}, follow_redirects=True)
    assert answer.status_code == 200
    [notice] = re.findall(r'role="status">([^<]+)', answer.text)
    return html.unescape(notice)


def ends(raw: Raw, futures: list[str]) -> list[str]:
    found = []
    for future in futures:
        try:
            raw.result(future, "pass")
            found.append("done")
        except Failed as error:
            found.append(error.error)
    return found


def test_the_waiting_operations_of_a_run_are_cancelled_and_counted(slow: Served) -> None:
    with Raw(slow.url) as raw, httpx.Client(base_url=slow.url, trust_env=False) as client:
        model = raw.model()
        futures = queue_passes(model, 6)
        notice = submit(client, f"/ui/runs/{model.id}/cancel")
        assert notice == "5 operations cancelled. 1 operation had begun and will run to the end."
        assert ends(raw, futures[1:]) == ["the request was cancelled"] * 5, "at once"
        assert ends(raw, futures[:1]) == ["done"]
        assert model.step()["metrics"]["grad_norm"] == 1.0, "numbers go on, and one row was trained"
        slow.kill()
        slow.start()
    with Raw(slow.url) as raw:
        assert ends(raw, futures) == ["done", *["the request was cancelled"] * 5]


def test_one_operation_of_the_queue_is_cancelled_and_those_behind_it_run(slow: Served) -> None:
    with Raw(slow.url) as raw, httpx.Client(base_url=slow.url, trust_env=False) as client:
        model = raw.model()
        futures = queue_passes(model, 3)
        first, second, _ = re.findall(r"/ui/operations/(\d+)/cancel", client.get("/ui/operations").text)
        assert "It runs already" in client.get(f"/ui/operations/{first}/cancel").text
        assert "It runs already" not in client.get(f"/ui/operations/{second}/cancel").text
        assert submit(client, f"/ui/operations/{second}/cancel") == "1 operation cancelled."
        begun = "No operations cancelled. 1 operation had begun and will run to the end."
        assert submit(client, f"/ui/operations/{first}/cancel") == begun
        assert ends(raw, futures) == ["done", "the request was cancelled", "done"]
        assert model.step()["metrics"]["grad_norm"] == 2.0


def test_the_sdk_cancels_a_pass_that_waits_in_the_engine(slow: Served) -> None:
    with opened(slow.url) as client:
        training = trainer(client, "ledger/model")
        rows = [sdk_row([9, *[2] * 10 * TOKENS]), *[sdk_row([number, *[2] * TOKENS]) for number in (5, 6)]]
        futures = [training.forward_backward([each], "cross_entropy") for each in rows]
        request = request_of(slow, number=3)
        training.holder.run_coroutine_threadsafe(training.holder._send_cancel_request(request)).result(SECONDS)
        with pytest.raises(tinker.RequestFailedError, match="the request was cancelled"):
            futures[2].result(SECONDS)
        for future in futures[:2]:
            future.result(SECONDS)
        assert training.optim_step(tinker.AdamParams()).result(SECONDS).metrics["grad_norm"] == 2.0


def request_of(served: Served, number: int) -> str:
    """Return the id of an operation's future, once it is in the log."""
    with closing(sqlite3.connect(f"file:{served.data / 'twinkle.db'}?mode=ro", uri=True)) as database:
        found: list[tuple[str]] = []
        while not found:
            query = "SELECT request FROM operations WHERE number = ? AND status = 'pending'"
            found = database.execute(query, (number,)).fetchall()
    return found[0][0]


def test_a_long_pass_counts_while_it_runs(slow: Served) -> None:
    def overview() -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{slow.url}/twinkle/overview", trust_env=False).json()
        return answer

    with Raw(slow.url) as raw:
        future = raw.model().submit_pass([row([9, *[2] * 10 * TOKENS])])
        before, found = 0.0, overview()
        while found["queue"]["running"] == 0:
            before, found = sum(found["rates"]["history"]), overview()
        while sum(found["rates"]["history"]) <= before:
            assert found["queue"]["unfinished"], "it counts only when it is over"
            found = overview()
        assert found["queue"]["unfinished"] == 1
        raw.result(future, "pass")
        assert overview()["rates"]["pass_tokens"] <= 1024
