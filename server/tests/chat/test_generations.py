"""Streamed requests: parts are collected, ends are told, and present weights wait until a model is rebuilt."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from ledger_engine import LedgerEngine

from twinkle.engine import AdapterSpec
from twinkle_server.engine import messages
from twinkle_server.engine.executor import Executor
from twinkle_server.engine.messages import LinkClosed, Message
from twinkle_server.engine.queues import RESTORE, Task, TaskQueues
from twinkle_server.engine.scheduler import Sampling
from twinkle_server.errors import BadRequest, Busy, Unavailable
from twinkle_server.operations import Create, Generate, ModelInfo, Sample, Submission
from twinkle_server.runtime.generations import GenerationFailed, Generations
from twinkle_server.tenancy.auth import CURRENT, Caller
from twinkle_server.tenancy.quotas import Limited, Meter

GENERATE = Generate([1, 2, 3], {"max_tokens": 4, "num_samples": 2, "stop": []})


class Child:
    """An engine that remembers what it was sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.gone = False

    def put(self, message: Message) -> None:
        if self.gone:
            raise LinkClosed("gone")
        self.sent.append(message)


class Counted:
    """Metrics that remember what ended."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, str, int, str]] = []

    def finished(self, kind: str, outcome: str, seconds: float, tokens: int, tenant: str) -> None:
        self.ended.append((kind, outcome, tokens, tenant))


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def generations(counted: Counted) -> Generations:
    return Generations(2, counted)  # type: ignore[arg-type]


def tokens(*entries: list[Any]) -> Message:
    return Message(messages.TOKENS, {}, orjson.dumps(entries))


def test_a_slow_reader_gets_all_that_was_collected_at_once(generations: Generations, counted: Counted) -> None:
    async def scenario() -> None:
        child: Any = Child()
        generation = generations.open(child, "ana", GENERATE)
        key = child.sent[0].head["id"]
        generations.tokens(tokens([key, [[0, [5], [-1.0], [], None], [1, [6], [-2.0], [], None]], None]))
        generations.tokens(tokens([key, [[0, [7], [None], [], "stop"]], None], [-999, [[0, [1], [], [], None]], None]))
        parts = await generation.parts()
        assert [(part.sample, part.tokens, part.stop_reason) for part in parts] == [
            (0, [5], None), (1, [6], None), (0, [7], "stop"),
        ]  # fmt: skip
        waiting = asyncio.ensure_future(generation.parts())
        await asyncio.sleep(0)
        assert not waiting.done()
        generations.tokens(tokens([key, [[1, [8], [-1.0], [], "length"]], {"cached_tokens": 2}]))
        assert [part.tokens for part in await waiting] == [[8]]
        assert await generation.parts() == []
        assert (generation.sampled, generation.end, len(generations)) == (4, {"cached_tokens": 2}, 0)

    asyncio.run(scenario())
    assert counted.ended == [("sample", "done", 7, "ana")]


@pytest.mark.parametrize(("category", "error"), [("user", BadRequest), ("server", GenerationFailed)])
def test_a_failure_reaches_its_reader(generations: Generations, category: str, error: type[Exception]) -> None:
    async def scenario() -> None:
        child: Any = Child()
        generation = generations.open(child, "ana", GENERATE)
        head = {"id": generation.key, "error": "no", "category": category, "extra": {}}
        assert generations.done(Message(messages.DONE, head))
        assert not generations.done(Message(messages.DONE, {**head, "id": 7}))
        with pytest.raises(error, match="no"):
            await generation.parts()

    asyncio.run(scenario())


def test_the_end_of_an_engine_ends_its_requests_and_cancelled_ones_are_told_to_it(
    generations: Generations, counted: Counted
) -> None:
    async def scenario() -> None:
        child: Any = Child()
        first, second = (generations.open(child, "ana", GENERATE) for _ in range(2))
        with pytest.raises(Busy, match="limit 2"):
            generations.check("ana")
        generations.check("bob")
        second.cancel()
        second.cancel()
        assert [(sent.type, sent.head["id"]) for sent in child.sent[2:]] == [(messages.CANCEL, second.key)]
        generations.fail_all("the engine died")
        with pytest.raises(Unavailable, match="repeat the request"):
            await first.parts()
        child.gone = True
        with pytest.raises(Unavailable):
            generations.open(child, "ana", GENERATE)

    asyncio.run(scenario())
    assert [outcome for _, outcome, _, _ in counted.ended] == ["cancelled", "server"]
    assert not generations.of_tenants


def test_the_engine_streams_every_step_and_says_when_it_is_over() -> None:
    executor = Executor(LedgerEngine("base"), "base")
    executor.create("m", Create(8, 1), None)
    told: list[Message] = []
    queues = TaskQueues()
    sampling = Sampling(executor, lambda folder: None, told.append, rebuilding=queues.rebuilding)
    head = {"id": -2, "tenant": "ana", "model": "m"}
    body = Generate([1], {"max_tokens": 2, "logprobs": 1}, model="m").dump()
    queues.add(Task(-1, "m", -1, RESTORE, ""))
    sampling.add(Task.of_generate(Message(messages.GENERATE, head, body)))
    sampling.add(Task(3, "s", 0, "sample", "ana", payload=Sample([1], max_tokens=1).dump()))
    sampling.admit()
    assert list(sampling.running) == [3], "its model is being rebuilt, and others of its tenant go on"
    queues.take(next(queues.heads()))
    sampling.admit()
    while sampling.running:
        sampling.decode()
    entries = [entry for message in told if message.type == messages.TOKENS for entry in orjson.loads(message.body)]
    parts = [part for _, found, _ in entries for part in found]
    assert [token for part in parts for token in part[1]] == [0, 0], "steps, and rows that were applied"
    assert {key for key, _, _ in entries} == {-2}
    assert [end is not None for _, _, end in entries] == [False, True]
    assert [message.head["id"] for message in told if message.type == messages.DONE] == [3]


@pytest.mark.parametrize("body", [Generate([1], {"no_such": 1}), Generate([1], {"top_p": 7})])
def test_an_invalid_request_is_the_fault_of_its_client(body: Generate) -> None:
    told: list[Message] = []
    sampling = Sampling(Executor(LedgerEngine("base"), "base"), lambda folder: None, told.append)
    sampling.add(Task.of_generate(Message(messages.GENERATE, {"id": -2, "tenant": "t", "model": None}, body.dump())))
    sampling.admit()
    assert [(message.head["id"], message.head["category"]) for message in told] == [(-2, "user")]
    assert len(sampling) == 0


@pytest.mark.parametrize("broken", [True, False])
def test_weights_that_could_not_be_restored_yet_are_not_the_fault_of_the_client(broken: bool) -> None:
    """The service sends requests for models that it has attached: one that is missing was not restored for now."""
    executor = Executor(LedgerEngine("base"), "base")
    if broken:
        executor.create("m", Create(8, 1), None)
    told: list[Message] = []
    sampling = Sampling(executor, lambda folder: None, told.append, broken=lambda queue_id: broken and queue_id == "m")
    body = Generate([1], {"max_tokens": 2}, model="m").dump()
    sampling.add(Task.of_generate(Message(messages.GENERATE, {"id": -2, "tenant": "t", "model": "m"}, body)))
    sampling.admit()
    assert [(message.head["id"], message.head["category"]) for message in told] == [(-2, "server")]
    assert "repeat the request" in told[0].head["error"]
    assert len(sampling) == 0


def test_a_training_checkpoint_and_an_export_give_the_same_weights(tmp_path: Path) -> None:
    engine = LedgerEngine("base")
    ref = engine.add("a", AdapterSpec(8))
    folders = [tmp_path / "state", tmp_path / "export"]
    for folder, saved in zip(folders, (engine.snapshot(ref), engine.export(ref, "base")), strict=True):
        folder.mkdir()
        saved.write(folder)
    executor, told = Executor(engine, "base"), []
    sampling = Sampling(executor, lambda folder: None if folder is None else tmp_path / folder, told.append)
    for key, folder in enumerate(folders):
        body = Generate([1], {"max_tokens": 2}, source=folder.name).dump()
        sampling.add(Task.of_generate(Message(messages.GENERATE, {"id": -2 - key, "tenant": "t"}, body)))
    sampling.admit()
    while sampling.running:
        sampling.decode()
    assert {message.type for message in told} == {messages.TOKENS}
    assert engine._ledgers.keys() == {ref}, "the temporary adapter is removed"
    told.clear()
    for key, folder in enumerate(folders):
        sampled = Sample([1], max_tokens=2, source=folder.name).dump()
        sampling.add(Task(7 + key, "s", key, "sample", "t", payload=sampled))
    sampling.admit()
    while sampling.running:
        sampling.decode()
    assert [message.type for message in told] == [messages.DONE] * 2
    assert told[0].body == told[1].body


def test_quotas_count_the_tokens_of_streams() -> None:
    class Service:
        info = ModelInfo("base", 10, 10)
        wait = cancel = queue_state = finish_session = heartbeat = awaited = submit_next = None

        async def generate(self, tenant: str, generate: Generate) -> Any:
            child: Any = Child()
            return Generations(9, None).open(child, tenant, generate)

        async def submit(self, submission: Submission) -> None:
            raise AssertionError

    async def scenario() -> None:
        service: Any = Service()
        limited = Limited(service, Meter(lambda tenant: 0, clock=lambda: 0.0))
        CURRENT.set(Caller("ana", "key", quotas={"tokens_per_second": 1.0}))  # ten tokens at once
        generation = await limited.generate("ana", GENERATE)
        generation.add([[0, [1] * 5, [], [], None]], None)
        generation = await limited.generate("ana", GENERATE)
        with pytest.raises(Busy, match="token rate"):
            await limited.generate("ana", GENERATE)

    asyncio.run(scenario())
