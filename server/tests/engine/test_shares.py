"""Token-fair scheduling: whatever the operations, tenants with work get tokens in proportion to their weights."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_engine import LedgerEngine

from twinkle_server.engine import scheduler as scheduling
from twinkle_server.engine.executor import Executor
from twinkle_server.engine.queues import Task, TaskQueues
from twinkle_server.engine.samples import Sampled
from twinkle_server.engine.scheduler import EXPECTED, Sampling, Scheduler, Weights
from twinkle_server.operations import Sample
from twinkle_server.store.records import Key
from twinkle_server.tenancy.quotas import weights_of

WEIGHT = st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0, 10.0])


def weights_from(values: Mapping[str, float]) -> Weights:
    weights = Weights()
    weights.put(values)
    return weights


@dataclass
class Tenant:
    """A tenant who always has work, in several models.

    Attributes:
        weight: its share.
        largest: tokens of its largest operation.
        models: number of its queues.
    """

    weight: float
    largest: int
    models: int
    served: int = 0
    sizes: Random = field(default_factory=lambda: Random(0))


@st.composite
def tenants(draw: st.DrawFn) -> dict[str, Tenant]:
    found = draw(st.lists(st.tuples(WEIGHT, st.integers(20, 600), st.integers(1, 3)), min_size=2, max_size=5))
    return {f"t{place}": Tenant(*fields, sizes=Random(place)) for place, fields in enumerate(found)}


def refill(queues: TaskQueues, name: str, tenant: Tenant, numbers: Iterator[int], budget: int) -> None:
    """Let a tenant have more work than a pass holds, so that it always waits."""
    for model in range(tenant.models):
        queue_id = f"{name}-{model}"
        waiting = sum(task.tokens for task in queues._waiting.get(queue_id, ()))
        while waiting <= budget + 2 * tenant.largest:
            tokens = tenant.sizes.randint(1, tenant.largest)
            waiting += tokens
            queues.add(Task(next(numbers), queue_id, 0, "forward_backward", name, tokens))


@settings(deadline=None, max_examples=30)
@given(tenants(), st.integers(64, 2048))
def test_training_never_differs_from_the_shares_by_more_than_two_rounds_and_an_operation(
    found: dict[str, Tenant], budget: int
) -> None:
    """The clock is the number of tokens computed; the bound holds after each pass, not only in the long run."""
    queues, numbers = TaskQueues(), count()
    scheduler = Scheduler(queues, weights_from({name: tenant.weight for name, tenant in found.items()}))
    round_of_one = budget / sum(tenant.weight for tenant in found.values())
    for _ in range(60):
        for name, tenant in found.items():
            refill(queues, name, tenant, numbers, budget)
        turn = scheduler.next(budget)
        assert len(turn) == 1 or sum(task.tokens for task in turn) <= budget
        for task in turn:
            found[task.tenant].served += task.tokens
        shares = {name: tenant.served / tenant.weight for name, tenant in found.items()}
        slack = max(tenant.largest / tenant.weight for tenant in found.values())
        assert max(shares.values()) - min(shares.values()) <= 2 * round_of_one + slack + 1e-3, (shares, found)


def test_passes_stay_full_however_the_weights_are() -> None:
    """Who is admitted first changes with the weights; how much of a pass is used does not."""
    queues, numbers = TaskQueues(), count()
    found = {"heavy": Tenant(9.0, 10, 3), "light": Tenant(1.0, 10, 3)}
    scheduler = Scheduler(queues, weights_from({"heavy": 9.0, "light": 1.0}))
    for _ in range(50):
        for name, tenant in found.items():
            refill(queues, name, tenant, numbers, 1000)
        turn = scheduler.next(1000)
        assert sum(task.tokens for task in turn) > 1000 - 10
        assert len({task.tenant for task in turn}) == 2


def test_the_smallest_weight_is_served_too() -> None:
    queues = TaskQueues()
    for number in range(2000):
        queues.add(Task(number, "heavy", number, "forward_backward", "heavy", 100))
    queues.add(Task(5000, "light", 0, "forward_backward", "light", 100))
    scheduler = Scheduler(queues, weights_from({"heavy": 1000.0, "light": 1.0}))
    order = [task.tenant for _ in range(2001) for task in scheduler.next(500)]
    assert order.index("light") <= 1000 + 5, "after its share of the tokens, not at the end"


def test_a_new_weight_holds_from_the_next_pass_on() -> None:
    queues, weights = TaskQueues(), Weights()
    for number in range(4000):
        for tenant in "ab":
            queues.add(Task(number, tenant, number, "forward_backward", tenant, 10))
    scheduler = Scheduler(queues, weights)

    def served() -> Counter[str]:
        return Counter(task.tenant for _ in range(20) for task in scheduler.next(400))

    assert served() == {"a": 400, "b": 400}
    weights.put({"a": 3.0})
    assert served() == {"a": 600, "b": 200}
    weights.put({})
    assert served() == {"a": 400, "b": 400}


class Clockwork(Executor):
    """Decodes a token of every running sequence a step, and counts the tokens of each tenant; a clock of steps.

    The prompt says how long its sequences are.
    """

    def __init__(self) -> None:
        super().__init__(LedgerEngine("base"), "base")
        self.owner: dict[int, str] = {}
        self.computed: Counter[str] = Counter()
        self._sampled: Counter[int] = Counter()
        self._left: dict[int, list[int]] = {}

    def sample(self, key: int, sample: Sample, source: Path | None, cache_salt: str | None = None) -> None:
        self.computed[self.owner[key]] += len(sample.tokens)
        self._left[key] = [1 + (sample.tokens[0] + place) % sample.tokens[1] for place in range(sample.count)]

    def decode(self) -> list[Sampled]:
        ended = []
        for key, left in list(self._left.items()):
            tokens = sum(one > 0 for one in left)
            self.computed[self.owner[key]] += tokens
            self._sampled[key] += tokens
            self._left[key] = [one - 1 for one in left]
            if max(self._left[key]) <= 0:
                del self._left[key]
                ended.append(Sampled(key, b"x", tokens=self._sampled.pop(key)))
        return ended


LONGEST, MOST, SLOTS, PROMPT = 150, 4, 16, 60
"""Tokens of a sequence, sequences of a request, sequences that run together, and tokens of a prompt, at most."""
LARGEST = PROMPT + MOST * LONGEST


@dataclass
class Asking:
    """A tenant who always has requests that wait."""

    weight: float
    length: int
    most: int
    prompt: int


class SamplingService:
    """A service that samples for tenants, step by step.

    Args:
        found: the tenants, by name.
        seed: of the requests.
    """

    def __init__(self, found: Mapping[str, Asking], seed: int = 0) -> None:
        self.found, self.decoder, self._draw, self._numbers = dict(found), Clockwork(), Random(seed), count()
        self.weights = weights_from({name: tenant.weight for name, tenant in found.items()})
        self.sampling = Sampling(self.decoder, lambda folder: None, lambda message: None, self.weights)

    def step(self) -> None:
        for name, tenant in self.found.items():
            while len(self.sampling._waiting.get(name, ())) < 2 * SLOTS:
                number = next(self._numbers)
                self.decoder.owner[number] = name
                rest = self._draw.randint(2, tenant.prompt) - 2
                tokens = [self._draw.randint(0, 10**6), tenant.length, *[1] * rest]
                sample = Sample(tokens, self._draw.randint(1, tenant.most), max_tokens=LONGEST)
                self.sampling.add(Task(number, name, number, "sample", name, payload=sample.dump()))
        self.sampling.admit()
        self.sampling.decode()


@pytest.fixture(autouse=True)
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "TOGETHER", SLOTS)


ASKING = st.builds(Asking, WEIGHT, st.integers(1, LONGEST), st.integers(1, MOST), st.integers(2, PROMPT))


def bound(weights: Iterable[float]) -> float:
    """Return how far the shares may differ: what is charged in advance for the sequences that run, and a request."""
    return ((SLOTS + MOST) * max(LONGEST, EXPECTED) + 2 * LARGEST) / min(weights)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ASKING, min_size=2, max_size=4), st.integers(0, 2**16))
def test_sampling_never_differs_from_the_shares_by_more_than_what_runs_at_once(found: list[Asking], seed: int) -> None:
    service = SamplingService({f"t{place}": tenant for place, tenant in enumerate(found)}, seed)
    allowed = bound(tenant.weight for tenant in found)
    for _ in range(600):
        service.step()
        shares = [service.decoder.computed[name] / tenant.weight for name, tenant in service.found.items()]
        assert max(shares) - min(shares) <= allowed, (shares, allowed)


@pytest.mark.parametrize(("heavy", "light"), [(3.0, 1.0), (1.0, 1.0), (1.0, 0.25)])
def test_long_prompts_and_many_short_answers_cost_what_they_compute(heavy: float, light: float) -> None:
    service = SamplingService({"long": Asking(heavy, LONGEST, MOST, 2), "short": Asking(light, 2, 1, PROMPT)})
    for _ in range(6000):
        service.step()
    computed = service.decoder.computed
    assert computed["long"] / computed["short"] == pytest.approx(heavy / light, rel=0.1)


def test_who_was_away_has_saved_up_no_claim_and_owes_nothing() -> None:
    asking = Asking(1.0, 20, 2, 10)
    service = SamplingService({"old": asking})
    for _ in range(1000):
        service.step()
    before = service.decoder.computed["old"]
    service.found["new"] = asking
    for _ in range(2000):
        service.step()
    old, new = service.decoder.computed["old"] - before, service.decoder.computed["new"]
    assert abs(old - new) <= bound([1.0])
    assert min(old, new) > 4 * bound([1.0]), "long enough that a claim of the time alone would show"


def test_a_refused_request_costs_its_prompt_alone() -> None:
    service = SamplingService({"a": Asking(1.0, 10, 1, 3)})
    service.step()
    for number in list(service.sampling.running):
        assert service.sampling.cancel(number)
    assert service.sampling._counters["a"] <= SLOTS * (3 + 1)


def key(tenant: str, **quotas: float) -> Key:
    return Key(f"{tenant}{quotas}", tenant, tenant, "user", "", "", 0.0, quotas)


def test_the_largest_weight_of_a_tenants_keys_counts() -> None:
    keys = [key("a", weight=2.0), key("a", weight=3.0), key("b"), key("c", weight=0.5), key("d", weight=0.5), key("d")]
    assert weights_of(keys) == {"a": 3.0, "c": 0.5}
