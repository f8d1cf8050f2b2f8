"""What the engine records of rows: compared with sums in float64, written out here."""

import numpy as np
import orjson
import pytest

from twinkle_server.engine.recording import Recorder, Rollout, TrainedRow


def sampled_row(seed: int, length: int = 12, prompt: int = 5, **fields: object) -> TrainedRow:
    draw = np.random.default_rng(seed)
    own = np.arange(length) >= prompt
    trained = -draw.random(length).astype(np.float32) - 0.1
    sampled = np.where(own, trained + draw.normal(0, 0.1, length), 0).astype(np.float32)
    advantages = np.where(own, 0.5, 0).astype(np.float32)
    row = TrainedRow(draw.integers(0, 99, length), draw.integers(0, 99, length), trained, None, sampled, advantages)
    for name, value in fields.items():
        setattr(row, name, value)
    return row


def test_figures_are_sums_over_the_sampled_positions() -> None:
    rows = [sampled_row(1, reward=1.0), sampled_row(2, prompt=2, reward=0.0), sampled_row(3)]
    figures = orjson.loads(Recorder().record(rows, -7.5, {"clipped": 3.0, "bad": float("nan")}).figures)
    positions = [5, 2, 5]
    differences = np.concatenate(
        [row.sampled[at:].astype(np.float64) - row.trained[at:] for row, at in zip(rows, positions, strict=True)]
    )
    assert figures["loss"] == -7.5
    assert figures["tokens"] == 36
    assert figures["rows"] == 3
    assert figures["kl"] == pytest.approx([differences.sum(), 24])
    assert figures["mismatch"] == pytest.approx([np.abs(differences).sum(), 24, np.abs(differences).max()])
    assert figures["advantage"] == pytest.approx([12.0, 24])
    assert figures["reward"] == [1.0, 2]
    assert figures["metrics"] == {"clipped": 3.0}


def test_rows_that_were_not_sampled_have_a_loss_and_tokens_only() -> None:
    weights = np.array([0, 0, 1, 0.5], np.float32)
    labels = np.array([1, 2, -100, 3])
    row = TrainedRow(np.arange(4), labels, np.full(4, -1, np.float32), weights)
    recorded = Recorder().record([row], 2.0, {})
    assert orjson.loads(recorded.figures) == {"loss": 2.0, "tokens": 1, "rows": 1}
    assert recorded.rollouts == []


def test_a_mask_says_which_positions_were_sampled() -> None:
    row = sampled_row(1, mask=np.array([0] * 10 + [1, 1]))
    [described] = Recorder().record([row], 0.0, {}).rollouts
    assert described["positions"] == 2
    difference = np.abs(row.trained[10:].astype(np.float64) - row.sampled[10:])
    assert described["mean"] == pytest.approx(difference.mean(), rel=1e-6)
    assert described["largest"] == pytest.approx(difference.max(), rel=1e-6)


def test_a_rollout_is_read_as_it_was_written() -> None:
    row = sampled_row(4, reward=2.0)
    recorded = Recorder().record([row], 0.0, {})
    [described] = recorded.rollouts
    rollout = Rollout.parse(recorded.body)
    assert rollout.tokens.tolist() == [row.tokens[0], *row.labels]
    assert np.isnan(rollout.sampled[:5]).all()
    assert np.array_equal(rollout.sampled[5:], row.sampled[5:])
    assert np.array_equal(rollout.trained, row.trained)
    assert np.array_equal(rollout.advantages, row.advantages)
    assert (described["reward"], described["advantage"], described["length"]) == (2.0, 0.5, 12)


def test_a_long_rollout_keeps_the_beginning_of_the_answer_and_some_of_the_prompt() -> None:
    row = sampled_row(5, length=1000, prompt=600)
    recorded = Recorder(tokens=100).record([row], 0.0, {})
    [described] = recorded.rollouts
    assert (described["skipped"], described["n"], described["length"]) == (575, 100, 1000)
    rollout = Rollout.parse(recorded.body)
    assert rollout.tokens.tolist() == [row.tokens[575], *row.labels[575:675]]
    assert described["positions"] == 400, "figures are those of the whole row"


def test_of_many_rows_some_are_kept_evenly_and_none_if_none_are_wanted() -> None:
    rows = [sampled_row(seed) for seed in range(10)]
    recorded = Recorder(rows=3).record(rows, 0.0, {})
    assert [row["row"] for row in recorded.rollouts] == [0, 3, 6]
    assert len(recorded.body) == 3 * (16 * 12 + 4)
    assert Recorder(rows=0).record(rows, 0.0, {}).rollouts == []
