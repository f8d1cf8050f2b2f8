"""A loss of a hub plugin that the lock lists: a worker imports it from the code store, with the engine's checks."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from twinkle import registry
from twinkle.errors import TwinkleError
from twinkle_registry import ComponentSpec
from twinkle_server.engine.errors import UserError
from twinkle_server.engine.losses.workers.workers import LossWorkers, WorkerLimits

MANIFEST = """schema = 1
core = ">=0.1,<1"
name = "acme-hub"

[[component]]
kind = "loss"
name = "AcmeHub"
ref = ".loss:AcmeHub"
runtimes = ["local", "served"]
tenant_safe = true
"""
LOSS = '''"""A loss."""

from twinkle.data_format import LossOutput

from .scale import SCALE


def AcmeHub(inputs, outputs):
    """Return the scaled sum, and where this code is."""
    stored = float(__name__.startswith("twinkle_registry.code."))
    return LossOutput(-SCALE * outputs["logps"].sum(), 1.0, {"store": stored})
'''


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ComponentSpec]:
    """A plugin that somebody added to the lock of this test, in a code store of its own."""
    repository = tmp_path / "hub" / "acme-hub"
    repository.mkdir(parents=True)
    (repository / "__init__.py").write_text('"""A plugin."""\n')
    (repository / "twinkle-plugin.toml").write_text(MANIFEST)
    (repository / "loss.py").write_text(LOSS)
    (repository / "scale.py").write_text("SCALE = 3.0\n")
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TWINKLE_LOCK", str(tmp_path / "twinkle.lock"))
    command = [sys.executable, "-m", "twinkle.cli", "plugins", "add", f"file://{repository}", "--yes"]
    added = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ})
    assert added.returncode == 0, added.stdout + added.stderr
    registry.cache_clear()
    [found] = registry().specs("loss")["AcmeHub"]
    yield found
    registry.cache_clear()


@pytest.fixture
def workers() -> Iterator[LossWorkers]:
    made = LossWorkers(WorkerLimits(seconds=30.0))
    yield made
    made.close()


def test_a_worker_imports_it_from_the_store(spec: ComponentSpec, workers: LossWorkers) -> None:
    workers.prepare([spec])
    loss = workers.open(spec, {}, queue_id="a", number=1, weighted=False)
    logps = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    output = loss({"labels": torch.tensor([[3, 4]])}, {"logps": logps})
    output.loss_sum.backward()
    assert float(output.loss_sum.detach()) == 9.0
    assert output.metrics == {"store": 1.0}
    assert logps.grad is not None
    assert logps.grad.tolist() == [[-3.0, -3.0]]
    assert not [name for name in sys.modules if name.startswith("twinkle_registry.code.acme_hub")]


@pytest.mark.full
def test_a_file_that_was_changed_in_the_store_is_refused_there_too(
    spec: ComponentSpec, workers: LossWorkers, tmp_path: Path
) -> None:
    [stored] = (tmp_path / "cache").rglob("scale.py")
    stored.chmod(0o644)
    stored.write_text("SCALE = 4.0\n")
    workers.prepare([spec])
    with pytest.raises(
        (UserError, TwinkleError), match=r"'AcmeHub' of plugin 'acme-hub' raised .*(changed|sha256|SHA-256)"
    ):
        workers.open(spec, {}, queue_id="a", number=1, weighted=False)
