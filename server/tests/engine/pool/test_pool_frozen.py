"""Samplers are what their model was when it was saved, whatever is trained, saved, forgotten and made meanwhile."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from server_pool import datum

from twinkle_server.operations import Sample
from twinkle_server.wire.codec import read_sample_response

QUEUES = "abc"
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
CLOSE = 1e-3


@dataclass
class Sampler:
    """A saved one: its folder, how the model scored then, and what it would have said."""

    folder: Path
    scores: np.ndarray
    tokens: list[int]
    logprobs: np.ndarray


class AppState:
    """Models that are trained and saved at random, and requests that are under way meanwhile."""

    def __init__(self, bench, draw):
        self.bench, self.draw = bench, draw
        self.samplers = []
        self.inflight = {}  # of each model, the newest of those that move
        self.under_way = {}
        self.checked = 0
        self.reads = 0
        self._count = 0
        sources = bench.executor._samples._versions
        sources._kept = 0
        read = sources._read

        def counted(folder, *more):
            self.reads += 1
            return read(folder, *more)

        sources._read = counted
        self.base = bench.sample(PROMPT, max_tokens=1, prompt_logprobs=True)[1].logprobs[1:]
        for queue_id in QUEUES:
            self.make(queue_id)
            self.save(queue_id)
            self.move(queue_id)

    def make(self, queue_id):
        """The model goes, and another is made in its place."""
        self.bench.executor.remove(queue_id)
        self.bench.create(queue_id, rank=self.draw.choice([2, 4, 8]), seed=self.draw.randrange(1000))
        self.bench.shake(queue_id, seed=self.draw.randrange(1000))

    def train(self, queue_id):
        self.bench.run(queue_id, [datum(9, self.draw.randrange(10_000))])
        self.bench.step(queue_id, learning_rate=0.02)

    def scored(self, queue_id, tokens):
        """Return how the model scores all tokens but the first."""
        inputs = {"target_tokens": np.asarray(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
        [found], _ = self.bench.run(queue_id, [(tokens[:-1], inputs)], forward=True)
        return found

    def saved(self, queue_id):
        folder = self.bench.save(queue_id, "sampler_weights")
        [text], said = self.bench.sample(PROMPT, folder, max_tokens=6, temperature=0.0, stop=[], prompt_logprobs=True)
        tokens = text.tokens.tolist()
        scores = self.scored(queue_id, PROMPT + tokens)
        made = Sampler(folder, scores[: len(PROMPT) - 1], tokens, scores[len(PROMPT) - 1 :])
        self.compare(made, text, said)
        assert np.abs(made.scores - self.base).max() > 10 * CLOSE, "it is not the base model"
        return made

    def save(self, queue_id):
        self.samplers.append(self.saved(queue_id))

    def move(self, queue_id):
        self.inflight[queue_id] = self.saved(queue_id)

    def ask(self, queue_id):
        """Sample from any that was ever saved."""
        self.begin(self.draw.choice(self.samplers))

    def ask_moving(self, queue_id):
        """Sample from what moves with a model; it is what it is when the request comes."""
        self.begin(self.inflight[queue_id])

    def begin(self, sampler):
        self._count += 1
        key = 10**6 + self._count
        sample = Sample(PROMPT, max_tokens=6, temperature=0.0, stop=[], prompt_logprobs=True)
        self.bench.executor.sample(key, sample, sampler.folder)
        self.under_way[key] = sampler

    def decode(self, queue_id):
        self.hear(self.bench.executor.decode())

    def finish(self, queue_id="a"):
        for _ in range(200):
            self.hear(self.bench.executor.decode())
            if not self.under_way:
                return
        raise AssertionError("requests are not over after 200 steps")

    def hear(self, over):
        for one in over:
            assert one.error is None, one.error
            [text], said = read_sample_response(one.result)
            self.compare(self.under_way.pop(one.key), text, said)

    def compare(self, sampler, text, said):
        np.testing.assert_allclose(said.logprobs[1:], sampler.scores, rtol=0, atol=CLOSE)
        np.testing.assert_allclose(text.logprobs[0], sampler.logprobs[0], rtol=0, atol=CLOSE)
        if text.tokens.tolist() == sampler.tokens:  # else two tokens were as good as each other
            np.testing.assert_allclose(text.logprobs, sampler.logprobs, rtol=0, atol=CLOSE)
            self.checked += 1


def live(bench, seed, words):
    draw = random.Random(seed)
    house = AppState(bench, draw)
    kinds = [house.train] * 5 + [house.ask] * 4 + [house.ask_moving] * 3 + [house.decode] * 4
    kinds += [house.save, house.move, house.make, house.finish]
    asked = 0
    for _ in range(words):
        word = draw.choice(kinds)
        asked += word in (house.ask, house.ask_moving)
        if house.under_way and word in (house.save, house.move):
            house.finish()
        word(draw.choice(QUEUES))
    house.finish()
    assert house.checked >= 0.9 * asked, "they said what they would have said then"
    assert house.reads > len(house.samplers), "weights were forgotten and read again"


def test_samplers_are_frozen_among_random_interleavings(bench):
    live(bench, 1, 60)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 15))
def test_samplers_are_frozen_among_a_thousand_random_interleavings(bench, seed):
    live(bench, seed, 200)
