"""`twinkle run sft` as a user types it: exit codes, the printed command to continue, plain output."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from twinkle.testing import tiny_model

LOSS = '''
import os, signal
from twinkle.loss import CrossEntropyLoss


class Interrupting(CrossEntropyLoss):
    """Presses Ctrl-C during the third step of a fresh run."""

    calls = 0

    def __call__(self, inputs, outputs, **kwargs):
        self.calls += 1
        if self.calls == 3 and not os.path.exists("pressed"):
            open("pressed", "w").close()
            os.kill(os.getpid(), signal.SIGINT)
        return super().__call__(inputs, outputs, **kwargs)
'''


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    tiny_model(tmp_path / "model")
    (tmp_path / "loss.py").write_text(LOSS)
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in range(20):
            file.write(json.dumps({"messages": [turns[0], {**turns[1], "content": f"good day {number}"}]}) + "\n")
    values = {
        "model": {"id": str(tmp_path / "model"), "mixed_precision": "no"},
        "data": {"id": "rows.jsonl"},
        "loss": {"name": "./loss.py:Interrupting"},
        "batch_size": 4,
        "trackers": ["JsonlTracker"],
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(values))
    return values


def twinkle(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "twinkle.cli", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.full
@pytest.mark.usefixtures("config")
def test_ctrl_c_ends_with_130_and_the_printed_command_finishes_the_run(tmp_path: Path) -> None:
    stopped = twinkle(tmp_path, "run", "sft", "--config", "sft.yaml")
    assert stopped.returncode == 130, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert "\x1b" not in stopped.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    (command,) = [line for line in stopped.stdout.splitlines() if line.startswith("continue with: ")]
    continued = twinkle(tmp_path, *shlex.split(command.removeprefix("continue with: "))[1:])
    assert continued.returncode == 0, continued.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder.name]
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]
    assert (folder / "adapter" / "adapter_config.json").is_file()


@pytest.mark.usefixtures("config")
def test_bad_input_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    unwritable = twinkle(tmp_path, "run", "sft", "--config", "sft.yaml", "--runs", "file/runs")
    assert unwritable.returncode == 2
    assert "cannot make the run folder" in unwritable.stderr
    misspelt = twinkle(tmp_path, "run", "sft", "--config", "sft.yaml", "--lora.rnak", "8")
    assert misspelt.returncode == 2
    assert "lora.rank" in misspelt.stderr
    assert "Traceback" not in unwritable.stderr + misspelt.stderr


def test_help_shows_every_key_with_its_meaning(tmp_path: Path) -> None:
    shown = twinkle(tmp_path, "run", "sft", "--help")
    assert shown.returncode == 0
    assert "--optimizer.lr" in shown.stdout
    assert "Peak learning rate" in shown.stdout


COUNTING = """
import collections, json, sys
from twinkle_registry import registry as module
from twinkle_registry.registry import Registry

counts = collections.Counter()


def counted(function, name_of):
    def call(*args, **kwargs):
        counts[name_of(*args)] += 1
        return function(*args, **kwargs)
    return call


Registry.load = counted(Registry.load, lambda self, spec: f"{spec.kind} {spec.ref}")
from_reference = module.component_from_reference
module.component_from_reference = counted(from_reference, lambda reference, text, kind, _: f"{kind} {text}")

from twinkle_cli import main

try:
    main(["run", "sft", "--config", "sft.yaml"])
except SystemExit as end:
    assert not end.code
json.dump(counts, open("counts.json", "w"))
"""


@pytest.mark.full
def test_a_run_resolves_each_component_once(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    (tmp_path / "losses.py").write_text(
        "from twinkle.loss import CrossEntropyLoss\n\n\nclass Own(CrossEntropyLoss):\n    pass\n"
    )
    config = {
        "model": {"id": str(model), "mixed_precision": "no"},
        "data": {"id": "builtin://self-cognition", "slice": 8, "max_length": 64},
        "loss": {"name": "./losses.py:Own"},
        "questions": ["who are you?"],
        "sampler": {"max_tokens": 2},
        "metrics": ["LossMetric"],
        "batch_size": 4,
        "max_steps": 1,
        "save_every": 1,
    }
    (tmp_path / "sft.yaml").write_text(json.dumps(config))
    subprocess.run([sys.executable, "-c", COUNTING], cwd=tmp_path, check=True, capture_output=True)
    counts = json.loads((tmp_path / "counts.json").read_text())
    kinds = {name.partition(" ")[0] for name in counts}
    assert {"recipe", "dataset", "preprocessor", "template", "dataloader", "model", "processor", "optimizer"} <= kinds
    assert {"scheduler", "metric", "tracker", "sampler", "hub"} <= kinds
    assert counts["loss ./losses.py:Own"] == 1
    assert {name: count for name, count in counts.items() if count > 1} == {}
