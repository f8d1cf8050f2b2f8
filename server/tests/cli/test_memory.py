"""Memory stays where it is: over many operations, and whatever a body stands for."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import uvloop
import zstandard
from server_load import Line
from server_raw import PROTOBUF, pass_body, row
from serving import Served, ledger

from twinkle_server.settings import Limits

CLIENTS, TOKENS, STEP, SAVE = 8, 4096, 5, 50
WARM = 1250
"""Operations after which the bytes of results that are kept at hand are as many as they may be."""
MIB = 2**20
BOUND = 2 * Limits().inflight_bytes / MIB
ROW = row(list(range(1, TOKENS + 2)))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    started = ledger(tmp_path / "data").start()
    yield started
    started.kill()


def memory(pid: int | None, name: str = "VmRSS") -> float:
    """Return a figure of a process's memory, in MiB."""
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{name}:")[2].split()[0]) / 1024


class Worker:
    """A client that trains, steps, saves, samples, and begins anew with another model."""

    def __init__(self, line: Line) -> None:
        self._line, self._number, self.done = line, SAVE, 0

    async def work(self, until: int) -> None:
        """Do operations, one after the other, until there were so many."""
        while self.done < until:
            self.done += 1
            self._number += 1
            if self._number > SAVE:
                self._session = await self._line.session()
                self._model, self._number = await self._line.model(self._session), 0
            elif self._number == SAVE:
                await self._end()
            elif self._number % STEP:
                await self._line.do("/forward_backward", pass_body(self._model, self._number, [ROW]))
            else:
                body = {"model_id": self._model, "seq_id": self._number, "adam_params": {}}
                stepped = (await self._line.do("/optim_step", body)).json()
                assert stepped["metrics"]["grad_norm"] == STEP - 1

    async def _end(self) -> None:
        named = {"model_id": self._model, "seq_id": SAVE, "path": "last", "ttl_seconds": 3600}
        saved = (await self._line.do("/save_weights_for_sampler", named)).json()
        made = {"session_id": self._session, "sampling_session_seq_id": 0, "model_path": saved["path"]}
        sampler = (await self._line.ask("/create_sampling_session", made)).json()["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        asked = {"num_samples": 1, "prompt": prompt, "sampling_params": {"max_tokens": 64}, "seq_id": 0}
        await self._line.do("/asample", {"sampling_session_id": sampler, **asked})
        assert (await self._line.ask(f"/sessions/{self._session}/finish", {})).status == 200


async def growth(service: Served, before: int, after: int) -> list[float]:
    """Return by how many MiB the service and its engine grow from so many operations to so many."""
    pids = (service.process and service.process.pid, service.engine())
    lines = [await Line(service.url).__aenter__() for _ in range(CLIENTS)]
    workers = [Worker(line) for line in lines]
    sizes = []
    for count in (before, after):
        await asyncio.gather(*(worker.work(count // CLIENTS) for worker in workers))
        sizes.append([memory(pid) for pid in pids])
    for line in lines:
        await line.__aexit__()
    return [last - first for first, last in zip(*sizes, strict=True)]


@pytest.mark.full
def test_three_thousand_operations_leave_little_behind(service: Served) -> None:
    assert max(uvloop.run(growth(service, WARM, 3000))) <= 16


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_fifty_thousand_operations_leave_little_behind(service: Served) -> None:
    assert sum(uvloop.run(growth(service, WARM, 50_000))) <= 64


def huge(piece: bytes, size: int, before: bytes = b"", after: bytes = b"") -> bytes:
    """Return a body of that size which repeats a piece, compressed."""
    return zstandard.compress(before + piece * ((size - len(before) - len(after)) // len(piece)) + after)


PASS = pass_body("model", 1, [])
JSON = b'{"model_id":"model","seq_id":1,"forward_backward_input":{"loss_fn":"cross_entropy","data":['
BODIES: dict[str, Callable[[int], tuple[str, str, bytes]]] = {
    "a bomb": lambda size: ("/forward_backward", PROTOBUF, huge(bytes(2**20), 2 * size)),
    "nothing": lambda size: ("/forward_backward", PROTOBUF, huge(bytes(2**10), size)),
    "rows": lambda size: ("/forward_backward", PROTOBUF, huge(b"\x1a\x00" * 512, size, PASS)),
    "text": lambda size: ("/create_session", "application/json", huge(b"a" * 1024, size, b'{"x":"', b'"}')),
    "lists": lambda size: ("/create_session", "text/plain", huge(b"[]," * 512, size, b'{"x":[', b"1]}")),
    "objects": lambda size: ("/forward_backward", "application/json", huge(b"{}," * 512, size, JSON, b"1]}}")),
}


async def at_once(url: str, path: str, kind: str, body: bytes, encoding: str = "zstd") -> list[int]:
    """Send a body eight times at once, and return the statuses."""

    async def one() -> int:
        async with Line(url) as line:
            return (await line.ask(path, body, Content_Type=kind, Content_Encoding=encoding)).status

    return await asyncio.gather(*(one() for _ in range(8)))


def peak(service: Served, names: Iterable[str]) -> float:
    """Send hostile bodies, and return by how many MiB the service grew at most."""
    limits = Limits()
    assert service.process is not None
    before = memory(service.process.pid)
    for name in names:
        path, kind, body = BODIES[name](limits.decompressed_bytes - 2**10)
        assert len(body) < MIB, "it is small as it is sent"
        statuses = set(uvloop.run(at_once(service.url, path, kind, body)))
        assert statuses <= ({200, 429} if name == "text" else {413, 429}), (name, statuses)
    return memory(service.process.pid, "VmHWM") - before


@pytest.mark.full
def test_no_body_takes_more_than_twice_the_bound(service: Served) -> None:
    assert peak(service, ["a bomb", "rows", "lists"]) <= BOUND
    assert service.alive


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_body_at_all_takes_more_than_twice_the_bound(service: Served) -> None:
    for size, status in ((Limits().body_bytes, {413, 429}), (Limits().body_bytes + 1, {413})):
        asked = at_once(service.url, "/forward_backward", PROTOBUF, bytes(size), "identity")
        assert set(uvloop.run(asked)) <= status
    assert peak(service, BODIES) <= BOUND
    assert service.alive
