"""Every scaffold, baked by our wheel, installed into one environment of wheels alone, passes its own tests there."""

import os
import subprocess
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from environments import Environment, EnvironmentMaker, closure
from hatchling.builders.wheel import WheelBuilder
from house import MEMBERS, ROOT

from twinkle.kinds import KINDS

pytestmark = pytest.mark.full

WRITTEN = sorted(name for name, kind in KINDS.items() if kind.author)
WITH_MODELS = {"engine", "model", "recipe", "sampler", "template"}
WITH_TORCH = {
    "advantage",
    "checkpoint_engine",
    "dataloader",
    "kernel",
    "loss",
    "metric",
    "patch",
    "processor",
    "scheduler",
}
GROUPS = {
    "without torch": set(WRITTEN) - WITH_MODELS - WITH_TORCH,
    "with torch": WITH_TORCH,
    "with models": WITH_MODELS,
}
TOOLS = ("pytest", "pytest-timeout")
BAKE = """
import sys
from twinkle_scaffolds.baking import bake
for kind in sys.argv[2:]:
    bake(kind, "acme-my-" + kind.replace("_", "-"), sys.argv[1], author="Ada Lovelace")
"""
# It starts a dozen processes that import torch, which is the soak test's to wait for.
SLOW = "acme-my-checkpoint-engine/tests/test_contract.py"


def name_of(kind: str) -> str:
    return f"acme-my-{kind.replace('_', '-')}"


@dataclass(frozen=True)
class Authors:
    """An environment in which the baked plugins are installed, and the folder of their projects."""

    environment: Environment
    projects: Path

    def test(self, kinds: Iterable[str], *options: str) -> str:
        """Run the tests of projects in one process; returns what pytest wrote."""
        folders = [str(self.projects / name_of(kind) / "tests") for kind in sorted(kinds)]
        argv = ["-m", "pytest", "-q", "--timeout=250", "-p", "no:cacheprovider", *options, *folders]
        return self.environment.run("python", *argv).stdout


def wheels_of(projects: Path, kinds: Iterable[str]) -> Path:
    """Build the wheels of projects into a folder."""
    folder = projects / "wheels"
    for kind in kinds:
        list(WheelBuilder(str(projects / name_of(kind))).build(directory=str(folder), versions=["standard"]))
    return folder


def settled(projects: Path) -> None:
    """Say what holds for the tests of all projects in one process, as each project's own settings do."""
    text = "[pytest]\naddopts = --import-mode=importlib\nfilterwarnings =\n    error\n"
    text += "    ignore:.is_gradient_checkpointing. is deprecated:FutureWarning\n"
    (projects / "pytest.ini").write_text(text, "utf-8")


@pytest.fixture(scope="module")
def authors(environment: EnvironmentMaker, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Authors:
    made = environment([*TOOLS, *(text for member in MEMBERS for text in member.requirements)])
    made.install(wheels, *(member.name for member in MEMBERS))
    projects = tmp_path_factory.mktemp("projects")
    made.run("python", "-c", BAKE, projects, *WRITTEN)
    made.install(wheels_of(projects, WRITTEN), *(name_of(kind) for kind in WRITTEN))
    settled(projects)
    return Authors(made, projects)


def test_every_kind_is_in_one_group() -> None:
    assert sorted(kind for group in GROUPS.values() for kind in group) == WRITTEN


@pytest.mark.parametrize("group", GROUPS)
def test_the_tests_of_the_projects_pass(group: str, authors: Authors) -> None:
    text = authors.test(GROUPS[group], f"--deselect={SLOW}")
    assert " passed" in text
    assert "failed" not in text


@pytest.mark.soak
def test_the_slow_contract_is_kept_too(authors: Authors) -> None:
    assert "1 passed" in authors.test(["checkpoint_engine"], "-k", "contract")


def test_all_of_them_are_plugins_without_a_fault(authors: Authors) -> None:
    done = authors.environment.run("twinkle", "plugins", "doctor", check=False)
    assert "acme" not in done.stdout, done.stdout
    listed = authors.environment.run("twinkle", "plugins", "list").stdout
    assert all(f"{name_of(kind)} " in listed for kind in WRITTEN)


@pytest.mark.parametrize("kind", ["env", "reward", "loss"])
def test_twinkle_plugins_test_is_green(kind: str, authors: Authors) -> None:
    done = authors.environment.run("twinkle", "plugins", "test", name_of(kind))
    assert " 0 passed" not in done.stdout
    assert ", 0 failed" in done.stdout.splitlines()[-1]


def test_the_benchmark_runs(authors: Authors) -> None:
    done = authors.environment.run("python", authors.projects / name_of("reward") / "benchmarks" / "speed.py")
    assert done.stdout.startswith("AcmeMyReward: ")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_loss_and_sampler_pass_where_nothing_else_was_ever_installed(wheels: Path, tmp_path: Path) -> None:
    """Everything of other people comes from the package index, at the versions of `constraints.txt`."""
    folder = tmp_path / "clean"
    venv.create(folder, with_pip=True)
    clean = Environment(folder)
    projects = tmp_path / "projects"
    projects.mkdir()
    kinds = ("loss", "sampler")
    wanted = {"torch>=2.6", "transformers>=5.0", "jinja2>=3.1", *TOOLS}
    wanted |= {text for member in MEMBERS for text in member.project.get("dependencies", ()) if closure([text])}
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *sorted(wanted)], check=True, timeout=1500, env=os.environ | {"PYTHONPATH": ""})
    clean.install(wheels, *(member.name for member in MEMBERS))
    clean.run("python", "-c", BAKE, projects, *kinds)
    clean.install(wheels_of(projects, kinds), *(name_of(kind) for kind in kinds))
    settled(projects)
    text = Authors(clean, projects).test(kinds)
    assert " passed" in text
    for kind in kinds:
        clean.run("twinkle", "plugins", "test", name_of(kind))
