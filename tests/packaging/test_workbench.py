"""The meta distribution, and the lists in the root that must name every member."""

import re
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from types import MappingProxyType

import pytest
from environments import closure
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from house import MEMBERS, ROOT, SETTINGS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TOOLS = MappingProxyType(SETTINGS["tool"])
PACKAGES = {member.source.name for member in MEMBERS}
ELSEWHERE = {"wandb", "swanlab", "trackio", "mlflow", "liger", "npu", "envs", "openenv", "otel", "pii", "tinker"}
"""Extras for accounts, devices, games, language models and the client of another service.

`make soak` and `make gpu` test those that are there; the tools of developers bring that client.
"""


def metadata_of_wheel(project: Path, out: Path) -> Message:
    (wheel,) = WheelBuilder(str(project)).build(directory=str(out), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return message_from_string(archive.read(name).decode())


def requirements(metadata: Message) -> list[Requirement]:
    found = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    return [requirement for requirement in found if "extra" not in str(requirement.marker)]


def test_in_a_checkout_members_are_the_folders_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINKLE_RELEASE", raising=False)
    found = requirements(metadata_of_wheel(ROOT, tmp_path))
    assert {r.name: r.url for r in found} == {m.name: m.folder.as_uri() for m in MEMBERS}


def test_in_a_release_members_are_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_RELEASE", "1")
    found = requirements(metadata_of_wheel(ROOT, tmp_path))
    assert {r.name: str(r.specifier) for r in found} == {m.name: f"=={m.project['version']}" for m in MEMBERS}


def test_a_released_sdist_builds_the_same_wheel_without_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINKLE_RELEASE", "1")
    expected = metadata_of_wheel(ROOT, tmp_path)
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.delenv("TWINKLE_RELEASE")
    (project,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert metadata_of_wheel(project, tmp_path / "again").items() == expected.items()


def test_members_are_all_folders_with_a_project() -> None:
    folders = {path.parent for path in ROOT.glob("*/pyproject.toml")} | {
        p.parent for p in ROOT.glob("*/*/pyproject.toml")
    }
    assert {member.folder for member in MEMBERS} == {f for f in folders if not f.name.startswith(".")}
    workspace = {folder for pattern in TOOLS["uv"]["workspace"]["members"] for folder in ROOT.glob(pattern)}
    assert {folder for folder in workspace if (folder / "pyproject.toml").is_file()} == {m.folder for m in MEMBERS}


def test_members_share_one_version_and_pin_each_other_to_it() -> None:
    version = SETTINGS["project"]["version"]
    assert {member.project["version"] for member in MEMBERS} == {version}
    ours = {member.name for member in MEMBERS}
    pins = {text for member in MEMBERS for text in member.requirements if Requirement(text).name in ours}
    assert pins
    assert {str(Requirement(text).specifier) for text in pins} == {f"=={version}"}


def test_developers_get_every_member_with_all_its_extras_but_those_of_elsewhere() -> None:
    lines = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    found = [re.fullmatch(r"-e \./([\w/]+)(?:\[([\w,]+)\])?", line) for line in lines if line.startswith("-e")]
    listed = {match[1]: set((match[2] or "").split(",")) - {""} for match in found if match}
    wanted = {str(m.folder.relative_to(ROOT)): {*m.project.get("optional-dependencies", {})} for m in MEMBERS}
    assert listed == {folder: extras - ELSEWHERE for folder, extras in wanted.items()}


def test_the_extra_train_brings_what_the_members_have_as_extras() -> None:
    tables = [m.project.get("optional-dependencies", {}) for m in MEMBERS]
    extras = [[texts for name, texts in table.items() if name not in ELSEWHERE | {"testing"}] for table in tables]
    plain = {text for member in MEMBERS for text in member.project["dependencies"]}
    ours = {member.name for member in MEMBERS}
    every = {text for groups in extras for group in groups for text in group} - plain
    every = {text for text in every if Requirement(text).name not in ours}  # every member is installed anyway
    assert set(SETTINGS["project"]["optional-dependencies"]["train"]) == every


def test_every_tool_knows_every_package() -> None:
    assert set(TOOLS["importlinter"]["root_packages"]) == PACKAGES
    assert set(TOOLS["ruff"]["lint"]["isort"]["known-first-party"]) == PACKAGES
    layers = [set(re.split(r"\s*\|\s*", layer)) for layer in TOOLS["importlinter"]["contracts"][0]["layers"]]
    assert layers == [
        {"twinkle_server"},
        PACKAGES - {"twinkle_server", "twinkle_hub", "twinkle_torch", "twinkle", "twinkle_registry"},
        {"twinkle_hub", "twinkle_torch"},
        {"twinkle"},
        {"twinkle_registry"},
    ]
    relaxed = next(o["module"] for o in TOOLS["mypy"]["overrides"] if o.get("strict") is False)
    plugins = {m.source.name for m in MEMBERS if m.folder.parent.name == "plugins"}
    strict = {"twinkle_torch", "twinkle_chat", "twinkle_cli", "twinkle_testing"}  # as strict as core
    assert {name.partition(".")[0] for name in relaxed} == plugins - strict


def test_everything_that_the_house_stands_on_is_pinned() -> None:
    """Except what torch brings with it where there is a GPU."""
    text = (ROOT / "constraints.txt").read_text("utf-8")
    pins = {canonicalize_name(line.partition("==")[0]) for line in text.splitlines() if "==" in line}
    tools = [line for line in (ROOT / "requirements-dev.txt").read_text("utf-8").splitlines() if line[0] not in "#-"]
    used = closure([*(text for member in MEMBERS for text in member.requirements), *tools, "hatchling", "editables"])
    theirs = {canonicalize_name(Requirement(text).name) for text in used["torch"].requires or ()}
    assert {name for name in used if name not in pins | theirs and not name.startswith("nvidia")} == set()
