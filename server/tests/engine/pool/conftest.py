"""A tiny model for the tests of the torch backend."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from server_pool import Bench

from twinkle.testing import tiny_model


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("pool") / "base", "qwen3", initializer_range=0.1)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench(base: Path, tmp_path: Path) -> Bench:
    return Bench(base, tmp_path)


@pytest.fixture(scope="module")
def shared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Serve all tests of a module, with two equal models `a` and `b`."""
    bench = Bench(base, tmp_path_factory.mktemp("shared"))
    for queue_id in "ab":
        bench.create(queue_id, seed=1)
        bench.shake(queue_id)
    return bench


@pytest.fixture
def fresh(base: Path, tmp_path: Path) -> Callable[..., Any]:
    """Make further backends, each a process of its own as far as its state goes."""

    def make(**options: Any) -> Bench:
        return Bench(base, tmp_path, **options)

    return make
