"""What a user does: installs wheels or a checkout into a clean environment, and asks `twinkle` what is there."""

import json
import sys
from pathlib import Path

import pytest
from environments import Environment, EnvironmentMaker, run
from house import MEMBERS, ROOT

PLAIN = [text for member in MEMBERS for text in member.project["dependencies"]]
PLUGINS = {member.name for member in MEMBERS} - {"twinkle-registry", "twinkle-torch"}


def plugins_in(environment: Environment) -> dict[str, str]:
    """Return the status of each plugin that `twinkle plugins list` finds."""
    listed = json.loads(environment.run("twinkle", "plugins", "list", "--json").stdout)
    return {plugin["name"]: plugin["status"] for plugin in listed}


@pytest.fixture(scope="module")
def core_alone(environment: EnvironmentMaker, wheels: Path) -> Environment:
    floors = [member for member in MEMBERS if member.name in ("twinkle-registry", "twinkle-core", "twinkle-cli")]
    made = environment(text for member in floors for text in member.project["dependencies"])
    made.install(wheels, *(member.name for member in floors))
    return made


@pytest.mark.full
def test_all_wheels_install_together(environment: EnvironmentMaker, wheels: Path) -> None:
    made = environment(PLAIN)
    made.install(wheels, *(member.name for member in MEMBERS))
    assert plugins_in(made) == dict.fromkeys(PLUGINS, "ok")
    missing = made.run("python", "-c", "from twinkle.loss import CrossEntropyLoss", check=False).stderr
    assert missing.splitlines()[-1] == (
        "twinkle_registry.errors.RequirementMissing: loss 'CrossEntropyLoss' of twinkle-losses needs torch>=2.6 "
        "(not installed); run: pip install 'twinkle-losses[torch]'"
    )


@pytest.mark.full
def test_a_checkout_installs_with_all_members(environment: EnvironmentMaker) -> None:
    """As `pip install .` does it, but with what is needed from outside already there."""
    made = environment([*PLAIN, "hatchling"])
    pip = [sys.executable, "-m", "pip", "--python", made.folder / "bin" / "python", "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-index", "--no-build-isolation", ROOT], made.folder)
    assert plugins_in(made) == dict.fromkeys(PLUGINS, "ok")


def test_core_alone_lists_itself(core_alone: Environment) -> None:
    assert plugins_in(core_alone) == {"twinkle-core": "ok", "twinkle-cli": "ok"}
    assert "twinkle 0.1.0" in core_alone.run("twinkle", "--version").stdout


@pytest.mark.sample(2)
@pytest.mark.parametrize("room", ["loss", "metric", "dataset", "template", "processor", "recipe"])
def test_core_alone_has_every_room(room: str, core_alone: Environment) -> None:
    core_alone.run("python", "-W", "error", "-c", f"import twinkle.{room}; dir(twinkle.{room})")


def test_core_alone_says_what_it_lacks(core_alone: Environment) -> None:
    done = core_alone.run("twinkle", "run", "sft", check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: recipe 'sft': no installed plugin offers it")
