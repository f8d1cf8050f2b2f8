"""Sampling requests: who is next, what is dropped, and decode steps between and inside passes."""

import time
from collections import Counter
from pathlib import Path

import pytest
from ledger_engine import LedgerEngine

from twinkle_server.engine import messages
from twinkle_server.engine.errors import UserError
from twinkle_server.engine.executor import Executor
from twinkle_server.engine.messages import Message
from twinkle_server.engine.queues import Task
from twinkle_server.engine.samples import Sampled
from twinkle_server.engine.scheduler import EXPECTED, TOGETHER, Sampling, TimeSharing
from twinkle_server.operations import Generate, Sample


class Decoder(Executor):
    """A ledger in which requests end when the test says so."""

    def __init__(self) -> None:
        super().__init__(LedgerEngine("base"), "base")
        self.given: list[int] = []
        self.over: list[Sampled] = []
        self.steps = 0

    def sample(self, key: int, sample: Sample, source: Path | None, cache_salt: str | None = None) -> None:
        if sample.tokens == [13]:
            raise UserError("no 13")
        self.given.append(key)

    def decode(self) -> list[Sampled]:
        self.steps += 1
        over, self.over = self.over, []
        return over


def request(number: int, tenant: str = "t", count: int = 1, token: int = 1, alone: bool = False) -> Task:
    return Task(number, "s", number, "sample", tenant, alone=alone, payload=Sample([token], count=count).dump())


@pytest.fixture
def decoder() -> Decoder:
    return Decoder()


@pytest.fixture
def told() -> list[Message]:
    return []


@pytest.fixture
def sampling(decoder: Decoder, told: list[Message]) -> Sampling:
    return Sampling(decoder, lambda folder: None, told.append)


def test_a_tenant_with_one_request_does_not_wait_for_anothers_thousand(sampling: Sampling, decoder: Decoder) -> None:
    for number in range(1000):
        sampling.add(request(number, "greedy"))
    sampling.admit()
    assert len(decoder.given) == TOGETHER
    sampling.add(request(5000, "modest"))
    decoder.over = [Sampled(0, b"x")]
    sampling.decode()
    sampling.admit()
    assert decoder.given[-1] == 5000


def test_tenants_who_want_more_than_there_is_are_charged_the_same_number_of_tokens(
    sampling: Sampling, decoder: Decoder
) -> None:
    sizes = {"a": 1, "b": 8, "c": 16}
    for number in range(900):
        tenant = "abc"[number % 3]
        sampling.add(request(number, tenant, sizes[tenant]))
    sampling.admit()
    running, charged = Counter[str](), Counter[str]()
    for task in sampling.running.values():
        running[task.tenant] += sizes[task.tenant]
        charged[task.tenant] += (
            1 + sizes[task.tenant] * EXPECTED
        )  # the prompt, and what its answers are thought to take
    assert max(charged.values()) - min(charged.values()) <= 1 + 16 * EXPECTED, "a request of the largest kind"
    assert sum(running.values()) < TOGETHER + 16


def test_a_request_with_more_sequences_than_run_together_is_not_left_out(sampling: Sampling, decoder: Decoder) -> None:
    sampling.add(request(1, count=2 * TOGETHER))
    sampling.add(request(2))
    sampling.admit()
    assert decoder.given == [1]
    decoder.over = [Sampled(1, b"x")]
    sampling.decode()
    sampling.admit()
    assert decoder.given == [1, 2]


def test_a_request_that_must_be_alone_waits_and_is_waited_for(sampling: Sampling, decoder: Decoder) -> None:
    for task in (request(1), request(2, alone=True), request(3)):
        sampling.add(task)
    sampling.admit()
    assert decoder.given == [1]
    decoder.over = [Sampled(1, b"x")]
    sampling.decode()
    sampling.admit()
    assert decoder.given == [1, 2]
    decoder.over = [Sampled(2, b"x")]
    sampling.decode()
    sampling.admit()
    assert decoder.given == [1, 2, 3]


def test_a_cancelled_request_leaves_wherever_it_is(sampling: Sampling, decoder: Decoder, told: list[Message]) -> None:
    for number in range(3):
        sampling.add(request(number, count=TOGETHER))
    sampling.admit()
    assert sampling.cancel(2)
    assert sampling.cancel(0)
    assert not sampling.cancel(0)
    sampling.admit()
    assert decoder.given == [0, 1]
    decoder.over = [Sampled(0, b"x"), Sampled(1, b"x")]
    sampling.decode()
    assert [message.head["id"] for message in told] == [1]
    assert len(sampling) == 0


def test_what_the_backend_refuses_is_told_and_takes_no_room(
    sampling: Sampling, decoder: Decoder, told: list[Message]
) -> None:
    sampling.add(request(1, token=13, count=TOGETHER))
    sampling.add(request(2))
    sampling.admit()
    assert decoder.given == [2]
    assert (told[0].head["id"], told[0].head["category"], told[0].head["error"]) == (1, "user", "no 13")


@pytest.fixture
def interleaving(sampling: Sampling, told: list[Message]) -> TimeSharing:
    return TimeSharing(sampling, lambda: None, told.append, seconds=0.5)


def test_the_clock_stands_still_while_others_decode(
    sampling: Sampling, decoder: Decoder, interleaving: TimeSharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0 + 5.0 * decoder.steps)
    sampling.add(request(1))
    sampling.admit()
    before = interleaving.clock()
    for _ in range(10):
        interleaving.decode()
    assert decoder.steps == 10
    assert interleaving.clock() == before


def test_what_is_under_way_is_told_again_after_decode_steps_inside_a_pass(
    sampling: Sampling, interleaving: TimeSharing, told: list[Message]
) -> None:
    sampling.add(request(7))
    interleaving.begin([1, 2])
    interleaving.train(interleaving.between)
    assert [message.head["ids"] for message in told if message.type == messages.BEGIN] == [[1, 2], [7], [1, 2]]


def test_what_kills_the_engine_while_it_is_taken_in_is_blamed_and_nobody_else(
    sampling: Sampling,
    decoder: Decoder,
    interleaving: TimeSharing,
    told: list[Message],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blamed: dict[int, list[int]] = {}
    monkeypatch.setattr(decoder, "sample", lambda key, *request: blamed.update({key: _under_way(told)}))
    sampling.add(request(1))
    sampling.add(request(2))
    sampling.admit()
    interleaving.decode()
    assert _under_way(told) == [1, 2]
    sampling.add(request(3))
    interleaving.begin([8, 9])
    interleaving.train(interleaving.between)
    assert _under_way(told) == [8, 9]
    sampling.add(request(4))
    sampling.admit()
    assert blamed == {1: [1], 2: [2], 3: [3], 4: [4]}


def _under_way(told: list[Message]) -> list[int]:
    found: list[int] = [message.head["ids"] for message in told if message.type == messages.BEGIN][-1]
    return found


def test_without_requests_nothing_is_told_between_the_parts_of_a_pass(
    interleaving: TimeSharing, told: list[Message]
) -> None:
    interleaving.begin([1, 2])
    interleaving.train(interleaving.between)
    assert len(told) == 1


def test_a_long_pass_in_which_nobody_sampled_is_not_made_up_for(
    sampling: Sampling, decoder: Decoder, interleaving: TimeSharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = 0
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0 * pieces + 0.25 * decoder.steps)

    def work() -> None:
        nonlocal pieces
        for pieces in range(1, 21):
            if pieces == 20:
                sampling.add(request(1))
            interleaving.between()

    interleaving.train(work)
    assert 4 <= decoder.steps <= 5, "as long as the last piece took, and not as long as the pass"


def test_requests_have_the_salt_of_their_tenant(told: list[Message]) -> None:
    """It keeps what the engine has computed of prompts apart, and does not contain the tenant's name."""

    class Salted(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.salts: dict[int, str | None] = {}

        def sample(self, key: int, sample: Sample, source: Path | None, cache_salt: str | None = None) -> None:
            self.salts[key] = cache_salt

        def generate(self, key: int, generate: Generate, source: Path | None, cache_salt: str | None = None) -> None:
            self.salts[key] = cache_salt

    decoder = Salted()
    sampling = Sampling(decoder, lambda folder: None, told.append)
    for number, tenant in enumerate(("ana", "bob", "ana")):
        sampling.add(request(number, tenant))
        payload = Generate([1], {}).dump()
        sampling.add(Task(10 + number, "", -1, "generate", tenant, payload=payload))
    sampling.admit()
    assert len(decoder.salts) == 6
    salts = decoder.salts
    assert salts[0] == salts[2] == salts[10] == salts[12] != salts[1] == salts[11]
    assert not any("ana" in (salt or "") for salt in salts.values())
