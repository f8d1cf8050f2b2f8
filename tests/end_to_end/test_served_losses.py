"""A loss that somebody wrote as a plugin, named in a request of the unmodified Tinker SDK."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from hatchling.builders.wheel import WheelBuilder
from server_sdk import opened, trainer
from serving import Served, pool

from twinkle.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the SDK leaves its first connection open

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial-first-loss.md"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip would install of the tutorial's plugin, in a folder of its own."""
    folder = tmp_path_factory.mktemp("plugin")
    command = [sys.executable, "-m", "twinkle.cli", "plugins", "new", "loss", "acme-focal"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    text = TUTORIAL.read_text("utf-8")
    code = text.partition('title="acme-focal/src/acme_focal/loss.py"\n')[2].partition("```")[0]
    (folder / "acme-focal" / "src" / "acme_focal" / "loss.py").write_text(code, "utf-8")
    (wheel,) = WheelBuilder(str(folder / "acme-focal")).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny" / "v1", "qwen3")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path, plugin: Path) -> Iterator[Served]:
    served = pool(tmp_path_factory.mktemp("service") / "data", model, PYTHONPATH=str(plugin))
    served.start()
    yield served
    served.stop()


@pytest.fixture
def training(service: Served, model: Path) -> Iterator[Any]:
    with opened(service.url, service.key) as client:
        yield trainer(client, str(model))


def datum(tokens: list[int]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]}
    )


DATA = [[5, 6, 7, 8, 9, 10], [40, 41, 42]]


@pytest.mark.parametrize("config", [{}, {"gamma": 0.5}, {"gamma": 0.0, "floor": -3.0}])
def test_its_number_is_that_of_its_formula(training: Any, config: dict[str, float]) -> None:
    gamma, floor = config.get("gamma", 2.0), config.get("floor", -12.0)
    output = training.forward([datum(row) for row in DATA], "AcmeFocalLoss", config).result(timeout=60)
    logps = np.concatenate([np.asarray(one["logprobs"].data, np.float64) for one in output.loss_fn_outputs])
    assert logps.shape == (7,)
    chosen = np.maximum(logps, floor)
    assert output.metrics["loss:sum"] == pytest.approx(
        float((-((1 - np.exp(chosen)) ** gamma) * chosen).sum()), rel=1e-5
    )


def test_it_trains(training: Any) -> None:
    losses = []
    for _ in range(8):
        passed = training.forward_backward([datum(row) for row in DATA], "AcmeFocalLoss")
        training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(timeout=60)
        losses.append(passed.result(timeout=60).metrics["loss:sum"])
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("loss", "config", "words"),
    [
        ("AcmeFocalLos", {}, ["AcmeFocalLos", "AcmeFocalLoss", "cross_entropy"]),
        ("AcmeFocalLoss", {"gama": 1.0}, ["gama", "gamma"]),
        ("AcmeFocalLoss", {"gamma": -1.0}, ["gamma", "-1.0"]),
    ],
)
def test_what_is_wrong_is_said_and_the_model_stays_usable(
    training: Any, loss: str, config: dict[str, float], words: list[str]
) -> None:
    with pytest.raises(tinker.RequestFailedError) as failed:
        training.forward_backward([datum(DATA[0])], loss, config).result(timeout=60)
    assert all(word in str(failed.value) for word in words), str(failed.value)
    assert "Traceback" not in str(failed.value)
    assert os.sep + "site" not in str(failed.value)
    training.forward_backward([datum(DATA[0])], "AcmeFocalLoss").result(timeout=60)
    training.optim_step(tinker.AdamParams()).result(timeout=60)
