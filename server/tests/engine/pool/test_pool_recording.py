"""What is recorded of rows that a real model trains: the mismatch is that between its sampler and its passes."""

import numpy as np
import orjson
import pytest
from server_pool import Bench, answer, datum, request

from twinkle_server.engine.executor import Pass
from twinkle_server.engine.recording import Rollout


def test_a_recorded_row_has_the_log_probabilities_that_the_client_gets(bench: Bench) -> None:
    bench.create("a")
    bench.shake("a")
    sequences, _ = bench.sample([1, 2, 3], bench.save("a", "sampler_weights"), max_tokens=6, seed=5, stop=[])
    tokens = [1, 2, 3, *sequences[0].tokens.tolist()]
    old = np.concatenate([np.zeros(2), sequences[0].logprobs]).astype(np.float32)
    inputs = {
        "target_tokens": np.array(tokens[1:]), "logprobs": old, "advantages": (old != 0) * np.float32(2),
        "rewards": np.array([0.5], np.float32),
    }  # fmt: skip
    results, cost = bench.executor.run([Pass("a", request([(tokens[:-1], inputs)], "importance_sampling"), 1)])
    [logprobs], _ = answer(results[0])
    recorded = cost.recorded[0]
    figures = orjson.loads(recorded.figures)
    rollout = Rollout.parse(recorded.body)
    assert np.array_equal(rollout.trained, logprobs)
    assert rollout.tokens.tolist() == tokens
    difference = np.abs(logprobs.astype(np.float64) - old)[2:]
    assert figures["mismatch"] == pytest.approx([difference.sum(), 6, difference.max()], abs=1e-6)
    assert difference.max() < 1e-3, "sampling and training agree on the same weights"
    assert figures["reward"] == [0.5, 1]
    assert figures["advantage"] == [12.0, 6]


def test_a_replay_is_not_recorded_again(bench: Bench) -> None:
    bench.create("a")
    payload = request([datum(9, 1)], "cross_entropy")
    _, cost = bench.executor.run([Pass("a", payload, 1), Pass("a", payload, 2, record=False)])
    assert list(cost.recorded) == [0]


@pytest.mark.parametrize("rewards", [np.ones(3, np.float32), np.array([np.nan], np.float32)])
def test_rewards_that_fit_no_row_are_refused(bench: Bench, rewards: np.ndarray) -> None:
    bench.create("a")
    tokens, inputs = datum(9, 1)
    with pytest.raises(Exception, match="datum 0: rewards must"):
        bench.run("a", [(tokens, inputs | {"rewards": rewards})])
