"""`plugins test` on code from a hub: with a manifest and without, trusted or not. A folder is the repository."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import twinkle
from twinkle.cli import main

REWARD = '''
from twinkle.reward import Reward

class Zero(Reward):
    """Nothing."""
    def __call__(self, trajectories, **kwargs):
        return [0.0 for _ in trajectories]
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository of two rewards, one filter and no manifest; working directory and cache are this test's own."""
    folder = tmp_path / "hub" / "acme-zero"
    folder.mkdir(parents=True)
    (folder / "rewards.py").write_text(REWARD)
    (folder / "__init__.py").write_text(
        "from twinkle.filter import Filter\nfrom twinkle.reward import Reward\nfrom .rewards import Zero\n\n\n"
        "class One(Reward):\n    'Always one.'\n\n    def __call__(self, trajectories, **kwargs):\n"
        "        return [1.0 for _ in trajectories]\n\n\n"
        "class All(Filter):\n    'Keeps all.'\n\n    def __call__(self, row):\n        return True\n\n\n"
        "def two(trajectories, **kwargs):\n    'Always two.'\n    return [2.0 for _ in trajectories]\n"
    )
    for name in [name for name in os.environ if name.startswith("TWINKLE_")]:
        monkeypatch.delenv(name)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    twinkle.registry.cache_clear()
    if "file" not in twinkle.registry().names("hub"):
        pytest.skip("twinkle-hub is not installed")
    yield folder
    twinkle.registry.cache_clear()
    for name in [name for name in sys.modules if name.startswith("twinkle_registry.code.acme_zero")]:
        del sys.modules[name]


def call(*arguments: str) -> Result:
    twinkle.registry.cache_clear()
    return CliRunner().invoke(main, ["plugins", *arguments])


def test_code_that_nobody_allowed_is_not_run_and_the_error_says_how_to_allow_it(folder: Path) -> None:
    for text in (f"file://{folder}", f"file://{folder}#One"):
        result = call("test", text)
        assert result.exit_code == 2
        assert "cannot run code from" in result.stderr
        assert "twinkle plugins add file://" in result.stderr


def test_the_classes_of_a_repository_without_a_manifest_are_found_by_their_bases(folder: Path) -> None:
    assert call("add", f"file://{folder}", "--yes").exit_code == 0
    every = call("test", f"file://{folder}")
    assert every.exit_code == 0, every.output
    lines = every.output.splitlines()
    assert [line.partition(":")[0] for line in lines if line.startswith(("reward ", "filter "))] == [
        "reward Zero",
        "reward One",
        "filter All",
    ]
    assert call("test", f"file://{folder}", "--kind", "filter").output.count("filter All: ") == 1
    assert "reward One: " in call("test", f"file://{folder}#One").output
    assert "reward two: " in call("test", f"file://{folder}#two", "--kind", "reward").output
    untold = call("test", f"file://{folder}#two")
    assert untold.exit_code == 2
    assert "--kind" in untold.stderr
    misspelt = call("test", f"file://{folder}#Onee")
    assert misspelt.exit_code == 2
    assert "'One'" in misspelt.stderr


def test_a_repository_without_any_component_says_so(folder: Path) -> None:
    (folder / "__init__.py").write_text("")
    assert call("add", f"file://{folder}", "--yes").exit_code == 0
    result = call("test", f"file://{folder}")
    assert result.exit_code == 2
    assert "#Name' --kind loss" in result.stderr


def test_a_manifest_is_what_a_repository_offers(folder: Path) -> None:
    (folder / "twinkle-plugin.toml").write_text(
        'schema = 1\ncore = ">=0.1,<1"\nname = "acme-zero"\n\n'
        '[[component]]\nkind = "reward"\nname = "Zero"\nref = ".rewards:Zero"\n'
    )
    assert call("add", f"file://{folder}", "--yes").exit_code == 0
    for name in ("", "#Zero"):
        assert "1 component: " in call("test", f"file://{folder}{name}").output
    assert "'Zero'" in call("test", f"file://{folder}#Zerro").stderr
