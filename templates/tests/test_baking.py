"""Every scaffold bakes into a project without placeholders, that its own linter and manifest reader accept."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from twinkle._registry import registry
from twinkle.errors import ArgumentError, OutputError
from twinkle.kinds import KINDS
from twinkle_registry import read_manifest
from twinkle_scaffolds import baking
from twinkle_scaffolds.baking import SCAFFOLD, bake, scaffolds
from twinkle_scaffolds.naming import check_name

PACKAGES = [kind for kind in scaffolds() if kind != "hub-repo"]
PLACEHOLDER = re.compile(r"\{%|%\}|\{#|\{\{ *[a-z_]|TODO|FIXME|Undefined")
COMMON = {
    ".github/workflows/test.yml", ".gitignore", "LICENSE", "README.md", "pyproject.toml",
    "benchmarks/case.py", "benchmarks/speed.py", "tests/test_contract.py",
}  # fmt: skip


def texts(folder: Path) -> dict[str, str]:
    """Return all files of a folder by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in files}


class Baked(dict[str, Path]):
    """By kind the project of a plugin of that kind, named `acme-my-<kind>`; made when it is asked for."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def __missing__(self, kind: str) -> Path:
        self[kind] = bake(kind, f"acme-my-{kind.replace('_', '-')}", self._parent, author='Ada "A" Lovelace')
        return self[kind]


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Baked(tmp_path_factory.mktemp("baked"))


def test_there_is_a_scaffold_for_every_kind_that_people_write() -> None:
    assert set(PACKAGES) == {name for name, kind in KINDS.items() if kind.author}
    assert {path.name for path in (SCAFFOLD / "kinds").iterdir()} == set(scaffolds())


@pytest.mark.full
@pytest.mark.parametrize("kind", scaffolds())
def test_nothing_of_the_scaffold_is_left(kind: str, baked: dict[str, Path]) -> None:
    for name, text in texts(baked[kind]).items():
        assert not name.endswith(".jinja")
        left = PLACEHOLDER.search(text.replace("${{ matrix.python }}", ""))
        assert left is None, f"{name} holds {left}"


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", PACKAGES)
def test_a_project_has_what_all_have_and_its_component(kind: str, baked: dict[str, Path]) -> None:
    package = f"acme_my_{kind}"
    own = {"__init__.py", "py.typed", "twinkle-plugin.toml", f"{kind}.py"}
    files = set(texts(baked[kind]))
    assert files >= COMMON | {f"src/{package}/{name}" for name in own} | {f"tests/test_{kind}.py"}
    assert all(text.endswith("\n") for name, text in texts(baked[kind]).items() if text and name != "LICENSE")


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", PACKAGES)
def test_its_manifest_is_one_of_ours(kind: str, baked: dict[str, Path]) -> None:
    package = f"acme_my_{kind}"
    path = baked[kind] / "src" / package / "twinkle-plugin.toml"
    (spec,) = read_manifest(path, dist="", version="").components
    assert (spec.kind, spec.ref) == (kind, f"{package}.{kind}:{spec.name}")
    assert spec.name.startswith("acme_my_" if kind == "recipe" else "AcmeMy")
    module = (path.parent / f"{kind}.py").read_text("utf-8")
    assert f"\nclass {spec.name}" in module or f"\ndef {spec.name}(" in module


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", PACKAGES)
def test_its_project_is_installable(kind: str, baked: dict[str, Path]) -> None:
    project = tomllib.loads((baked[kind] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"]["twinkle"] == {"plugin": f"acme_my_{kind}"}
    assert project["dependencies"][0] == "twinkle-core>=0.1,<1"
    assert project["authors"] == [{"name": 'Ada "A" Lovelace'}]


def brought_by(requirements: list[str]) -> set[str]:
    """Return our distributions that the requirements bring."""
    brought: set[str] = set()
    todo = [name for text in requirements if (name := Requirement(text).name).startswith("twinkle-")]
    while todo:
        if (name := todo.pop()) not in brought:
            brought.add(name)
            texts = [text for text in distribution(name).requires or () if "extra ==" not in text]
            todo += [below for text in texts if (below := Requirement(text).name).startswith("twinkle-")]
    return brought


def offered_by(module: str, name: str) -> set[str]:
    """Return the plugins that offer `module.name`; none where core defines it."""
    specs: list[Any] = registry().exports(module).get(name, [])
    kind = module.removeprefix("twinkle.")
    return {spec.dist for spec in specs or (registry().specs(kind).get(name, []) if kind in KINDS else [])}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", PACKAGES)
def test_its_project_declares_the_plugins_of_the_names_that_it_imports(kind: str, baked: dict[str, Path]) -> None:
    project = tomllib.loads((baked[kind] / "pyproject.toml").read_text("utf-8"))["project"]
    shipped = brought_by(project["dependencies"])
    tested = shipped | brought_by(project["optional-dependencies"]["test"])
    assert tested >= {"twinkle-cli", "twinkle-testing"}
    undeclared = {
        f"{path.relative_to(baked[kind])}: {node.module}.{alias.name} of {dist}"
        for path in baked[kind].rglob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body  # what a function imports may be for those who have it
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("twinkle.")
        for alias in node.names
        for dist in offered_by(str(node.module), alias.name)
        if dist not in (shipped if "src" in path.parts and path.name != "example.py" else tested)
    }
    assert undeclared == set()


def test_the_ci_file_is_yaml_and_runs_all_checks(baked: dict[str, Path]) -> None:
    flow: Any = yaml.safe_load((baked["loss"] / ".github/workflows/test.yml").read_text("utf-8"))
    steps = [step.get("run", "") for step in flow["jobs"]["test"]["steps"]]
    assert {"ruff check .", "ruff format --check .", "pytest", "twinkle plugins test ."} <= set(steps)
    assert flow["jobs"]["test"]["steps"][1]["with"]["python-version"] == "${{ matrix.python }}"


@pytest.mark.parametrize("kinds", [["hub-repo", *PACKAGES[::8]], pytest.param(scaffolds(), marks=pytest.mark.full)])
def test_they_pass_their_own_linter(kinds: list[str], baked: dict[str, Path]) -> None:
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    assert ruff, "ruff is among the tools of developers"
    for command in (["check"], ["format", "--check"]):
        argv = [ruff, *command, "--no-cache", *(str(baked[kind]) for kind in kinds)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_repository_for_a_hub_has_no_metadata_of_pip_and_relative_imports(baked: dict[str, Path]) -> None:
    files = texts(baked["hub-repo"])
    assert not {"pyproject.toml", "setup.py"} & set(files)
    assert "from .patch import AcmeMyHubRepoPatch" in files["__init__.py"]
    (spec,) = read_manifest(baked["hub-repo"] / "twinkle-plugin.toml", dist="", version="").components
    assert spec.kind == "patch"
    assert spec.ref.endswith("patch:AcmeMyHubRepoPatch")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("acme-focal", "AcmeFocalLoss"),
        ("focal", "FocalLoss"),
        ("acme-focal-loss", "AcmeFocalLoss"),
        ("x2-y", "X2YLoss"),
    ],
)
def test_the_class_is_called_after_the_distribution(name: str, component: str, tmp_path: Path) -> None:
    folder = bake("loss", name, tmp_path)
    assert f"class {component}(Loss)" in (folder / "src" / name.replace("-", "_") / "loss.py").read_text("utf-8")


@pytest.mark.full
@pytest.mark.parametrize("asked", ["tool-parser", "tool_parser"])
def test_hyphens_and_underscores_of_a_kind_are_the_same(asked: str, tmp_path: Path) -> None:
    assert (bake(asked, "acme-calls", tmp_path) / "src/acme_calls/tool_parser.py").is_file()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Acme-Focal", "try 'acme-focal'"),
        ("acme_focal", "try 'acme-focal'"),
        ("AcmeFocal", "try 'acme-focal'"),
        ("acme_focal2", "try 'acme-focal2'"),
        ("twinkle-my-losses", "taken; try 'acme-my-losses'"),
        ("torch", "the package 'torch' at .*; try 'acme-torch'"),
        ("pydantic-core", "the package 'pydantic_core'"),
        ("typing-extensions", "the package 'typing_extensions'"),
        ("pyyaml", "the distribution 'pyyaml'"),
        ("9lives", "try 'lives'"),
        ("../escape", "try 'escape'"),
        ("acme-{{ kind }}", "try 'acme-kind'"),
        ("", "such as 'acme-focal'"),
        ("漢字", "such as 'acme-focal'"),
        ("json", "Python's own; try 'acme-json'"),
        ("class", "Python's own"),
        ("twinkle", "taken"),
        ("twinkle-losses", "taken; try 'acme-losses'"),
        ("a" * 51, "at most 50"),
    ],
)
def test_names_that_no_package_can_have_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=reason.replace("(", r"\(")):
        bake("loss", name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("los", "nearest: 'loss'"),
        ("optimizer", "no scaffold for kind 'optimizer'"),
        ("spoon", "there are loss, reward"),
    ],
)
def test_kinds_without_a_scaffold_are_refused(kind: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=reason):
        bake(kind, "acme-focal", tmp_path)


def test_what_stands_there_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "acme-focal").mkdir()
    (tmp_path / "acme-focal" / "mine.txt").write_text("mine", "utf-8")
    (tmp_path / "acme-file").write_text("mine", "utf-8")
    (tmp_path / "acme-link").symlink_to("nowhere")
    for name in ("acme-focal", "acme-file", "acme-link"):
        with pytest.raises(OutputError, match="exists already"):
            bake("loss", name, tmp_path)
    assert texts(tmp_path) == {"acme-focal/mine.txt": "mine", "acme-file": "mine"}


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "acme-focal").mkdir()
    assert (bake("loss", "acme-focal", tmp_path) / "pyproject.toml").is_file()


def test_nothing_is_left_where_it_fails_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target: Path, answers: dict[str, Any]) -> None:
        target.mkdir()
        (target / "half.txt").write_text("half", "utf-8")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(baking, "_run_copier", fail)
    with pytest.raises(OutputError, match="No space left"):
        bake("loss", "acme-focal", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_the_author_is_gits_and_else_a_plain_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baking, "git_author", lambda: "Grace Hopper")
    assert "Grace Hopper" in (bake("loss", "acme-one", tmp_path) / "LICENSE").read_text("utf-8")
    monkeypatch.setattr(baking, "git_author", lambda: "")
    assert "The authors of acme-two" in (bake("loss", "acme-two", tmp_path) / "LICENSE").read_text("utf-8")


def test_a_missing_git_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert baking.git_author() == ""


@pytest.mark.full
def test_an_author_in_two_lines_is_one_line(tmp_path: Path) -> None:
    text = (bake("loss", "acme-focal", tmp_path, author="Ada\nLovelace") / "pyproject.toml").read_text("utf-8")
    assert tomllib.loads(text)["project"]["authors"] == [{"name": "Ada Lovelace"}]


@pytest.mark.full
def test_an_edit_of_the_scaffold_works_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cached or copied at installation: a checkout's own files are baked."""
    edited = tmp_path / "scaffold"
    shutil.copytree(SCAFFOLD, edited)
    with (edited / "kinds/loss/component.py.jinja").open("a", encoding="utf-8") as file:
        file.write("\n# house rules for {{ component }}\n")
    monkeypatch.setattr(baking, "SCAFFOLD", edited)
    module = bake("loss", "acme-focal", tmp_path) / "src/acme_focal/loss.py"
    assert module.read_text("utf-8").endswith("# house rules for AcmeFocalLoss\n")


def test_answers_can_be_read_as_json(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from twinkle_scaffolds.command import new

    result = CliRunner().invoke(new, ["loss", "acme-focal", "--into", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["folder"] == str(tmp_path / "acme-focal")
    assert "src/acme_focal/loss.py" in found["files"]


def test_a_name_that_is_installed_from_a_folder_here_is_no_other_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src" / "acme_here").mkdir(parents=True)
    (tmp_path / "src" / "acme_here" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "src")
    with pytest.raises(ArgumentError, match=r"'acme_here' at .*; choose another name"):
        check_name("acme-here")
    monkeypatch.chdir(tmp_path)
    assert check_name("acme-here") == "acme-here"


@pytest.mark.full
@pytest.mark.parametrize("words", [[], ["tests"]])
def test_the_tests_of_a_repository_for_a_hub_pass(words: list[str], baked: dict[str, Path]) -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(argv, cwd=baked["hub-repo"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
