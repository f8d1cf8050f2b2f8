"""Under load the service goes on answering: heartbeats and submissions at once, and what is too much with 429."""

import asyncio
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from server_history import read_ledger
from server_load import Line, at_a_rate, in_bursts, percentile
from server_raw import pass_body, row
from serving import Served, ledger

from twinkle_server.wire import tinker_pb2 as wire

BURST = 64
PROBES = 20.0
"""Heartbeats a second, and as many small submissions."""


@contextmanager
def served(folder: Path, **settings: Any) -> Iterator[Served]:
    service = ledger(folder / "data", settings)
    service.start()
    try:
        yield service
    finally:
        service.kill()


async def control_plane(url: str, polls: int, tokens: int, seconds: float) -> tuple[list[list[float]], list[float]]:
    """Measure heartbeats and submissions while passes come in bursts and others wait for a future that is not due.

    Args:
        url: of the service.
        polls: connections that wait.
        tokens: of each pass of a burst.
        seconds: after which no further burst begins.

    Returns:
        Seconds of every heartbeat and of every submission, and of every burst.
    """
    async with AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(Line(url)) for _ in range(polls + 16)]
        session = await lines[0].session()
        models = await asyncio.gather(*(lines[at % 16].model(session, at) for at in range(BURST + 2)))
        small, held = models[BURST:]
        later = await lines[0].ask("/optim_step", {"model_id": held, "seq_id": 9, "adam_params": {}})
        herd = [asyncio.create_task(line.future(later.json()["request_id"])) for line in lines[16:]]
        numbers = itertools.count(1)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            await asyncio.wrap_future(pool.submit(in_bursts, url, [], 0, 0.0))  # it has started
            await until_held(lines[0], polls)
            crowd = asyncio.wrap_future(pool.submit(in_bursts, url, models[:BURST], tokens, seconds))
            found = await asyncio.gather(
                at_a_rate([partial(beat, line, session) for line in lines[:8]], PROBES, lambda: not crowd.done()),
                at_a_rate(
                    [partial(send, line, small, numbers) for line in lines[8:16]], PROBES, lambda: not crowd.done()
                ),
            )
            bursts = await crowd
        assert not any(task.done() for task in herd), "a poll ended"
        for task in herd:
            task.cancel()
        await asyncio.gather(*herd, return_exceptions=True)
    return found, bursts


async def beat(line: Line, session: str) -> None:
    assert (await line.ask("/session_heartbeat", {"session_id": session})).status == 200


async def send(line: Line, model: str, numbers: Iterator[int]) -> None:
    assert (await line.ask("/forward_backward", pass_body(model, next(numbers), [row([1, 2, 3])]))).status == 200


async def until_held(line: Line, polls: int) -> None:
    """Wait until so many requests wait for a result."""
    async with asyncio.timeout(120):
        while (await line.ask("twinkle/status")).json()["polls"] != polls:
            await asyncio.sleep(0.1)


@pytest.mark.full
def test_heartbeats_and_submissions_do_not_stand_in_the_line_of_large_passes(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        probes, bursts = uvloop.run(control_plane(service.url, 300, 4096, 3.0))
        beats, submits = map(statistics.median, probes)
        assert beats < statistics.median(bursts) / 5, "heartbeats wait as long as passes do"
        assert submits < statistics.median(bursts), "small passes wait as long as large ones do"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_heartbeats_and_submissions_are_quick_whatever_else_comes(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        probes, bursts = uvloop.run(control_plane(service.url, 2000, 65_536, 20.0))
        figures = [(f"p95 {percentile(each, 95):.3f} s", f"p99 {percentile(each, 99):.3f} s") for each in probes]
        print(f"{len(bursts)} bursts of {statistics.median(bursts):.2f} s; heartbeats, submissions: {figures}")
        for seconds in probes:
            assert percentile(seconds, 95) <= 0.1, figures
            assert percentile(seconds, 99) <= 0.3, figures


OVERLOAD = {
    "limits": {"queued": 24},
    "max_pass_seconds": 0.02,
    "pass_tokens": 400,
    "extra": {"memory_every": 20, "seconds_per_token": 50e-6},
}
CAPACITY = 1 / 50e-6
"""Tokens a second that the engine of `OVERLOAD` computes."""
LENGTHS = (250, 500, 500, 1000)
"""Tokens of a pass of each of four tenants, who are equal and want different things."""
QUEUES = 3


@dataclass
class Lane:
    """One model of a tenant who asks more than there is.

    Attributes:
        line: on which it asks.
        length: tokens of a pass.
        model: its id.
        accepted: futures.
        refused: requests that were turned away.
    """

    line: Line
    length: int
    model: str = ""
    accepted: list[str] = field(default_factory=list)
    refused: int = 0

    async def ask(self) -> bool:
        """Submit the next pass; returns whether it was taken."""
        number = len(self.accepted) + 1
        rows = [row([number, *range(2, self.length + 2)])]
        answer = await self.line.ask("/forward_backward", pass_body(self.model, number, rows))
        if answer.status == 429:
            assert int(answer.headers["retry-after"]) >= 1
            self.refused += 1
            return False
        self.accepted.append(answer.json()["request_id"])
        return True

    async def insist(self, until: float) -> None:
        """Ask ten times as often as its share of the engine allows."""
        pause = 4 * QUEUES * self.length / (10 * CAPACITY)
        due = time.monotonic()
        while time.monotonic() < until:
            due += pause
            await self.ask()
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def settle(self) -> None:
        """Get in once more, as a client that comes again does; then demand that all is done, once and in order."""
        async with asyncio.timeout(120):
            while not await self.ask():
                await asyncio.sleep(1)
            for request in self.accepted:
                await self.line.future(request)
        number = len(self.accepted) + 1
        read = wire.ForwardBackwardOutput.FromString(
            (
                await self.line.do("/forward_backward", pass_body(self.model, number, [row([1, 2])], forward_only=True))
            ).body
        )
        pending, applied = read_ledger(read)
        assert [datum >> 32 for datum in pending] == list(range(1, number))
        assert not applied


async def overloaded(url: str, keys: list[str], seconds: float) -> tuple[dict[str, float], dict[str, float], float]:
    """Let tenants ask for ten times what there is.

    Returns:
        Figures a while after the beginning, figures at the end of the load, and the longest time in seconds without a
        good `/readyz`.
    """
    async with AsyncExitStack() as stack:
        made = [
            (await stack.enter_async_context(Line(url, key)), length)
            for key, length in zip(keys, LENGTHS, strict=True)
            for _ in range(QUEUES)
        ]
        watch = await stack.enter_async_context(Line(url))
        queues = [Lane(line, length) for line, length in made]
        for queue_id in queues:
            queue_id.model = await queue_id.line.model(await queue_id.line.session())
        end = time.monotonic() + seconds
        over = asyncio.Event()
        watching = asyncio.create_task(unready(watch, over))
        working = asyncio.gather(*(queue_id.insist(end) for queue_id in queues))
        await asyncio.sleep(seconds / 5)
        first = await figures(url)
        await working
        last = await figures(url)
        await asyncio.gather(*(queue_id.settle() for queue_id in queues))
        over.set()
        longest = await watching
        tried = sum(queue_id.length * (len(queue_id.accepted) + queue_id.refused) for queue_id in queues)
        print(f"{tried / CAPACITY / seconds:.1f} times what there is was asked for")
        assert tried >= 2 * CAPACITY * seconds, "nothing was overloaded"
        assert all(queue_id.refused for queue_id in queues)
    return first, last, longest


async def unready(line: Line, over: asyncio.Event) -> float:
    """Return the longest time between two good answers of `/readyz`."""
    last, longest = time.monotonic(), 0.0
    while not over.is_set():
        if (await line.ask("readyz")).status == 200:
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        await asyncio.sleep(0.05)
    return max(longest, time.monotonic() - last)


async def figures(url: str) -> dict[str, float]:
    """Return the metrics, asked for on a connection of its own: one that says nothing for long is closed."""
    async with Line(url) as line:
        text = (await line.ask("metrics")).body.decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def survives_overload(folder: Path, seconds: float) -> None:
    with served(folder, auth=True, local_metrics=True, **OVERLOAD) as service:
        first, last, longest = uvloop.run(
            overloaded(service.url, [service.new_key(f"t{at}") for at in range(len(LENGTHS))], seconds)
        )
        done = {name: value - first.get(name, 0.0) for name, value in last.items()}
        shares = [value for name, value in done.items() if name.startswith("twinkle_tenant_tokens_total")]
        turns = last['twinkle_pass_seconds_count{kind="pass"}']
        print(f"{turns:.0f} turns, tokens of tenants {shares}, not ready for {longest:.2f} s at most")
        assert turns >= 40, "less than two passes had no memory"
        assert len(shares) == len(LENGTHS)
        assert max(shares) / min(shares) <= 1.25
        assert longest <= 5
        outcomes = {name: value for name, value in last.items() if name.startswith("twinkle_operations_total")}
        assert outcomes
        assert all('outcome="done"' in name for name, value in outcomes.items() if value), "somebody's work failed"
        assert not any(value for name, value in last.items() if name.startswith("twinkle_engine_restarts_total"))
        assert service.stop() == 0


@pytest.mark.full
def test_ten_times_too_much_is_turned_away_and_shared_fairly_while_memory_runs_out(tmp_path: Path) -> None:
    survives_overload(tmp_path, 10.0)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_five_minutes_of_ten_times_too_much(tmp_path: Path) -> None:
    survives_overload(tmp_path, 300.0)
