"""Everything at once: random work of several models, compared with what a list of their operations says."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from ledger_engine import read_ledger_metrics
from server_engine import Engine, engine, request

from twinkle_server.engine import messages
from twinkle_server.engine.messages import Message
from twinkle_server.operations import Load, Sample, Save
from twinkle_server.wire import codec


@dataclass(frozen=True)
class State:
    applied: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    steps: int = 0


@dataclass
class Model:
    """A model as it must be, and the outcomes that it owes."""

    state: State = State()
    number: int = 1
    checkpoints: list[tuple[str, State]] = field(default_factory=list)
    published: list[tuple[str, State]] = field(default_factory=list)


class History:
    """Sends random work and knows what must come of it."""

    def __init__(self, made: Engine, seed: int, models: int) -> None:
        self.made, self.draw = made, random.Random(seed)
        self.models = {f"m{n}": Model() for n in range(models)}
        self.forwards: dict[int, State] = {}
        self.samples: dict[int, State] = {}
        self.bad: set[int] = set()
        self.cancelled: set[int] = set()
        self.operations = [made.create(queue_id, tenant=queue_id) for queue_id in self.models]
        self.letting_go: set[str] = set()

    def go(self, count: int) -> None:
        for _ in range(count):
            queue_id = self.draw.choice(list(self.models))
            actions = [self.backward] * 6 + [self.step] * 3 + [self.forward] * 2 + [self.save, self.load, self.sample]
            self.draw.choice([*actions, self.bad_one, self.snapshot, self.cancel_sample, self.let_go])(queue_id)
        self.made.done(*self.operations)

    def put(self, queue_id: str, kind: str, payload: bytes) -> int:
        model = self.models[queue_id]
        self.operations.append(self.made.run(queue_id, model.number, kind, payload, tenant=queue_id, tokens=2))
        model.number += 1
        return self.operations[-1]

    def backward(self, queue_id: str) -> None:
        model, token = self.models[queue_id], self.draw.randrange(1, 2**30)
        model.state = replace(model.state, pending=(*model.state.pending, token))
        self.put(queue_id, "forward_backward", request([token]))

    def step(self, queue_id: str) -> None:
        state = self.models[queue_id].state
        self.models[queue_id].state = State(state.applied + state.pending, (), state.steps + 1)
        self.put(queue_id, "optim_step", b"{}")

    def forward(self, queue_id: str) -> None:
        self.forwards[self.put(queue_id, "forward", request([1], forward=True))] = self.models[queue_id].state

    def bad_one(self, queue_id: str) -> None:
        self.bad.add(self.put(queue_id, "forward_backward", request([5], loss="nonsense")))

    def save(self, queue_id: str) -> None:
        model = self.models[queue_id]
        folder = f"checkpoints/{queue_id}x{model.number}"
        kind, folders = self.draw.choice([("weights", model.checkpoints), ("sampler_weights", model.published)])
        folders.append((folder, replace(model.state, pending=())))
        self.put(queue_id, "save", Save(folder, kind).dump())

    def load(self, queue_id: str) -> None:
        model = self.models[queue_id]
        if model.checkpoints:
            folder, model.state = self.draw.choice(model.checkpoints)
            self.put(queue_id, "load", Load(folder, "p", optimizer=True).dump())

    def sample(self, queue_id: str) -> None:
        if published := self.models[queue_id].published:
            folder, state = self.draw.choice(published)
            self.made.done(*self.operations)  # a service asks for a checkpoint only when it is there
            self.samples[self.made.sample(Sample([1], source=folder), tenant=queue_id)] = state
            self.operations.append(max(self.samples))

    def cancel_sample(self, queue_id: str) -> None:
        operation = self.made.sample(Sample([1]), tenant=queue_id)
        self.made.send(messages.CANCEL, id=operation)
        self.cancelled.add(operation)
        self.operations.append(operation)

    def snapshot(self, queue_id: str) -> None:
        self.made.send(messages.SNAPSHOT, queue_id=queue_id)

    def let_go(self, queue_id: str) -> None:
        """Detach a model with all that waits in its queue before that, and make it again."""
        self.made.send(messages.DETACH, queue_id=queue_id)
        self.made.until(lambda m: m.type == messages.DETACHED and m.head["queue_id"] == queue_id)
        told = [m.head for m in self.made.seen if m.type == messages.SNAPSHOTTED and m.head["queue_id"] == queue_id]
        self.made.send(messages.RESTORE, queue_id=queue_id, folder=told[-1]["folder"])

    def check(self) -> None:
        for message in self.made.seen:
            if message.type == messages.DONE:
                self.check_outcome(message)
            elif message.type == messages.RESTORED:
                assert message.head["error"] is None
        done = [message.head["id"] for message in self.made.seen if message.type == messages.DONE]
        assert sorted(done) == sorted(self.operations), "each once"

    def check_outcome(self, message: Message) -> None:
        operation, error = message.head["id"], message.head["error"]
        if operation in self.cancelled:
            return
        assert bool(error) == (operation in self.bad), error
        if operation in self.forwards:
            _, metrics = codec.read_forward_backward_output(message.body)
            state = self.forwards[operation]
            assert tuple(n >> 32 for n in read_ledger_metrics("applied", metrics)) == state.applied
            assert tuple(n >> 32 for n in read_ledger_metrics("pending", metrics)) == state.pending
        elif operation in self.samples:
            [text], _ = codec.read_sample_response(message.body)
            state = self.samples[operation]
            assert tuple(int(token) for token in text.tokens) == (state.steps, len(state.applied), *state.applied)


def run(data: Path, seed: int, count: int) -> None:
    draw = random.Random(seed)
    chaos = {
        "seconds_per_token": draw.choice([0.0, 1e-4]),
        "seconds_per_decode": draw.choice([0.0, 1e-4]),
        "memory_every": draw.choice([0, 7, 20]),
    }
    with engine(data, extra=chaos, snapshot_steps=draw.choice([1, 5, 20]), snapshot=draw.choice([0.01, 3600])) as made:
        history = History(made, seed, models=draw.randint(1, 5))
        history.go(count)
        for queue_id in history.models:
            history.forward(queue_id)
        made.done(*history.operations)
        history.check()


@pytest.mark.parametrize("seed", range(2))
def test_every_outcome_is_what_the_list_of_operations_says(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed, 200)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_every_outcome_of_a_long_history_is_what_the_list_of_operations_says(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed, 3000)
