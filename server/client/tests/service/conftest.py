"""A service on a tiny model in processes of its own, and a local model of the same weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from described import Described
from native_rows import CONFIG
from serving import Served, pool

from twinkle.testing import tiny_model
from twinkle_client import MultiLoraTransformersModel, TwinkleClient
from twinkle_client.http import Connection
from twinkle_transformers.pool.multi import MultiLoraTransformersModel as LocalModel


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    return tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[Served]:
    """A running service."""
    torch.set_num_threads(1)
    served = pool(
        tmp_path_factory.mktemp("service") / "data",
        base,
        {"times": {"snapshot": 0.5}, "name": "tiny", "full_parameters": True},
    )
    served.start()
    try:
        yield served
    finally:
        served.kill()


@pytest.fixture(scope="session")
def described() -> Iterator[Described]:
    """Compares the responses of these tests with the OpenAPI description."""
    found = Described()
    yield found
    assert not found.wrong, "\n".join(found.wrong[:20])


@pytest.fixture
def client(service: Served, described: Described) -> Iterator[TwinkleClient]:
    """A client of the service, whose responses must be as described."""
    connection = Connection(service.url, retry_seconds=30.0, transport=described.transport())
    with TwinkleClient(connection=connection) as opened:
        yield opened


@pytest.fixture
def local(base: Path) -> LocalModel:
    """The same base model in this process."""
    return LocalModel(model_id=str(base), mixed_precision="no")


@pytest.fixture
def model(client: TwinkleClient) -> MultiLoraTransformersModel:
    """A model on the service with an adapter and an optimizer."""
    model = MultiLoraTransformersModel("ms://tiny", client=client)
    model.add_adapter_to_model("a", CONFIG, seed=1)
    model.set_optimizer("AdamW", lr=1e-2)
    return model
