"""A plugin in a hub repository: after it is added, it is found by name without the hub, unless its files change."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from environments import Environment

from twinkle.testing import FakeHub

pytestmark = pytest.mark.full

NAME = "acme/focal-on-a-hub"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as running:
        running.add(NAME, Path(__file__).parent / "focal-on-a-hub")
        yield running


@pytest.fixture
def more(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    """Variables that send the clients to the fake hub, with caches and a lock of their own."""
    lock = str(tmp_path / "twinkle.lock")
    return {**hub.environment(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "TWINKLE_LOCK": lock}


RESOLVE = ("-c", "import sys, twinkle; print(twinkle.registry().resolve(sys.argv[1], 'loss').__module__)")


def test_it_is_refused_then_added_then_trains_by_name_without_the_hub(
    hub: FakeHub, downstream: Environment, train: Callable[..., dict[str, Any]], more: dict[str, str]
) -> None:
    refused = downstream.run("python", *RESOLVE, f"hf://{NAME}", check=False, more=more)
    assert f"to review and trust this commit, run: twinkle plugins add hf://{NAME}@" in refused.stderr
    added = downstream.run("twinkle", "plugins", "add", f"hf://{NAME}", "--yes", more=more)
    assert "loss HubFocalLoss" in added.stdout
    asked = len(hub.requests)
    told = train("HubFocalLoss", {"gamma": 1.5}, more=more)
    assert len(hub.requests) == asked
    expected = [-((1 - math.exp(logp)) ** 1.5) * logp for logp in told["logps"]]
    assert told["losses"][0] == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert told["losses"][-1] < told["losses"][0] - 0.5
    info = downstream.run("twinkle", "plugins", "info", "HubFocalLoss", more=more).stdout
    assert "focal.py:" in info


def test_one_byte_more_in_a_cached_file_and_it_is_not_imported(
    downstream: Environment, more: dict[str, str], tmp_path: Path
) -> None:
    downstream.run("twinkle", "plugins", "add", f"ms://{NAME}", "--yes", more=more)
    assert "focal_on_a_hub_" in downstream.run("python", *RESOLVE, "HubFocalLoss", more=more).stdout
    assert downstream.run("twinkle", "plugins", "doctor", more=more).stdout.endswith("0 problems found\n")
    (power,) = (tmp_path / "home" / "twinkle").rglob("power.py")
    power.chmod(0o644)
    power.write_text(power.read_text("utf-8") + "\n")
    edited = downstream.run("python", *RESOLVE, "HubFocalLoss", check=False, more=more)
    assert edited.returncode == 1
    assert "NotTrusted" in edited.stderr
    assert "power.py" in edited.stderr
    doctor = downstream.run("twinkle", "plugins", "doctor", check=False, more=more)
    assert doctor.returncode == 1
    assert f"lock: hub ms://{NAME}" in doctor.stdout
