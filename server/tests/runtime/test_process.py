"""The runtime with the engine's real process and the real log: it is killed, it hangs, it is told nothing secret."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger_engine import ENGINE, MODEL, read_ledger_metrics
from server_runtime import SOON, answer, within

from twinkle_server.environment import scrubbed
from twinkle_server.errors import NotFound
from twinkle_server.operations import Accepted, Create, Future, Kind, OptimStep, Submission
from twinkle_server.runtime.service import Service
from twinkle_server.runtime.supervision import EngineFailed
from twinkle_server.settings import Settings, Times
from twinkle_server.store import models
from twinkle_server.store.opening import open_store
from twinkle_server.store.records import Model, Session
from twinkle_server.wire import codec
from twinkle_server.wire import tinker_pb2 as pb


def _pass(first: int, forward: bool = False) -> bytes:
    request = pb.ForwardBackwardRequest(loss_fn="cross_entropy", forward_only=forward)
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([first, 1, 2], np.int32).tobytes()
    datum.loss_fn_inputs["target_tokens"].CopyFrom(codec.write_tensor(np.asarray([1, 2, 3], np.int64)))
    return request.SerializeToString()


class Client:
    """Trains models of one session."""

    def __init__(self, service: Service, store: Any) -> None:
        self.service, self.store = service, store
        self.numbers: dict[str, int] = {}

    async def begin(self, queue_id: str) -> None:
        now = time.time()
        if not self.numbers:
            await self.store.sessions.create(Session("s", "ada", now, now))
        model = Model(queue_id, "ada", "s", int(queue_id[-1]), "ledger", 8, now, now)
        await self.ask(queue_id, "create", Create(8, 1).dump(), lambda connection: models.add(connection, model))

    async def ask(self, queue_id: str, kind: Kind, payload: bytes, in_transaction: Any = None) -> Accepted:
        number = self.numbers.get(queue_id, 0)
        self.numbers[queue_id] = number + 1
        return await self.service.submit(Submission("ada", queue_id, kind, payload, number, tokens=3), in_transaction)

    async def train(self, queue_id: str, first: int) -> list[Accepted]:
        step = OptimStep().dump()
        return [
            await self.ask(queue_id, "forward_backward", _pass(first)),
            await self.ask(queue_id, "optim_step", step),
        ]

    async def applied(self, queue_id: str) -> list[int]:
        told = await answer(self.service, (await self.ask(queue_id, "forward", _pass(1, forward=True))).request)
        assert told.result is not None, told.error
        _, metrics = codec.read_forward_backward_output(told.result)
        assert read_ledger_metrics("pending", metrics) == []
        return [number >> 32 for number in read_ledger_metrics("applied", metrics)]


def _settings(data: Path, **more: Any) -> Settings:
    extra = {"marks": str(data), **more.pop("extra", {})}
    return Settings(str(MODEL), data, name="ledger", backend=ENGINE, snapshot_steps=3, extra=extra, **more)


@pytest.mark.full
def test_kills_of_the_engine_lose_and_repeat_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        draw, store = random.Random(6), open_store(tmp_path)
        service = Service(_settings(tmp_path), store)
        await service.start()
        await service.wait_ready()
        client, queues = Client(service, store), ["s:train:0", "s:train:1", "s:train:2"]
        asked: dict[tuple[str, int], list[Accepted]] = {}
        for queue_id in queues:
            await client.begin(queue_id)
        for turn in range(18):
            for queue_id in queues:
                asked[queue_id, 100 + turn] = await client.train(queue_id, 100 + turn)
            await asyncio.sleep(draw.random() * 0.02)
            if turn % 6 == 5 and service.supervisor.pid is not None:
                os.kill(service.supervisor.pid, signal.SIGKILL)
        failed = set()
        for key, requests in asked.items():
            told = [await answer(service, request.request) for request in requests]
            assert told[1].status == "done", told[1].error
            if told[0].status == "failed":
                failed.add(key)
        for queue_id in queues:
            want = [100 + turn for turn in range(18) if (queue_id, 100 + turn) not in failed]
            assert await client.applied(queue_id) == want
        assert service.supervisor.restarts == 3
        await service.drain()
        await service.close()
        store.close()

    within(3 * SOON, scenario)


@pytest.mark.full
def test_an_abandoned_service_is_taken_up_by_the_next_on_the_same_directory(tmp_path: Path) -> None:
    async def first() -> list[str]:
        store = open_store(tmp_path)
        service = Service(_settings(tmp_path, extra={"seconds_per_token": 0.01}), store)
        await service.start()
        client = Client(service, store)
        await client.begin("s:train:0")
        requests = [request for turn in range(6) for request in await client.train("s:train:0", 100 + turn)]
        await answer(service, requests[2].request)
        await service.close()
        store.close()
        return [request.request for request in requests]

    async def second(requests: list[str]) -> None:
        store = open_store(tmp_path)
        service = Service(_settings(tmp_path), store)
        await service.start()
        for request in requests:
            assert (await answer(service, request)).status == "done"
        client = Client(service, store)
        client.numbers["s:train:0"] = 13
        assert await client.applied("s:train:0") == [100, 101, 102, 103, 104, 105]
        await service.close()
        store.close()

    requests = within(SOON, first)
    within(SOON, lambda: second(requests))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("chaos", "words"), [("die", "the engine died, twice"), ("hang", "longer than 1.5 s, twice")])
def test_a_datum_that_kills_or_hangs_the_engine_fails_its_own_operation(tmp_path: Path, chaos: str, words: str) -> None:
    async def scenario() -> None:
        store = open_store(tmp_path)
        service = Service(_settings(tmp_path, extra={chaos: [666]}, times=Times(deadline=1.5)), store)
        await service.start()
        await service.wait_ready()
        client = Client(service, store)
        for queue_id in ("s:train:0", "s:train:1"):
            await client.begin(queue_id)
            await client.train(queue_id, 100)
        bad = await client.ask("s:train:0", "forward_backward", _pass(666))
        for queue_id in ("s:train:0", "s:train:1"):
            await client.train(queue_id, 101)
        told = await answer(service, bad.request)
        assert (told.status, told.category) == ("failed", "server")
        assert words in str(told.error)
        assert await client.applied("s:train:0") == [100, 101]
        assert await client.applied("s:train:1") == [100, 101]
        assert service.supervisor.restarts == 2
        await service.close()
        store.close()

    within(3 * SOON, scenario)


@pytest.mark.full
def test_an_engine_that_was_stopped_is_started_anew_once_it_owes_an_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = open_store(tmp_path)
        service = Service(_settings(tmp_path, times=Times(stopped=0.4)), store)
        await service.start()
        await service.wait_ready()
        client = Client(service, store)
        await client.begin("s:train:0")
        assert await client.applied("s:train:0") == []
        stopped = service.supervisor.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        await asyncio.sleep(1.0)
        assert service.supervisor.pid == stopped, "it owes nothing"
        asked = await client.train("s:train:0", 100)
        for one in asked:
            assert (await answer(service, one.request)).status == "done"
        assert await client.applied("s:train:0") == [100]
        assert service.supervisor.restarts == 1
        await service.close()
        store.close()

    within(SOON, scenario)


@pytest.mark.full
def test_an_engine_that_never_begins_is_told_with_its_last_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = open_store(tmp_path)
        service = Service(_settings(tmp_path, extra={"no such": "option"}), store)
        await service.start()
        with pytest.raises(EngineFailed, match="knows no option"):
            await service.wait_ready()
        assert service.queue_state("s:train:0") == ("paused_capacity", "the engine is starting")
        await service.close()
        store.close()

    within(SOON, scenario)


def test_a_service_that_cannot_read_its_log_leaves_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store = open_store(tmp_path)
        service = Service(_settings(tmp_path), store)

        async def pending() -> list[Any]:
            await asyncio.sleep(0.1)
            raise OSError("no")

        monkeypatch.setattr(store.journal, "pending", pending)
        with pytest.raises(OSError, match="no"):
            await service.start()
        assert service.supervisor.pid is None
        store.close()

    within(SOON, scenario)


def test_the_engine_ends_with_the_service(tmp_path: Path) -> None:
    async def scenario() -> int:
        store = open_store(tmp_path)
        service = Service(_settings(tmp_path), store)
        await service.start()
        await service.wait_ready()
        pid = service.supervisor.pid
        assert pid is not None
        await service.close()
        store.close()
        return pid

    pid = within(SOON, scenario)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_engine_is_told_nothing_secret() -> None:
    kept = {
        "PATH": "p",
        "HF_HOME": "h",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "TOKENIZERS_PARALLELISM": "1",
    }
    secret = {
        "TINKER_API_KEY": "tml-x",
        "HF_TOKEN": "hf",
        "AWS_SECRET_ACCESS_KEY": "x",
        "TWINKLE_API_KEY": "x",
        "PGPASSWORD": "x",
        "ANYTHING": "x",
        "TWINKLE_SIGNING_SECRET": "x",
    }
    assert scrubbed({**kept, **secret}) == kept


def test_futures_of_one_tenant_are_not_anothers(tmp_path: Path) -> None:
    async def scenario() -> Future:
        store = open_store(tmp_path)
        service = Service(_settings(tmp_path), store)
        await service.start()
        client = Client(service, store)
        await client.begin("s:train:0")
        accepted = await client.ask("s:train:0", "forward", _pass(1, forward=True))
        told = await answer(service, accepted.request)
        with pytest.raises(NotFound, match=r"request .* does not exist"):
            await service.wait(accepted.request, "bob", 0.1)
        await service.close()
        store.close()
        return told

    assert within(SOON, scenario).status == "done"
