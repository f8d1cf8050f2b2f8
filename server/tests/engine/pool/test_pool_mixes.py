"""Others change nothing: whatever eight tenants send at the same time, each gets what it would get alone."""

import random

import numpy as np
import pytest
from rounding import FACTOR, USELESS, gap, units
from server_pool import answer, datum, drawn, request

from twinkle_server.engine.executor import Pass
from twinkle_torch.numerics import RoundingNoise

QUEUES = "abcdefgh"
RANKS = (2, 4, 8, 16)
DRAWN = ("importance_sampling", "ppo", "cispo", "dro", "gspo")


@pytest.fixture
def house(fresh):
    """Eight models of several ranks, none of them where it began."""
    bench = fresh(extra={"pass_tokens": 1024})  # what comes together is not cut
    for at, queue_id in enumerate(QUEUES):
        bench.create(queue_id, rank=RANKS[at % 4], seed=at)
        bench.shake(queue_id, seed=at)
    return bench


@pytest.fixture
def flights(house, monkeypatch):
    """How many operations each pass through the model had."""
    found = []
    passes = house.pool.passes
    forward = passes.forward

    def counted(parts, free):
        found.append(len({part.work for part in parts}))
        return forward(parts, free)

    monkeypatch.setattr(passes, "forward", counted)
    return found


def row(loss, length, seed):
    if loss == "cross_entropy":
        return datum(length, seed)
    mask = {"sequence_ratio_mask": np.ones(length, np.float32)} if loss == "gspo" else {}
    return drawn(length, seed, **mask)


def mix(draw):
    """Return what comes together: one or two operations of each of several tenants, of any loss and shape."""
    made = []
    for queue_id in draw.sample(QUEUES, draw.randint(2, 8)):
        for number in range(draw.choice([1, 1, 2])):
            loss = draw.choice(("cross_entropy", *DRAWN))
            data = [row(loss, draw.choice([1, 2, 7, 16]), draw.randrange(10_000)) for _ in range(draw.randint(1, 3))]
            made.append(Pass(queue_id, request(data, loss, forward=draw.random() < 0.25), number))
    return made


def done(house, passes):
    """Do passes in one call and return the answers, and the gradients that they added up to; these are forgotten."""
    found, _ = house.executor.run(passes)
    gradients = {}
    for queue_id in QUEUES:
        gradient = house.tenant(queue_id).flat.grad
        gradients[queue_id] = None if gradient is None else gradient.clone()
        house.step(queue_id, learning_rate=0.0)
    return [answer(one) for one in found], gradients


def moved(one, other):
    """Return how far numbers are apart at most, logs and metrics each by themselves."""
    (mine, said), (theirs, expected) = one, other
    logs = max(float(np.abs(np.subtract(a, b)).max(initial=0)) for a, b in zip(mine, theirs, strict=True))
    assert said.keys() == expected.keys()
    return logs, {name: abs(said[name] - expected[name]) for name in said}


def compare(house, passes):
    """Demand of each operation the numbers that it gets alone, up to FACTOR times what rounding does to this mix."""
    together, gradients = done(house, passes)
    with RoundingNoise(0, units=units()):
        noisy, noisy_gradients = done(house, passes)
    limits = [moved(one, other) for one, other in zip(noisy, together, strict=True)]
    logs = max(limit for limit, _ in limits)  # of all: a few draws may leave a short row as it was
    queues = [queue_id for queue_id in QUEUES if gradients[queue_id] is not None]
    gradual = max((gap(noisy_gradients[queue_id], gradients[queue_id]) for queue_id in queues), default=0.0)
    assert FACTOR * logs < 1e-2, "a fault would be as small"
    assert FACTOR * gradual < USELESS
    for queue_id in QUEUES:
        mine = [at for at, item in enumerate(passes) if item.queue_id == queue_id]
        for at in mine:
            found, _ = house.executor.run([passes[at]])
            ours = together[at]
            apart, metrics = moved(ours, answer(found[0]))
            assert apart <= FACTOR * logs
            for name, difference in metrics.items():
                # A metric is a sum over tokens of what a log-probability moves, magnified by the ratios of its loss.
                limit = max(limits[at][1][name], logs * sum(map(len, ours[0])), EPSILON * abs(ours[1][name]))
                assert difference <= FACTOR * limit, name
        gradient = done(house, [])[1][queue_id]
        assert (gradient is None) == (gradients[queue_id] is None)
        if gradient is not None:
            assert gap(gradients[queue_id], gradient) <= FACTOR * max(gradual, EPSILON)


EPSILON = float(np.finfo(np.float32).eps)


def run(house, flights, seeds):
    for seed in seeds:
        passes = mix(random.Random(seed))
        flights.clear()
        compare(house, passes)
        queues = {item.queue_id for item in passes}
        assert max(flights) == len(queues), (
            "they went through the model together, one operation of each model at a time"
        )
        house.shake(QUEUES[seed % 8], seed=seed)


@pytest.mark.full
def test_random_mixes_of_eight_tenants_are_as_if_each_were_alone(house, flights):
    run(house, flights, range(8))


@pytest.mark.soak
def test_two_hundred_random_mixes_of_eight_tenants_are_as_if_each_were_alone(house, flights):
    run(house, flights, range(100, 300))


def life(bench):
    """A model from its creation on; everything that it says and is."""
    bench.create("a", rank=8, seed=5)
    said = []
    for at in range(3):
        said.append(bench.run("a", [datum(20, at)])[0][0])
        said.append(np.float64(bench.step("a", learning_rate=1e-2)["grad_norm"]))
    bench.run("a", [datum(9, 9)])  # and something is left that no step has used
    return [*said, *(value.numpy() for value in bench.weights("a").values())]


def test_a_second_life_in_the_place_of_the_first_is_equal_to_the_bit(bench):
    first = life(bench)
    for queue_id in "bcd":
        bench.create(queue_id, rank=8, seed=7)
        bench.shake(queue_id)
    bench.executor.remove("a")
    second = life(bench)
    assert len(first) == len(second) > 10
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one, other)
