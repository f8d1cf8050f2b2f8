"""What the tests of the checklist share: one service for all of them, and others where settings differ."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import server_sdk
from server_raw import Raw
from serving import Served, ledger, pool

from twinkle.testing import tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the SDK leave connections to the garbage collector, as it does."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


@pytest.fixture(scope="session", autouse=True)
def swept() -> Iterator[None]:
    """Collect what the SDK left before pytest looks."""
    yield
    server_sdk.sweep()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model; its name has slashes enough for the SDK's tokenizer rule."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny" / "v1", "qwen3")


@pytest.fixture(scope="session")
def served(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service that trains, without keys, shared by all tests."""
    # The SDK's sampling client loads the tokenizer by the name of the model: here it is the path, as in line 28.
    service = pool(tmp_path_factory.mktemp("served") / "data", tiny, {"name": str(tiny)}).start()
    yield service
    service.stop()


@pytest.fixture
def raw(served: Served) -> Iterator[Raw]:
    """A plain connection to the shared service."""
    with Raw(served.url) as connection:
        yield connection


@pytest.fixture(scope="session")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service that counts instead of training, shared by all tests, with short times."""
    times = {"poll": 2.0, "gap_pause": 0.3, "gap_fail": 2.0, "session": 300.0}
    service = ledger(tmp_path_factory.mktemp("counting") / "data", {"times": times}).start()
    yield service
    service.stop()


@pytest.fixture
def counted(counting: Served) -> Iterator[Raw]:
    """A plain connection to the service that counts."""
    with Raw(counting.url) as connection:
        yield connection
