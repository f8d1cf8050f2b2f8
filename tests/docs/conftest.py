"""A house for the examples: each page gets a folder of its own, a tiny model in place of the real one, and an end."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from twinkle import registry
from twinkle.testing import tiny_model
from twinkle_registry import discovery
from twinkle_registry.discovery import PathScan, scan_path

ROOT = Path(__file__).parents[2]
# Packages that the pages make, and that a reader may have installed.
STRANGERS = ("acme_losses", "acme_focal", "acme_tapered")
REAL_MODEL = "builtin://smollm2-135m-instruct"


ON_A_HUB = ("hub-plugins.md",)  # pages that read from and write to a hub: a fake one on loopback answers


@pytest.fixture(autouse=True)
def fake_hub(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub for the pages that need one, with caches of its own and a token that may write."""
    page = getattr(getattr(request.node, "callspec", None), "params", {}).get("page")
    if page is None or page.name not in ON_A_HUB:
        yield
        return
    from twinkle.testing import FakeHub

    with FakeHub({"hf_reader": "reader"}) as hub:
        for name, value in (hub.environment(tmp_path / ".hub") | {"HF_TOKEN": "hf_reader"}).items():
            monkeypatch.setenv(name, value)
        yield


def without_strangers(entry: str, place: Path) -> PathScan:
    """Return what an entry of sys.path holds; of what this machine has installed, our own plugins alone."""
    dists, plugins = scan_path(entry)
    if Path(entry).is_relative_to(place):
        return PathScan(dists, plugins)
    return PathScan(dists, [plugin for plugin in plugins if plugin.dist.startswith("twinkle-")])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that stands in for the real one."""
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def place(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory in which the real model's name means the tiny one; nothing done there stays."""
    for name in ("examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TWINKLE_MODEL_ID_ALIASES", json.dumps({REAL_MODEL: str(tiny)}))
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / ".cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(discovery, "scan_path", lambda entry: without_strangers(entry, tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] in STRANGERS]:
        monkeypatch.delitem(sys.modules, name)
    modules, threads = set(sys.modules), torch.get_num_threads()
    torch.set_num_threads(1)
    registry.cache_clear()
    yield tmp_path
    torch.set_num_threads(threads)
    registry.cache_clear()
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
