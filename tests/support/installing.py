"""Wheels of all members, and clean environments to install them into: the fixtures of tests that install."""

import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from environments import Environment, EnvironmentMaker, View, closure, link
from hatchling.builders.wheel import WheelBuilder
from house import MEMBERS


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of every member."""
    folder = tmp_path_factory.mktemp("wheels")
    for member in MEMBERS:
        list(WheelBuilder(str(member.folder)).build(directory=str(folder), versions=["standard"]))
    return folder


@pytest.fixture(scope="session")
def unpacked(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name of a member, a folder that holds what its wheel holds."""
    folders = {member.name: tmp_path_factory.mktemp(member.name) for member in MEMBERS}
    for name, folder in folders.items():
        (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folders


@pytest.fixture(scope="session")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    """Returns a folder to import from that holds what the requirements bring, and nothing else."""
    made: dict[frozenset[str], Path] = {}

    def make(requirements: Iterable[str]) -> Path:
        dists = closure(requirements)
        key = frozenset(dists)
        if key not in made:
            made[key] = link(dists.values(), tmp_path_factory.mktemp("view"))
        return made[key]

    return make


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, view: View) -> EnvironmentMaker:
    """Returns a new environment in which what the requirements bring can be imported."""

    def make(requirements: Iterable[str]) -> Environment:
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "view.pth").write_text(f"{view(requirements)}\n", "utf-8")
        return Environment(folder)

    return make
