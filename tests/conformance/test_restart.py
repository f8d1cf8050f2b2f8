"""Line 101: what was acknowledged survives a restart and a kill."""

from pathlib import Path

import numpy as np
import pytest
from server_raw import Raw, RawModel, row
from serving import pool

TOKENS = list(range(5, 25))


@pytest.mark.full
def test_line_101_models_and_checkpoints_survive_a_restart_and_a_kill(tiny: Path, tmp_path: Path) -> None:
    service = pool(tmp_path / "data", tiny, {"snapshot_steps": 2}).start()
    try:
        with Raw(service.url) as raw:
            model = raw.model()
            model.train(TOKENS, steps=3)
            path = model.save("a")
            expected = model.logprobs(TOKENS)
            model.forward_backward([row(TOKENS)])  # a gradient that waits for its step
        service.kill()
        service.start()
        with Raw(service.url) as raw:
            assert np.array_equal(raw.load(path).logprobs(TOKENS), expected)
            again = RawModel(raw, model.id, model.last)
            assert np.array_equal(again.logprobs(TOKENS), expected)
            again.step(learning_rate=1e-2)
            straight = raw.load(path)
            straight.train(TOKENS)
            assert np.array_equal(again.logprobs(TOKENS), straight.logprobs(TOKENS)), "the gradient was replayed"
        assert service.stop() == 0
        service.start()
        with Raw(service.url) as raw:
            again = RawModel(raw, model.id, again.last)
            assert np.array_equal(again.logprobs(TOKENS), straight_logprobs(raw, path))
    finally:
        service.stop()


def straight_logprobs(raw: Raw, path: str) -> np.ndarray:
    model = raw.load(path)
    model.train(TOKENS)
    return model.logprobs(TOKENS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("point", ["files.before_rename", "files.after_rename"])
def test_line_101_a_save_that_is_killed_leaves_a_whole_checkpoint_or_none(tmp_path: Path, point: str) -> None:
    from serving import ledger

    service = ledger(tmp_path / "data").start(FAILPOINT=f"{point}:1")
    try:
        with Raw(service.url) as raw:
            model = raw.model()
            model.forward_backward([row(TOKENS)])
            path = model.save("a")  # the engine dies in it, begins anew and does it again
            assert raw.load(path).forward([row(TOKENS)])
            listed = raw.get(f"/training_runs/{model.id}/checkpoints")["checkpoints"]
            assert [checkpoint["tinker_path"] for checkpoint in listed] == [path]
    finally:
        service.stop()
