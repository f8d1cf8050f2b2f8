"""A loss that somebody wrote as a plugin, named in a request of the unmodified Tinker SDK."""

import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rogue_plugin
import tinker
from hatchling.builders.wheel import WheelBuilder
from server_sdk import opened, trainer
from serving import Served, pool

from twinkle.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the SDK leaves its first connection open

TUTORIAL = Path(__file__).parents[2] / "docs" / "start" / "first-loss.md"


STUCK = '''"""A loss that takes its time."""

import time

from twinkle.data_format import InputBatch, LossOutput, ModelOutput
from twinkle.loss import Loss


class AcmeStuckLoss(Loss):
    """Cross entropy, after some seconds of doing nothing."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self, inputs: InputBatch, outputs: ModelOutput) -> LossOutput:
        time.sleep(self.seconds)
        chosen = outputs["logps"][inputs["labels"] != -100]
        return LossOutput(-chosen.sum(), chosen.numel())
'''
LOSS_SECONDS = 5.0
LOSS_MEMORY = 128 * 2**20
MARK = f"served-losses-{os.getpid()}"
"""In the path of the plugins, by which the workers of this service are recognized."""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip would install of the tutorial's plugin, and of two that misbehave, in a folder of its own."""
    folder = tmp_path_factory.mktemp(MARK)
    text = TUTORIAL.read_text("utf-8")
    focal = text.partition('title="acme-focal/src/acme_focal/loss.py"\n')[2].partition("```")[0]
    for name, code in (("acme-focal", focal), ("acme-stuck", STUCK)):
        command = [sys.executable, "-m", "twinkle.cli", "plugins", "new", "loss", name]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
        (folder / name / "src" / name.replace("-", "_") / "loss.py").write_text(code, "utf-8")
        (wheel,) = WheelBuilder(str(folder / name)).build(directory=str(folder / "wheels"), versions=["standard"])
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
    return rogue_plugin.write(folder / "site")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny" / "v1", "qwen3")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path, plugin: Path) -> Iterator[Served]:
    settings = {"times": {"loss": LOSS_SECONDS}, "limits": {"loss_bytes": LOSS_MEMORY}}
    served = pool(tmp_path_factory.mktemp("service") / "data", model, settings, PYTHONPATH=str(plugin))
    served.start()
    yield served
    served.stop()


@pytest.fixture
def training(service: Served, model: Path) -> Iterator[Any]:
    with opened(service.url, service.key) as client:
        yield trainer(client, str(model), seed=1)


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


@pytest.mark.full
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


@pytest.mark.full
def test_a_loss_that_hangs_fails_its_own_operation_and_no_other(service: Served, model: Path) -> None:
    engine = service.engine()
    with opened(service.url, service.key) as client:
        first, hanging, other = (trainer(client, str(model), seed=seed) for seed in range(3))
        before = hanging.forward([datum(DATA[0])], "cross_entropy").result(timeout=60).metrics
        slow = first.forward_backward([datum(DATA[0])], "AcmeStuckLoss", {"seconds": 1.0})
        time.sleep(0.3)  # while that runs, two come that the next pass will have both of
        stuck = hanging.forward_backward([datum(DATA[0])], "AcmeStuckLoss", {"seconds": 3600.0})
        beside = other.forward_backward([datum(DATA[1])], "cross_entropy")
        assert slow.result(timeout=60).metrics["loss:sum"] > 0
        done = beside.result(timeout=120).metrics
        words = f"'AcmeStuckLoss' of plugin 'acme-stuck' took longer than {LOSS_SECONDS:g} s, the limit of this service"
        with pytest.raises(tinker.RequestFailedError, match=words) as failed:
            stuck.result(timeout=120)
        assert failed.value.category == tinker.types.RequestErrorCategory.User
        hanging.optim_step(tinker.AdamParams(learning_rate=1.0)).result(timeout=60)  # of what hung, no gradient is left
        assert hanging.forward([datum(DATA[0])], "cross_entropy").result(timeout=60).metrics == before
        assert other.forward([datum(DATA[1])], "cross_entropy").result(timeout=60).metrics == pytest.approx(
            done, rel=1e-5
        )
        assert hanging.forward_backward([datum(DATA[0])], "AcmeStuckLoss").result(timeout=60).metrics == pytest.approx(
            before, rel=1e-5
        )
    assert service.engine() == engine, "the engine was not started again"


@pytest.mark.full
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("AcmeEats", f"took more than {LOSS_MEMORY >> 20} MiB of memory"),
        ("AcmeExits", "crashed: its process ended with the exit status 3"),
        ("AcmeSegfaults", "crashed: its process was killed by SIGSEGV"),
        ("AcmeRaises", "raised RuntimeError: the moon is in the wrong phase"),
        ("AcmeNan", "is nan"),
        ("AcmeSleeps", f"took longer than {LOSS_SECONDS:g} s"),
        ("AcmePrints", ""),
    ],
)
def test_a_neighbour_trains_beside_a_loss_that_misbehaves_as_it_does_alone(
    service: Served, model: Path, loss: str, words: str
) -> None:
    engine = service.engine()
    with opened(service.url, service.key) as client:
        alone, neighbour, bad = (trainer(client, str(model), seed=seed) for seed in (5, 5, 6))

        def steps(training: Any) -> list[float]:
            """Train three steps; before each, the bad one sends its loss."""
            losses = []
            for _ in range(3):
                if training is neighbour:
                    failing.append(bad.forward_backward([datum(DATA[0])], loss))
                passed = training.forward_backward([datum(row) for row in DATA], "cross_entropy")
                training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result(timeout=60)
                losses.append(passed.result(timeout=60).metrics["loss:sum"])
            return losses

        failing: list[Any] = []
        assert steps(neighbour) == pytest.approx(steps(alone), rel=1e-4)  # passes of other shapes, in float32
        for future in failing:
            if not words:
                assert future.result(timeout=60).metrics["loss:sum"] > 0
                continue
            with pytest.raises(tinker.RequestFailedError, match=words) as failed:
                future.result(timeout=60)
            assert f"'{loss}' of plugin 'acme-rogue'" in str(failed.value)
        assert bad.forward_backward([datum(DATA[0])], "AcmePlain").result(timeout=60).metrics["loss:sum"] > 0
    assert service.engine() == engine, "the engine was not started again"
    assert not [line for line in service.output if len(line) > 10_000], "what a loss prints reaches no log"


def test_no_worker_outlives_the_service(service: Served) -> None:
    workers = {entry for entry in Path("/proc").glob("[0-9]*") if _is_worker(entry)}
    service.stop()
    deadline = time.monotonic() + 20
    while {entry for entry in workers if _is_worker(entry)} and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers
    assert not {entry for entry in workers if _is_worker(entry)}


def _is_worker(entry: Path) -> bool:
    """Say whether a process is a loss worker of this service, whose plugins are on its path."""
    try:
        command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
    except OSError:
        return False
    return b"losses.workers.process" in command and MARK.encode() in environment
