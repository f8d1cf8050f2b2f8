"""Large bodies are read on a thread, so that whoever reads them holds up no other request."""

import asyncio
from typing import Any

import pytest
from server_raw import pass_body, row

from twinkle_server.tinker import training


@pytest.mark.parametrize(("tokens", "apart"), [(16, False), (20_000, True)])
def test_a_large_pass_is_read_on_a_thread(served, monkeypatch, tokens: int, apart: bool) -> None:
    read, loops = training.read_pass, []

    def noted(*arguments: Any) -> Any:
        loops.append(asyncio._get_running_loop())
        return read(*arguments)

    monkeypatch.setattr(training, "read_pass", noted)
    body = pass_body("nobody:train:0", 1, [row(list(range(1, tokens + 2)))])
    answer = served.http().post("/forward_backward", content=body, headers={"content-type": "application/x-protobuf"})
    assert answer.status_code == 404, answer.text
    assert [loop is None for loop in loops] == [apart]
