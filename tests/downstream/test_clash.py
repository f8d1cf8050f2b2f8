"""Another distribution that installs files into the package `twinkle`, as one on PyPI does."""

from pathlib import Path

import pytest
from environments import Environment, EnvironmentMaker
from hatchling.builders.wheel import WheelBuilder
from house import MEMBERS

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "other-kit"
version = "0.5"

[project.scripts]
twinkle = "twinkle:main"

[tool.hatch.build.targets.wheel]
packages = ["twinkle"]
"""


@pytest.fixture
def crowded(environment: EnvironmentMaker, shelf: Path, tmp_path: Path) -> Environment:
    """The other one first, then core, the registry and the command line over it, as pip does without a word."""
    (tmp_path / "twinkle").mkdir()
    (tmp_path / "twinkle" / "__init__.py").write_text("def main(): print('another')\n", "utf-8")
    (tmp_path / "pyproject.toml").write_text(PROJECT, "utf-8")
    list(WheelBuilder(str(tmp_path)).build(directory=str(tmp_path / "dist"), versions=["standard"]))
    floors = [member for member in MEMBERS if member.name in ("twinkle-registry", "twinkle-core", "twinkle-cli")]
    made = environment(text for member in floors for text in member.project["dependencies"])
    made.install(tmp_path / "dist", "other-kit")
    made.install(shelf, *(member.name for member in floors))
    return made


@pytest.mark.full
def test_the_doctor_names_the_other_owner_and_the_way_out(crowded: Environment) -> None:
    done = crowded.run("twinkle", "plugins", "doctor", check=False)
    assert done.returncode == 1
    assert "second owner of twinkle/: other-kit 0.5 installs files into the package 'twinkle'" in done.stdout
    assert (
        "second command twinkle: other-kit 0.5 installs a command 'twinkle', which belongs to twinkle-cli"
        in done.stdout
    )
    assert "-> pip uninstall other-kit, then pip install --force-reinstall --no-deps twinkle-core" in done.stdout
    assert "2 problems found" in done.stdout
