"""A service with data resources, and a plugin with preprocessors that misbehave."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import rogue_data
from server_data import DataService, data_service

from twinkle import registry
from twinkle.testing import tiny_model
from twinkle_server.data.limits import DataLimits


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataService]:
    folder = tmp_path_factory.mktemp("service")
    rows = folder / "own.jsonl"
    rows.write_text('{"query": "Who?", "response": "Me."}\n' * 3, "utf-8")
    limits = DataLimits(
        resources=6, workers=12, rows=5000, memory=256 * 2**20, seconds=4.0, sets={"ms://org/own": str(rows)}
    )
    site = str(rogue_data.write(folder / "site"))
    sys.path.append(site)
    registry.cache_clear()
    with data_service(folder / "data", model, limits) as served:
        yield served
    sys.path.remove(site)
    registry.cache_clear()
