"""Components that the script of a server defines, which its tenants name."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from twinkle import registry
from twinkle.errors import ConfigError
from twinkle.testing import tiny_model
from twinkle_registry.discovery import installed_plugins
from twinkle_server.launch import script as scripts
from twinkle_server.launch.script import components_of, load, write_plugin

SCRIPT = '''
import sys

import twinkle
from twinkle.loss import CrossEntropyLoss, Loss
from twinkle.data_format import LossOutput
from twinkle.reward import Reward
from twinkle.server import launch_server

twinkle.initialize(mode="http")


class Halved(CrossEntropyLoss):
    """Half of the cross entropy."""

    def __call__(self, inputs, outputs, **kwargs):
        whole = super().__call__(inputs, outputs, **kwargs)
        return LossOutput(loss_sum=whole.loss_sum / 2, denominator=whole.denominator)


class Length(Reward):
    """The number of messages."""

    def __call__(self, trajectories, **kwargs):
        return [float(len(one["messages"])) for one in trajectories]


class _Private(Loss):
    """Not offered."""


class Settings:
    """Not a component."""


launch_server(config_path=sys.argv[1])
Late = type("Late", (Loss,), {})
'''


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "my_server.py"
    file.write_text(SCRIPT, "utf-8")
    return file


def test_a_script_is_imported_up_to_the_call_that_serves(path: Path) -> None:
    from twinkle.runtime import current

    before, arguments = current._current, list(sys.argv)
    loaded = load(str(path), ["Halved", "Length"], ["config.yaml"])
    assert (current._current, sys.argv) == (before, arguments)
    module = sys.modules[loaded["Halved"].__module__]
    assert components_of(module) == {"Halved": "loss", "Length": "reward"}
    with pytest.raises(ConfigError, match="does not define 'Late' when it is imported"):
        load(str(path), ["Late"], ["config.yaml"])


def test_the_components_are_those_of_a_plugin(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = path.parent / "plugin"
    folder.mkdir()
    write_plugin(folder, path, {"Halved": "loss"}, ["config.yaml"])
    monkeypatch.syspath_prepend(str(folder))
    [record] = [record for record in installed_plugins() if record.dist == scripts.NAME]
    registry().add(record)
    try:
        spec = registry().find(f"{scripts.NAME}/Halved", "loss")
        assert spec.tenant_safe
        assert registry().load(spec).__name__ == "Halved"
    finally:
        registry().withdraw(record.name)


def test_a_program_that_is_no_script_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with scripts.offered() as plugins:
        assert plugins == ()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_tenants_name_what_the_script_defines(path: Path) -> None:
    from twinkle_client import MultiLoraTransformersModel, TwinkleClient
    from twinkle_client.components import Reward

    model = str(tiny_model(path.parent / "model"))
    fields: dict[str, Any] = {
        "http_options": {"port": 0},
        "persistence": {"mode": "file", "file_path": str(path.parent / "state" / "state.json")},
        "applications": [
            {"name": "server", "import_path": "server"},
            {"name": "model", "import_path": "model", "route_prefix": "/model/tiny", "args": {"model_id": model}},
            {"name": "processor", "import_path": "processor"},
        ],
    }
    config = path.with_name("config.yaml")
    config.write_text(yaml.safe_dump(fields), "utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("TWINKLE_SERVER_URL", None)
    with subprocess.Popen(
        [sys.executable, str(path), str(config)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if line.startswith("Twinkle serves"))
            url = line.partition(" at ")[2].split()[0]
            with TwinkleClient(url) as client:
                offered = client.get_server_capabilities().components["loss"]
                assert "Halved" in offered
                assert not {"_Private", "Settings", "Late"} & set(offered)
                tenant = MultiLoraTransformersModel(client=client)
                tenant.add_adapter_to_model("a", {"r": 2}, seed=1)
                rows = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}]
                tenant.set_loss("CrossEntropyLoss")
                whole = tenant.forward_backward(rows)["loss"]
                tenant.set_loss("Halved")
                assert tenant.forward_backward(rows)["loss"] == pytest.approx(whole / 2, rel=1e-6)
                tenant.clip_grad_and_step()
                conversation = {"messages": [{"role": "user", "content": "hi"}] * 3}
                assert list(Reward("Length", client=client)([conversation])) == [3.0]
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
    assert process.returncode == 0
