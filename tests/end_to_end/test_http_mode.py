"""The same training script, in this process and on a service, has the same losses; its checkpoint goes to a hub."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Served, pool

import twinkle
from twinkle.dataset import DatasetMeta
from twinkle.errors import TwinkleError
from twinkle.testing import FakeHub, tiny_model
from twinkle_testing.fakehub import TOKEN

pytestmark = pytest.mark.full
NAME = "owner/small"
OWN = {"model_name": "Twinkle", "model_author": "us"}


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with FakeHub({TOKEN: "tester"}) as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def service(model: Path, hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("service")
    environment = {**hub.environment(folder / "home"), "HF_HUB_OFFLINE": "0"}
    served = pool(folder / "data", model, {"name": NAME}, **environment)
    served.start()
    yield served
    served.stop()


def script(steps: int = 4, **options: Any) -> tuple[list[float], Any]:
    """A published training script; only `initialize` decides where it runs, and a service has its own precision."""
    from twinkle.dataloader import DataLoader
    from twinkle.dataset import Dataset
    from twinkle.model import MultiLoraTransformersModel

    dataset = Dataset(DatasetMeta("builtin://self-cognition", data_slice=range(40)))
    dataset.set_template("Template", model_id=NAME, max_length=256)
    dataset.map("SelfCognitionProcessor", init_args=OWN)
    dataset.encode()
    loader = DataLoader(dataset=dataset, batch_size=4, shuffle=True)
    model = MultiLoraTransformersModel(model_id=NAME, **options)
    model.add_adapter_to_model("default", {"r": 4, "target_modules": "all-linear"}, seed=3)
    model.set_loss("CrossEntropyLoss", adapter_name="default")
    model.set_optimizer("AdamW", lr=1e-2, adapter_name="default")
    losses = []
    for batch in loader:
        out = model.forward_backward(inputs=batch, adapter_name="default")
        model.clip_grad_and_step(adapter_name="default")
        losses.append(float(out["loss"]))
        if len(losses) == steps:
            break
    return losses, model


def test_the_same_script_has_the_same_losses(
    service: Served, model: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINKLE_MODEL_ID_ALIASES", json.dumps({NAME: str(model)}))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    expected, _ = script(mixed_precision="no")
    twinkle.initialize(mode="http", base_url=service.url, api_key=service.key)
    try:
        losses, remote = script()
        assert type(remote).__module__ == "twinkle_client.model"
        assert losses == pytest.approx(expected, abs=1e-6)
        assert losses[-1] < losses[0]
        saved = remote.save("last", save_optimizer=True)
        remote.upload_every_save("hf://tester/each", TOKEN)
        done = remote.upload_to_hub(saved, "hf://tester/adapter", TOKEN, async_upload=False, poll_interval=0.1)
        assert done["status"] == "succeeded"
        files = _head(hub, "tester/adapter")
        assert {"adapter_model.safetensors", "adapter_config.json"} <= set(files)
        assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == NAME
        remote.save("next")
        for _ in range(300):
            if hub.store.find("tester/each", "model") is not None and len(_head(hub, "tester/each")) > 1:
                break
            remote.client.connection.run(remote.client.connection.request("GET", "/hub/uploads"))
            time.sleep(0.1)
        assert "adapter_model.safetensors" in _head(hub, "tester/each")
    finally:
        twinkle.initialize("local")


def _head(hub: FakeHub, name: str) -> dict[str, bytes]:
    repository = hub.store.find(name, "model")
    assert repository is not None
    return dict(repository.commits[repository.branches["main"]].files)


def test_a_call_that_runs_does_not_delay_the_end_of_the_service(model: Path, tmp_path: Path) -> None:
    served = pool(tmp_path / "data", model, {"name": NAME}).start()
    twinkle.initialize(mode="http", base_url=served.url, api_key=served.key)
    try:
        from twinkle.dataset import IterablePackingDataset

        endless = IterablePackingDataset(DatasetMeta("builtin://self-cognition"), cyclic=True)
        endless.filter("LengthFilter", init_args={"min_length": 10**9, "unit": "characters", "column": "query"})
        hangs = threading.Thread(target=lambda: _ignored(lambda: next(iter(endless))), daemon=True)
        hangs.start()
        resources = endless._client.connection
        while not resources.run(resources.request("GET", "/data"))["resources"][0]["calls"] > 2:
            time.sleep(0.1)
        begin = time.monotonic()
        resources._retry_seconds = 0.0
        served.stop()
        assert time.monotonic() - begin < 60  # the time limit of a call is 300 s
        hangs.join(60)
        assert not hangs.is_alive()
    finally:
        _ignored(lambda: twinkle.initialize("local"))


def _ignored(work: Callable[[], Any]) -> None:
    with contextlib.suppress(TwinkleError):
        work()
