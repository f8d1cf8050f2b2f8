"""How much the service carries: `forward_backward` calls a second of 32 clients; the engine computes nothing.

    python benchmarks/server_capacity.py

Each client has a model of its own and does one call after the other, from submission to result. Goals: 1,500 a second
with a journal in memory (benchmark only), 500 with the durable one as shipped; p99 at most 50 ms with the first. A row
with 256 further clients that wait on futures which are not due shows what those cost. The clients share the machine's
cores with the service and its engine.
"""

import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import uvloop
from _pairs import describe_machine
from _server import PACKAGES, PROTOBUF, Connection, fsync_ms, pass_body, served

CLIENTS, SECONDS, TOKENS = 32, 5.0, 128
GOALS = {"memory": 1500.0, "durable": 500.0}


def main() -> int:
    """Run the benchmark and print its table; exit code 1 when a goal is missed."""
    print(describe_machine(PACKAGES))
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        print(f"one fsync of 4 KiB: {fsync_ms(Path(folder)):.2f} ms; {CLIENTS} clients, {TOKENS} tokens a call")
        print(f"{'':10}{'idle polls':>12}{'calls/s':>9}{'p50 ms':>8}{'p99':>7}{'goal':>7}")
        for journal, goal in GOALS.items():
            with served(Path(folder), journal) as url:
                for idle in (0, 256):
                    times, seconds = uvloop.run(load(url, idle))
                    rate = len(times) / seconds
                    p50, p99 = (statistics.quantiles(times, n=100)[at - 1] for at in (50, 99))
                    missed += idle == 0 and (rate < goal or (journal == "memory" and p99 > 50))
                    shown = "" if idle else f"{goal:.0f}"
                    print(f"{journal:10}{idle:>12}{rate:>9.0f}{p50:>8.1f}{p99:>7.1f}{shown:>7}")
    return 1 if missed else 0


async def load(url: str, idle: int, sampled: bool = False) -> tuple[list[float], float]:
    """Let all clients call for some seconds; return milliseconds of each call and the seconds that it took."""
    setup = Connection(url)
    models = [setup.model() for _ in range(CLIENTS)]
    waiting = []
    if idle:
        body = {"model_id": setup.model(), "seq_id": 99, "adam_params": {}}
        request = setup.json("/optim_step", **body)["request_id"]
        waiting = [asyncio.create_task(wait(url, request)) for _ in range(idle)]
        await asyncio.sleep(1)
    times: list[float] = []
    numbers = {model: itertools.count(1) for model in models}
    seconds = 0.0
    for limit in (0.5, SECONDS):  # the first round warms up
        times.clear()
        start = time.perf_counter()
        await asyncio.gather(*(client(url, model, numbers[model], start + limit, times, sampled) for model in models))
        seconds = time.perf_counter() - start
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return times, seconds


class Line:
    """One connection, with as little work on the client's side as can be."""

    def __init__(self, url: str) -> None:
        self.address = urlsplit(url)

    async def open(self) -> None:
        """Connect."""
        self.reader, self.writer = await asyncio.open_connection(self.address.hostname, self.address.port)

    async def post(self, path: str, body: bytes, kind: str) -> bytes:
        """Send a request and return the answer's body, which must be good."""
        head = (
            f"POST /api/v1{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: tml-benchmark\r\nContent-Type: {kind}\r\n"
            f"Accept: {PROTOBUF}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        answer = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0])
        content = await self.reader.readexactly(length)
        if b" 200 " not in answer[:20]:
            raise SystemExit(f"{path}: {answer[:40]!r} {content[:300]!r}")
        return content


async def client(
    url: str, model: str, numbers: Iterator[int], end: float, times: list[float], sampled: bool = False
) -> None:
    """Call until the time is over, and note how long each call took."""
    line = Line(url)
    await line.open()
    while time.perf_counter() < end:
        body = pass_body(model, next(numbers), TOKENS, sampled)
        start = time.perf_counter()
        sent = await line.post("/forward_backward", body, PROTOBUF)
        asked = json.dumps({"request_id": json.loads(sent)["request_id"], "allow_metadata_only": False}).encode()
        await line.post("/retrieve_future", asked, "application/json")
        times.append(1000 * (time.perf_counter() - start))
    line.writer.close()


async def wait(url: str, request: str) -> None:
    """Poll a future that is not due, again and again."""
    line = Line(url)
    await line.open()
    asked = json.dumps({"request_id": request, "allow_metadata_only": False}).encode()
    while True:
        await line.post("/retrieve_future", asked, "application/json")


if __name__ == "__main__":
    sys.exit(main())
