"""How passes are cut so that sampling need not wait: by time, whatever the pass, and never within a row."""

import numpy as np
import pytest
from server_pool import datum, drawn, request

from twinkle.model.pool import Usage
from twinkle_server.engine.backend import Pass
from twinkle_server.engine.pool.pace import Pace


def usage(tokens, flops, computed=None):
    return Usage(tokens, tokens if computed is None else computed, 0, flops)


def test_a_piece_takes_its_time_whichever_kind_of_pass_was_measured():
    pace = Pace(0.5)
    pace.measured([(False, usage(1000, 2000.0))], 1.0)
    assert pace.tokens(training=False) == 500
    assert 100 <= pace.tokens(training=True) <= 250, "a gradient costs more, and nobody knows yet how much"
    pace.measured([(True, usage(1000, 4000.0))], 2.0)
    assert pace.tokens(training=True) == 250
    assert pace.tokens(training=False) == 500, "the same operations a second are more tokens of a forward"


def test_a_long_pass_says_more_than_a_short_one():
    pace = Pace(1.0)
    pace.measured([(True, usage(1000, 1000.0))], 1.0)
    pace.measured([(True, usage(1, 1.0))], 0.01)  # at a tenth of the speed
    assert 950 <= pace.tokens(training=True) <= 1000
    pace.measured([(True, usage(1000, 1000.0))], 10.0)
    assert pace.tokens(training=True) < 150


def test_tokens_that_were_shared_are_not_taken_for_cheap_ones():
    pace = Pace(1.0)
    pace.measured([(True, usage(1000, 100.0, computed=100))], 1.0)
    assert pace.tokens(training=True) == 100


def test_what_cost_nothing_says_nothing():
    pace = Pace(1.0)
    pace.measured([(True, usage(0, 0.0))], 1.0)
    assert not pace.known
    assert pace.tokens(training=True) == 1


@pytest.fixture
def pieces(bench, monkeypatch):
    """The tokens of each piece that went through the model."""
    found = []
    passes = bench.backend.model.pool.passes
    forward = passes.forward
    monkeypatch.setattr(
        passes, "forward", lambda parts, free: (found.append(sum(p.tokens for p in parts)), forward(parts, free))[1]
    )
    return found


def test_the_first_pass_of_a_process_is_cut_by_what_a_small_one_took(bench, pieces):
    bench.create("a")
    bench.run("a", [datum(5, at) for at in range(20)])
    assert pieces[:2] == [32, 32], "a tiny model and half a second: the pass itself is not cut"
    assert pieces[2:] == [100]


@pytest.mark.parametrize("forward", [False, True])
def test_a_pass_is_cut_whether_anybody_samples_or_not_but_not_within_a_row(bench, pieces, monkeypatch, forward):
    bench.create("a")
    bench.create("b")
    monkeypatch.setattr(bench.backend._training._pace, "tokens", lambda training: 50 if training is not forward else 1)
    data = [[datum(n, n) for n in (20, 20, 20, 120, 30)], [datum(10, 1)]]
    payloads = [request(rows, forward=forward) for rows in data]
    bench.backend._training._pace.measured([(True, usage(1, 1.0))], 1.0)
    bench.backend.run([Pass(lane, payload, 1) for lane, payload in zip("ab", payloads, strict=True)])
    assert pieces == [40, 20, 120, 40]


def test_a_pass_that_failed_does_not_count_as_slow(bench):
    bench.create("a")
    bench.run("a", [datum(9, 1)])
    pace = bench.backend._training._pace
    before = pace.tokens(training=True)
    broken = request([drawn(9, 1, logprobs=np.full(9, -1000.0, np.float32))], "importance_sampling")
    found, _ = bench.backend.run([Pass("a", broken, 1), Pass("a", request([datum(9, 2)]), 2)])
    assert isinstance(found[0], Exception)
    assert not isinstance(found[1], Exception)
    assert pace.tokens(training=True) == before
