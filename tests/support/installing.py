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


class Unpacked(dict[str, Path]):
    """By name of a member, a folder that holds what its wheel holds; a wheel is built when it is asked for."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def __missing__(self, name: str) -> Path:
        (member,) = (member for member in MEMBERS if member.name == name)
        (wheel,) = WheelBuilder(str(member.folder)).build(directory=str(self._base), versions=["standard"])
        self[name] = self._base / name
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self[name])
        return self[name]


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Unpacked(tmp_path_factory.mktemp("unpacked"))


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
