"""Checkpoints that somebody made up, whose manifest fits: refused in words, in little memory, and nothing runs."""

import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from server_hostile import CONFIGS, CONFIGS_OF_SAMPLERS, FOLDERS, STATES, TENSOR_FILES, Damage, Prepare, seal, sealed
from server_pool import Bench, datum

from twinkle_server.engine.errors import UserError
from twinkle_server.engine.files import Damaged
from twinkle_server.engine.runner import Sources
from twinkle_server.operations import Create, Load
from twinkle_transformers.adapters import CONFIG, WEIGHTS
from twinkle_transformers.pool.snapshots import STATE, TENSORS

WAYS = [("state", "create"), ("state", "load"), ("state", "restore"), ("adapter", "create"), ("adapter", "sample")]
GROWTH = 64 * 2**20
ADDRESSES = 2**30
"""Bytes that an attempt may map beyond what is there: what asks for more fails instead of taking the machine down."""


@contextmanager
def little_memory() -> Iterator[None]:
    """Demand that no more memory is taken than a checkpoint of this size needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError):  # where it may not, the peak of all that was before counts
        Path("/proc/self/clear_refs").write_text("5")
    before, mapped = status("VmHWM"), status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESSES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert status("VmHWM") - before < GROWTH


def status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@pytest.fixture(scope="module")
def house(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, dict[str, Path]]:
    """A backend with a trained model, and a sound checkpoint of each kind."""
    bench = Bench(base, tmp_path_factory.mktemp("hostile"))
    bench.create("a")
    bench.shake("a")
    bench.run("a", [datum(5, 1)])
    return bench, {"state": bench.save("a", "weights"), "adapter": bench.save("a", "sampler_weights")}


def attempt(bench: Bench, way: str, folder: Path) -> None:
    """Use a checkpoint as the engine does."""
    place = Sources(bench.data)(folder.name)
    assert place is not None
    if way == "create":
        bench.executor.create("b", Create(4, 1, source="x"), place)
    elif way == "load":
        bench.executor.load("a", Load("x", "tinker://x"), place)
    elif way == "restore":
        bench.executor.restore("b", place)
    else:
        bench.sample([1, 2], place, max_tokens=1)


def refused(house: tuple[Bench, dict[str, Path]], kind: str, way: str, prepare: Prepare) -> None:
    bench, sound = house
    folder = bench.data / uuid4().hex
    shutil.copytree(sound[kind], folder)
    prepare(folder)
    before = bench.weights("a")
    try:
        with little_memory(), pytest.raises((UserError, Damaged)) as caught:
            attempt(bench, way, folder)
        with pytest.raises(UserError, match="model 'b' does not exist"):
            bench.step("b")
    finally:
        bench.executor.remove("b")
    assert isinstance(caught.value, Damaged) or str(bench.data) not in str(caught.value)  # clients see no `Damaged`
    assert not (bench.data / "mark").exists()
    after = bench.weights("a")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.sample(60)
@pytest.mark.parametrize("damage", TENSOR_FILES.values(), ids=TENSOR_FILES)
@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_a_made_up_file_of_tensors_is_refused(house: Any, kind: str, way: str, damage: Damage) -> None:
    refused(house, kind, way, sealed(damage, TENSORS if kind == "state" else WEIGHTS))


@pytest.mark.parametrize("damage", STATES.values(), ids=STATES)
@pytest.mark.parametrize("way", ["create", "load", "restore"])
def test_a_made_up_state_is_refused(house: Any, way: str, damage: Damage) -> None:
    refused(house, "state", way, sealed(damage, STATE))


@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments")
@pytest.mark.parametrize("damage", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("way", ["create", "sample"])
def test_a_made_up_configuration_is_refused(house: Any, way: str, damage: Damage) -> None:
    refused(house, "adapter", way, sealed(damage, CONFIG))


@pytest.mark.parametrize("damage", CONFIGS_OF_SAMPLERS.values(), ids=CONFIGS_OF_SAMPLERS)
def test_a_sampler_takes_no_configuration_that_it_cannot_honour(house: Any, damage: Damage) -> None:
    refused(house, "adapter", "sample", sealed(damage, CONFIG))
    assert "antigravity" not in sys.modules


@pytest.mark.sample(2)
@pytest.mark.parametrize("prepare", FOLDERS.values(), ids=FOLDERS)
def test_a_made_up_folder_is_refused(house: Any, prepare: Prepare) -> None:
    refused(house, "adapter", "sample", prepare)


@pytest.mark.parametrize("folder", ["../outside", "/tmp", "", "checkpoints/../../x", ".."])
def test_a_place_outside_of_the_data_directory_is_refused(house: Any, folder: str) -> None:
    with pytest.raises(ValueError, match="must be inside the data folder"):
        Sources(house[0].data)(folder)


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_the_sound_ones_are_taken(house: Any, kind: str, way: str) -> None:
    """Else the tests above would say nothing."""
    bench, sound = house
    folder = bench.data / uuid4().hex
    shutil.copytree(sound[kind], folder)
    seal(folder)
    with little_memory():
        attempt(bench, way, folder)
    bench.executor.remove("b")
