"""Bodies that take time are read on a thread, so that whoever reads them holds up no other request.

A pass of few long arrays takes less time than a thread does: 0.04 ms for 32,768 tokens.
"""

import asyncio
from typing import Any

import pytest
from server_raw import pass_body, row

from twinkle_server.tinker import training

PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.mark.parametrize(
    ("tokens", "rows", "apart"), [(16, 1, False), (20_000, 1, False), (70_000, 1, True), (64, 200, True)]
)
def test_a_pass_of_many_parts_or_bytes_is_read_on_a_thread(
    served, monkeypatch, tokens: int, rows: int, apart: bool
) -> None:
    read, loops = training.read_pass, []

    def noted(*arguments: Any) -> Any:
        loops.append(asyncio._get_running_loop())
        return read(*arguments)

    monkeypatch.setattr(training, "read_pass", noted)
    body = pass_body("nobody:train:0", 1, [row(list(range(1, tokens + 2)))] * rows)
    answer = served.http().post("/forward_backward", content=body, headers=PROTOBUF)
    assert answer.status_code == 404, answer.text
    assert [loop is None for loop in loops] == [apart]


def test_a_pass_of_countless_parts_is_refused(served) -> None:
    body = pass_body("nobody:train:0", 1, [row([1, 2])]) + b"\x1a\x00" * 100_000  # empty rows
    answer = served.http().post("/forward_backward", content=body, headers=PROTOBUF)
    assert answer.status_code == 413, answer.text
    assert "parts; send fewer rows at a time" in answer.text
