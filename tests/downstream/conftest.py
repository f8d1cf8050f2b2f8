"""Packages of strangers, built as wheels and installed by pip into a clean environment, beside wheels of ours."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from environments import Environment, EnvironmentMaker
from hatchling.builders.wheel import WheelBuilder
from house import MEMBERS
from installing import environment, unpacked, view, wheels

__all__ = ["environment", "unpacked", "view", "wheels"]

HERE = Path(__file__).parent
PACKAGES = ("acme-numbers", "acme-losses", "acme-sampling")


@pytest.fixture(scope="session")
def shelf(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our wheels and those of the strangers."""
    folder = tmp_path_factory.mktemp("shelf")
    for wheel in wheels.glob("*.whl"):
        shutil.copy(wheel, folder)
    for name in PACKAGES:
        source = shutil.copytree(HERE / name, tmp_path_factory.mktemp("source") / name)
        list(WheelBuilder(str(source)).build(directory=str(folder), versions=["standard"]))
    return folder


@pytest.fixture(scope="session")
def downstream(environment: EnvironmentMaker, shelf: Path) -> Environment:
    """An environment in which somebody installed two strangers' packages, and pip brought what they declare."""
    made = environment(text for member in MEMBERS for text in member.requirements)
    ours = ("twinkle-cli", "twinkle-chat", "twinkle-hub", "twinkle-losses", "twinkle-metrics", "twinkle-testing")
    ours += ("twinkle-transformers",)
    made.install(shelf, "acme-losses", "acme-sampling", *ours, dependencies=True)
    return made


@pytest.fixture
def train(downstream: Environment, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that trains with a loss by its name, in the environment, and returns what the script told."""

    def run(loss: str, arguments: dict[str, Any], *sampler: str, more: dict[str, str] | None = None) -> dict[str, Any]:
        script = HERE / "scripts" / "train.py"
        done = downstream.run("python", script, tmp_path, loss, json.dumps(arguments), *sampler, more=more)
        return dict(json.loads(done.stdout.splitlines()[-1]))

    return run
