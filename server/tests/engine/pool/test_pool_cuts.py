"""How passes are cut so that sampling need not wait: by tokens, never by speed, and never within a row."""

import time

import pytest
from server_pool import datum, request

from twinkle_server.engine.executor import Pass
from twinkle_transformers.engine import default_pass_tokens


@pytest.fixture
def pieces(monkeypatch):
    """Return a function that notes the tokens of each piece that goes through a backend's model."""

    def watch(bench, slow=0.0):
        found = []
        passes = bench.pool.passes
        forward = passes.forward

        def noted(parts, free):
            found.append(sum(part.tokens for part in parts))
            time.sleep(slow)
            return forward(parts, free)

        monkeypatch.setattr(passes, "forward", noted)
        return found

    return watch


@pytest.mark.parametrize("forward", [False, True])
def test_a_pass_is_cut_by_tokens_but_not_within_a_row(fresh, pieces, forward):
    bench = fresh(extra={"pass_tokens": 50})
    assert bench.executor.pass_tokens == 50
    bench.create("a")
    bench.create("b")
    found = pieces(bench)
    data = [[datum(n, n) for n in (20, 20, 20, 120, 30)], [datum(10, 1)]]
    payloads = [request(rows, forward=forward) for rows in data]
    bench.executor.run([Pass(queue_id, payload, 1) for queue_id, payload in zip("ab", payloads, strict=True)])
    assert found == [40, 20, 120, 40]


def test_a_slow_machine_cuts_where_a_fast_one_does(fresh, pieces):
    found = {}
    for slow in (0.0, 0.05):
        bench = fresh(extra={"pass_tokens": 50})
        bench.create("a")
        found[slow] = pieces(bench, slow)
        for at in range(3):
            bench.run("a", [datum(20, at), datum(25, at), datum(30, at)])
    assert found[0.0] == found[0.05] == [45, 30] * 3


def test_operations_of_one_model_share_no_pass_whenever_they_come(fresh, pieces):
    bench = fresh()
    bench.create("a")
    bench.create("b")
    found = pieces(bench)
    bench.executor.run([Pass(queue_id, request([datum(9, at)]), at) for at, queue_id in enumerate("aaba")])
    assert found == [18, 9, 9], "the first of each model, and then one after the other"


def test_without_a_number_it_follows_from_the_sizes_of_model_and_device():
    assert default_pass_tokens("cpu", 1e5, 100_000) == 1024
    assert default_pass_tokens("cpu", 1.35e8, 100_000) == 128
    assert default_pass_tokens("cpu", 2.5e7, 100_000) == 960
    assert default_pass_tokens("cpu", 8e9, 100_000) == 128
    assert default_pass_tokens("cuda", 8e9, 100_000) == 3072
    assert default_pass_tokens("cuda", 7e10, 100_000) == 1024
    assert default_pass_tokens("cuda", 8e9, 2000) == 2000
