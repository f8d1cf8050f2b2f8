"""A run that was killed while it sampled, synced, scored or trained goes on in the same numbers, each step once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from twinkle.testing import tiny_model

pytestmark = pytest.mark.full

# Each part dies at its call number AT of a process, once a run: a file says that it has. Steps are saved at 2 and 4.
PARTS = '''
import os, signal
from twinkle.loss import GRPOLoss
from twinkle.sampler import TorchSampler



def die(place, call):
    wanted, at = os.environ.get("DIE", "nowhere:0").split(":")
    if place == wanted and call == int(at) and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


class Sampler(TorchSampler):
    """Dies in the middle of its answers, or when half of the weights are there."""

    calls = syncs = 0

    def sample(self, inputs, *args, **kwargs):
        self.calls += 1
        if os.environ.get("DIE", "").startswith("sampling"):
            handle = self.submit(inputs[0], *args, **kwargs)
            for _ in range(3):
                self.step()
            die("sampling", self.calls)
            handle.cancel()
        return super().sample(inputs, *args, **kwargs)

    def receive_weights(self, *args, **kwargs):
        self.syncs += 1
        return super().receive_weights(*args, **kwargs)

    def get_state_keys(self, *args, **kwargs):
        keys = super().get_state_keys(*args, **kwargs)
        die("sync", self.syncs + 1)
        return keys


class Loss(GRPOLoss):
    """Dies within the second of several passes of an update."""

    calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        die("training", self.calls)
        return super().__call__(*args, **kwargs)


calls = 0


def ascii_letters(trajectories, **kwargs):
    global calls
    calls += 1
    die("scoring", calls)
    texts = [row["messages"][-1]["content"] for row in trajectories]
    return [sum(c.isascii() for c in text) / max(len(text), 1) for text in texts]
'''
DRIVER = """
import os, sys, traceback, yaml
import matplotlib.backends.backend_agg, matplotlib.figure
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.run import Run
from twinkle_recipes.run.building import build_model
from twinkle_recipes.data import loaders
from twinkle_recipes.grpo import grpo
from twinkle_recipes.policy.config import GRPOConfig
from twinkle_recipes.policy.rollouts import build_sampler


def run(values, root, place):
    config = GRPOConfig.model_validate(values)
    os.environ["DIE"] = place
    with Run("tiny", config=config.model_dump(), trackers=config.trackers, root=root, folder=config.run_folder) as one:
        grpo(config, one)


def forked(*arguments):
    # A fork costs no imports. Returns how it ended: 0, or minus a signal.
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        run(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


values = yaml.safe_load(open("grpo.yaml"))
config = GRPOConfig.model_validate(values)
build_sampler(config, config.sampling, build_model(config, 1)), loaders(config)  # what they import, the forks have
assert forked(values, "whole", "nowhere:0") == 0
for place in sys.argv[1:]:
    root = place.partition(":")[0]
    if os.path.exists("died"):
        os.remove("died")
    assert forked(values, root, place) == -9, place
    [folder] = os.listdir(root)
    assert forked({**values, "resume_from": f"{root}/{folder}"}, root, place) == 0, place
"""
# check_room and the evaluation before step 1 sample too; step 3 has the third sync after the evaluation's.
PLACES = {"sampling": 5, "sync": 4, "scoring": 4, "training": 11}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run that was not killed, and one for each place, killed there and continued."""
    folder = tmp_path_factory.mktemp("runs")
    tiny_model(folder / "model", initializer_range=0.1)
    (folder / "parts.py").write_text(PARTS)
    rows = [{"messages": [{"role": "user", "content": f"say {number}"}]} for number in range(7)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "model": {"id": "model", "mixed_precision": "no"},
        "data": {"id": "prompts.jsonl", "max_length": 128, "eval_fraction": 0.2},
        "lora": {"rank": 4, "dropout": 0.2},
        "optimizer": {"lr": 0.01},
        "loss": {"name": "./parts.py:Loss", "args": {"beta": 0.05}},
        "sampling": {"name": "./parts.py:Sampler", "weights": "own", "num_generations": 4, "max_tokens": 8},
        "rewards": [{"name": "./parts.py:ascii_letters"}],
        "batch_size": 2,
        "mini_batch_size": 4,
        "micro_batch_size": 3,
        "max_steps": 5,
        "eval_every": 0,
        "save_every": 2,
        "trackers": ["JsonlTracker"],
    }
    values["sampling"]["args"] = {"dtype": "float32"}
    (folder / "grpo.yaml").write_text(yaml.safe_dump(values))
    places = [f"{place}:{call}" for place, call in PLACES.items()]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *places],
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return folder


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    (run,) = folder.iterdir()
    found = [json.loads(line) for line in (run / name).read_text().splitlines()]
    timed = ("tokens_per_second", "seconds/")
    return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in found]


def test_the_unbroken_run_has_something_to_compare(runs: Path) -> None:
    steps = lines(runs / "whole", "metrics.jsonl")
    assert [line["step"] for line in steps] == list(range(6))
    assert len({line["loss"] for line in steps[1:]}) == 5
    assert all(line["grad_norm"] > 0 for line in steps[1:])
    assert all(line["kl"] > 0 for line in steps[2:])


@pytest.mark.parametrize("place", PLACES)
def test_a_killed_run_goes_on_in_the_same_numbers(runs: Path, place: str) -> None:
    assert lines(runs / place, "metrics.jsonl") == lines(runs / "whole", "metrics.jsonl")
    assert lines(runs / place, "completions.jsonl") == lines(runs / "whole", "completions.jsonl")
    (run,), (whole,) = (runs / place).iterdir(), (runs / "whole").iterdir()
    name = "adapter/adapter_model.safetensors"
    assert (run / name).read_bytes() == (whole / name).read_bytes()
