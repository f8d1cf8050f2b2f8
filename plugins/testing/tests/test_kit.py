"""The kit itself: what it reports, skips and refuses; the command and the pytest plugin."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import twinkle
from twinkle.cli import main
from twinkle.errors import ArgumentError, ComponentNotFound, RequirementMissing, Unsupported
from twinkle.reward import Reward
from twinkle.testing import ContractError, Report, check_component, checks_for
from twinkle_testing.contracts import examine

PLUGIN = ("-p", "twinkle_testing.pytest_plugin")


class Length(Reward):
    """How long the answer is."""

    def __call__(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [float(len(row["messages"][-1]["content"])) for row in trajectories]


class Upside(Length):
    """In another order."""

    def __call__(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [float(at) for at in range(len(trajectories))]


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, twinkle.testing, twinkle_testing.pytest_plugin as p; print({'torch', 'numpy'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_component_that_keeps_its_contract_gives_a_report() -> None:
    report = check_component(Length, "reward")
    assert isinstance(report, Report)
    assert report.ok
    assert [result.name for result in report] == [check.name for check in checks_for("reward")]
    assert report["order"].outcome == "passed"
    assert all(result.seconds >= 0 for result in report)
    assert json.loads(json.dumps(report.as_plain()))["ok"] is True


def test_one_that_breaks_it_raises_with_every_reason() -> None:
    with pytest.raises(ContractError, match=r"failed   order: .*\n +scores \[0.0, 1.0"):
        check_component(Upside, "reward")
    with pytest.raises(AssertionError):
        check_component(Upside, "reward")


def test_what_an_example_skips_is_reported_with_its_reason() -> None:
    skip = {"order": "it scores by place", "one_by_one": "and alone there is one place"}
    report = check_component(Upside, "reward", skip=skip)
    assert report.skipped == [report["order"], report["one_by_one"]]
    assert report["order"].why == "it scores by place"
    assert "skipped  order\n           it scores by place" in report.text()
    everything = check_component(Upside, "reward", skip="needs a device that is not here")
    assert everything.only_skipped


def test_true_and_false_are_no_scores(catches: Any) -> None:
    class Right(Length):
        """Whether there is an answer."""

        def __call__(self, trajectories: Any, **kwargs: Any) -> list[float]:
            return [score > 0 for score in super().__call__(trajectories)]

    catches("reward", "scores", Right)


def test_no_docstring_and_arguments_in_vain_are_caught(catches: Any) -> None:
    class Silent(Length):
        def __init__(self, **kwargs: Any) -> None:
            pass

    Silent.__doc__ = Reward.__doc__ = ""
    catches("reward", "unknown_argument", Silent)

    def bare(trajectories: Any, **kwargs: Any) -> list[float]:
        return [0.0 for _ in trajectories]

    catches("reward", "docstring", bare)


def test_what_cannot_be_built_fails_once_and_says_what_to_give() -> None:
    class Needs(Length):
        """Needs a scale."""

        def __init__(self, scale: float) -> None:
            self.scale = scale

    report = examine(Needs, "reward")
    assert [result.name for result in report.failed] == ["build"]
    assert "scale" in report["build"].why
    assert "kwargs=" in report["build"].why
    assert not report.passed
    assert examine(Needs, "reward", kwargs={"scale": 1.0})["order"].outcome == "passed"


@pytest.mark.parametrize(
    "error", [Unsupported("needs an NPU"), RequirementMissing("needs acme, which is not installed")]
)
def test_what_needs_something_that_is_not_here_is_skipped_with_that_reason(error: Exception) -> None:
    class Elsewhere(Length):
        """Needs a device."""

        def __init__(self) -> None:
            raise error

    report = check_component(Elsewhere, "reward")
    assert report.only_skipped
    assert {result.why for result in report} == {str(error)}


def test_the_random_generators_are_left_as_they_were() -> None:
    import random

    import torch

    random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state()
    check_component("local", "runtime")
    check_component("CrossEntropyLoss", "loss")
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: check_component(Length, "rewad"), ArgumentError, "nearest: 'reward'"),
        (lambda: check_component(Length, "reward", trajectory=[]), ArgumentError, "nearest: 'trajectories'"),
        (lambda: check_component(Length, "reward", skip={"ordr": "no"}), ArgumentError, "nearest: 'order'"),
        (lambda: check_component("CrossEntropyLos", "loss"), ComponentNotFound, "CrossEntropyLoss"),
        (lambda: examine(Length, "reward")["ordr"], KeyError, "order"),
    ],
)
def test_a_wrong_word_names_the_nearest(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_another_kind_is_a_failure_that_says_so() -> None:
    report = examine(Length, "loss")
    assert [result.name for result in report.failed] == ["contract"]
    assert "twinkle.loss.base.Loss" in report["contract"].why


# The command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["plugins", "test", *arguments], catch_exceptions=False)


@pytest.fixture(autouse=True)
def trusted_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of these tests are trusted, so that nobody is asked."""
    monkeypatch.setenv("TWINKLE_TRUST_FOLDER", str(tmp_path))


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plugin that is not installed: one good reward, one bad, an example for the first."""
    package = tmp_path / "acme-kit" / "src" / "acme_kit"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""Acme."""\n')
    (package / "rewards.py").write_text(
        '"""Rewards."""\n\n'
        "def scaled(trajectories, **kwargs):\n"
        '    """Score by length."""\n'
        "    return [float(len(row['messages'][-1]['content'])) for row in trajectories]\n\n"
        "def placed(trajectories, **kwargs):\n"
        '    """Score by place."""\n'
        "    return [float(at) for at in range(len(trajectories))]\n\n"
        "EXAMPLE = {'scores': [19, 17, 38, 0]}\n"
    )
    component = '[[component]]\nkind = "reward"\nname = "{0}"\nref = "acme_kit.rewards:{0}"\n'
    (package / "twinkle-plugin.toml").write_text(
        'schema = 1\ncore = ">=0.1,<1"\nname = "acme-kit"\n\n'
        + component.format("scaled")
        + 'example = "acme_kit.rewards:EXAMPLE"\n\n'
        + component.format("placed")
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    twinkle.registry.cache_clear()
    yield package.parents[1]
    twinkle.registry.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_kit"]:
        del sys.modules[name]


def test_a_folder_is_tested_with_the_examples_of_its_manifest(acme: Path) -> None:
    result = run(str(acme))
    assert result.exit_code == 1
    assert "reward scaled: 10 passed, 1 skipped" in result.output
    assert "failed   order" in result.output
    assert "2 components: 18 passed, 2 failed, 2 skipped" in result.output
    assert run(str(acme), "-k", "scaled").exit_code == 0
    assert run(str(acme), "-k", "order").output.count("reward ") == 2
    assert run("acme-kit/scaled").exit_code == 0, "a plugin of a folder that was tested is known by name"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder as a hub has it: the manifest at its top, relative imports, a name that no package can have."""
    folder = tmp_path / "acme-odd"
    folder.mkdir()
    (folder / "rewards.py").write_text(
        "from .numbers import ZERO\n\n\ndef odd(trajectories, **kwargs):\n    'Score.'\n"
        "    return [ZERO for _ in trajectories]\n\n\nEXAMPLE = {'scores': [0, 0, 0, 0]}\n"
    )
    (folder / "numbers.py").write_text("ZERO = 0.0\n")
    component = (
        '[[component]]\nkind = "reward"\nname = "{0}"\nref = "{1}.rewards:odd"\nexample = "{1}.rewards:EXAMPLE"\n'
    )
    (folder / "twinkle-plugin.toml").write_text(
        'schema = 1\ncore = ">=0.1,<1"\nname = "acme-odd"\n\n'
        + component.format("odd", "")
        + component.format("too", "acme_odd")
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    twinkle.registry.cache_clear()
    yield folder
    twinkle.registry.cache_clear()


@pytest.mark.parametrize("init", ["", "from .rewards import odd\n", None])
def test_a_repository_for_a_hub_is_tested_in_its_folder(init: str | None, repository: Path) -> None:
    if init is not None:
        (repository / "__init__.py").write_text(init)
    for _ in range(2):
        result = run(str(repository))
        assert result.exit_code == 0, result.output
        assert "2 components: 20 passed, 0 failed, 2 skipped" in result.output
    assert not any(name.startswith(("acme_odd", "rewards", "numbers.")) for name in sys.modules)


def test_a_folder_may_have_any_name_that_nothing_installed_has(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository.parent)
    repository.rename("odd_ones")
    assert "2 components: 20 passed" in run("odd_ones").output
    Path("odd_ones").rename("CrossEntropyLoss")
    assert "loss CrossEntropyLoss: " in run("CrossEntropyLoss", "-k", "docstring").output
    assert "2 components: " in run("./CrossEntropyLoss").output


def test_a_repository_that_cannot_be_imported_says_why(repository: Path) -> None:
    (repository / "__init__.py").write_text("import no_such_module_at_all\n")
    result = CliRunner().invoke(main, ["plugins", "test", str(repository)])
    assert result.exit_code == 2
    assert "no_such_module_at_all" in result.output


def test_a_folder_wins_over_the_plugin_of_its_name_that_is_installed_and_a_name_means_that(
    acme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, package = tmp_path / "site", acme / "src" / "acme_kit"
    shutil.copytree(package, site / "acme_kit")
    (package / "rewards.py").write_text((package / "rewards.py").read_text().replace("Score by place", "Mended"))
    manifest = site / "acme_kit" / "twinkle-plugin.toml"
    manifest.write_text(manifest.read_text().partition('\n\n[[component]]\nkind = "reward"\nname = "placed"')[0])
    metadata = site / "acme_kit-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kit\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[twinkle]\nplugin = acme_kit\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(acme.parent)
    twinkle.registry.cache_clear()
    assert "1 component: " in run("acme-kit").output
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_kit"]:
        del sys.modules[name]
    for text in ("./acme-kit", str(acme)):
        assert "2 components: " in run(text).output
    monkeypatch.chdir(acme)
    assert "2 components: " in run(".").output
    assert [r.status for r in twinkle.registry().records if r.name == "acme-kit"] == ["ok"]


def test_the_report_as_json(acme: Path) -> None:
    result = run(str(acme), "--json", "-k", "order")
    plain = json.loads(result.output)
    assert [(report["component"], report["ok"]) for report in plain] == [("scaled", True), ("placed", False)]
    assert plain[0]["checks"][0]["name"] == "order"


def test_a_file_says_its_kind_by_its_base_class_or_is_told(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        '"""Mine."""\nfrom twinkle.filter import Filter\n\n\nclass All(Filter):\n    """Keeps all."""\n\n'
        "    def __init__(self, keep):\n        self.keep = keep\n\n"
        "    def __call__(self, row):\n        return self.keep\n\n\n"
        "def function(row):\n    'Keep.'\n    return True\n\n\nEXAMPLE = {'kwargs': {'keep': True}}\n"
    )
    assert run(f"{file}:All", "--example", f"{file}:EXAMPLE").exit_code == 0
    assert "keep" in run(f"{file}:All").output
    assert run(f"{file}:function", "--kind", "filter").exit_code == 0
    untold = CliRunner().invoke(main, ["plugins", "test", f"{file}:function"])
    assert untold.exit_code != 0
    assert "--kind" in untold.output


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-plugin-at-all"], "no plugin or component is called"),
        (["twinkle-metrics", "--kind", "loss"], "it has metric"),
        (["twinkle-metrics", "-k", "nothing-like-this"], "nothing-like-this"),
        (["twinkle-metrics", "--kind", "los"], "los"),
        (["."], "twinkle-plugin.toml"),
        (["./mine.py"], "add the name of a component: './mine.py:Name'"),
        (["los:CrossEntropyLoss"], "there is no kind 'los'; nearest: 'loss'"),
        (["reward:CrossEntropyLoss"], "no reward is called so, but there is loss:CrossEntropyLoss"),
        (["loss:CrossEntropyLos"], "nearest: CrossEntropyLoss"),
    ],
)
def test_what_is_not_there_is_said(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["plugins", "test", *arguments])
    assert result.exit_code not in (0, 1) or words in result.output
    assert words in result.output


# pytest


def pytest_of(folder: Path, text: str, *arguments: str) -> str:
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", *PLUGIN, "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


@pytest.mark.full
def test_pytest_skips_what_was_only_skipped_and_tells_every_reason(tmp_path: Path) -> None:
    text = (
        "from twinkle.testing import check_component\n\n"
        "def good(trajectories, **kwargs):\n    'Score.'\n    return [0.0 for _ in trajectories]\n\n"
        "def test_part():\n    check_component(good, 'reward', skip={'order': 'no order'})\n\n"
        "def test_nothing():\n    check_component(good, 'reward', skip='no such device')\n\n"
        "def test_broken():\n    check_component(lambda rows, **kwargs: [], 'reward')\n"
    )
    output = pytest_of(tmp_path, text, "-rs")
    assert "1 failed, 1 passed, 1 skipped" in output
    assert "no such device" in output
    assert "no order" in output
    assert "the component breaks the contract of its kind" in output


@pytest.mark.full
def test_pytest_makes_a_test_of_each_check(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from twinkle.reward import Reward\n\n\nclass Mine(Reward):\n    'Score.'\n\n"
        "    def __call__(self, trajectories, **kwargs):\n        return list(map(float, range(len(trajectories))))\n"
    )
    output = pytest_of(tmp_path, "", "--contracts", "./mine.py:Mine", "-rA", "-k", "order or pickle")
    assert "PASSED reward:./mine.py:Mine::pickle" in output.replace("::reward", "reward")
    assert "FAILED reward:./mine.py:Mine::order" in output.replace("::reward", "reward")
    assert f"1 failed, 1 passed, {len(checks_for('reward')) - 2} deselected" in output
