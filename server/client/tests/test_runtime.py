"""`initialize(mode="http")`: the classes of a local script become those of the client."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import twinkle
import twinkle_client
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ArgumentError, MeshError, TrainingStateError, Unsupported
from twinkle.runtime import current_runtime
from twinkle_client.http import Connection


@pytest.fixture
def client() -> Iterator[Any]:
    yield SimpleNamespace(connection=Connection("http://127.0.0.1:9", retry_seconds=0.0), session_id="s")
    twinkle.initialize("local")


def test_placement_names_the_service(client: Any) -> None:
    twinkle.initialize("http", client=client)
    assert "http://127.0.0.1:9" in twinkle.get_device_placement()


def test_address_and_key_reach_the_client(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def init(base_url: str, api_key: str) -> Any:
        given.append((base_url, api_key))
        client.close = lambda: given.append("closed")
        return client

    monkeypatch.setattr(twinkle_client, "init_twinkle_client", init)
    twinkle.initialize(mode="http", base_url="http://127.0.0.1:9", api_key="tml-x")
    twinkle.initialize(mode="http")  # again, with the same client
    assert given == [("http://127.0.0.1:9", "tml-x")]
    twinkle.initialize("local")
    assert given[1:] == ["closed"]


def test_a_data_set_is_built_on_the_service(client: Any) -> None:
    twinkle.initialize("http", client=client)
    with pytest.raises(twinkle_client.errors.ConnectionFailed):
        Dataset(DatasetMeta(data=[{"a": 1}]), remote_group="model")


def test_a_class_of_this_process_cannot_run_there(client: Any) -> None:
    class Own(Dataset):
        """A data set of this script."""

    twinkle.initialize("http", client=client)
    with pytest.raises(Unsupported, match=r"cannot run .*Own on the service"):
        Own()
    mesh = twinkle.DeviceMesh.from_sizes(dp_size=4)
    with pytest.raises(MeshError, match="leave global_device_mesh out"):
        current_runtime().initialize(type(current_runtime().options)(global_device_mesh=mesh))
    with pytest.raises(ArgumentError, match="leave base_url"):
        twinkle.initialize("http", base_url="http://127.0.0.1:9", client=client)


def test_without_an_address_the_script_is_that_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINKLE_SERVER_URL", raising=False)
    groups = [twinkle.DeviceGroup(name="model", ranks=1, device_type="cuda")]
    try:
        twinkle.initialize(mode="http", groups=groups)
        assert "launch_server" in twinkle.get_device_placement()
        with pytest.raises(TrainingStateError, match=r"(?s)pass base_url= to .*launch_server\(config_path="):
            Dataset(DatasetMeta(data=[{"a": 1}]))
        groups[0].ranks = 4
        with pytest.raises(MeshError, match="group 'model' has 4 ranks, but a service trains and samples on one"):
            twinkle.initialize(mode="http", groups=groups)
    finally:
        twinkle.initialize("local")
