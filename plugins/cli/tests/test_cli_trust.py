"""`twinkle plugins trust|untrust`, and what is asked before code of a folder is tested."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from twinkle._registry import registry
from twinkle.cli import main
from twinkle_registry.trust.lock import Lock

# The command line shows what the registry warns of; in other tests a warning is an error.
pytestmark = pytest.mark.filterwarnings("always:.*ignored, because")
Call = Callable[..., Result]
MANIFEST = (
    'schema = 1\ncore = ">=0.1,<1"\nname = "acme-odd"\n\n[[component]]\nkind = "filter"\nname = "Odd"\nref = ".:Odd"\n'
)
CODE = '''
from pathlib import Path
from twinkle.filter import Filter

(Path(__file__).parent / "ran").touch()

class Odd(Filter):
    """Keeps all."""
    def __call__(self, row): return True
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of somebody else, which is the working directory: settings, a lock, and a plugin's code."""
    for name in [name for name in os.environ if name.startswith("TWINKLE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TWINKLE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made = tmp_path / "their-checkout"
    made.mkdir()
    (made / "twinkle.toml").write_text('[trust]\nallow = ["hf://mallory/*"]\n')
    digest = "0" * 64
    (made / "twinkle.lock").write_text(f'schema = 1\n[[file]]\npath = "a\\u001b[2J.py"\nsha256 = "{digest}"\n')
    (made / "twinkle-plugin.toml").write_text(MANIFEST)
    (made / "__init__.py").write_text(CODE)
    monkeypatch.chdir(made)
    return made


@pytest.fixture
def call() -> Call:
    def invoke(*arguments: str, answer: str = "") -> Result:
        registry.cache_clear()
        return CliRunner().invoke(main, ["plugins", *arguments], input=answer, env={"COLUMNS": "120"})

    return invoke


def at_a_terminal(folder: Path, *arguments: str, answer: str) -> tuple[int, str]:
    """Run a command whose standard input is a terminal, on which somebody answers."""
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    command = [sys.executable, "-m", "twinkle.cli", "plugins", *arguments]
    done = subprocess.run(command, cwd=folder, stdin=theirs, capture_output=True, text=True, timeout=120)
    os.close(ours)
    os.close(theirs)
    return done.returncode, done.stdout + done.stderr


def test_what_is_not_obeyed_is_told_in_one_line_with_the_command(folder: Path, call: Call) -> None:
    result = call("list")
    (line,) = [line for line in result.stderr.splitlines() if "ignored, because" in line]
    assert line.startswith("Warning: [trust] allow of twinkle.toml and twinkle.lock in ")
    assert line.endswith(f"twinkle plugins trust {folder}")
    doctor = call("doctor")
    assert doctor.exit_code == 1
    assert "settings: [trust] allow of twinkle.toml and twinkle.lock in" in doctor.stdout


def test_trust_shows_what_is_asked_for_and_nobody_who_answers_is_no_yes(folder: Path, call: Call) -> None:
    refused = call("trust", answer="y\n")
    assert refused.exit_code == 2
    assert f"there is no terminal to ask on; review the text above, then run: twinkle plugins trust {folder} --yes" in (
        refused.stderr
    )
    assert "    [trust] allow = ['hf://mallory/*']\n" in refused.stdout
    assert "\x1b" not in refused.stdout
    looked = json.loads(call("trust", "--json").stdout)
    assert (looked["trusted"], sorted(looked["asks"])) == (False, ["twinkle.lock", "twinkle.toml"])
    assert not Lock.load().is_obeyed


def test_trust_lasts_until_the_files_change_or_it_is_taken_back(folder: Path, call: Call) -> None:
    assert call("trust", str(folder), "--yes").stdout.endswith(f"\ntrusted: {folder}\n")
    assert Lock.load().is_obeyed
    assert "ignored, because" not in call("list").stderr
    (folder / "twinkle.toml").write_text('[trust]\nallow = ["hf://**"]\n')
    assert "[trust] allow of twinkle.toml in" in call("list").stderr
    assert f"{folder}/twinkle.toml  changed: ignored\n" in call("trust", "--list").stdout
    assert call("untrust").stdout.startswith("no longer trusted: ")
    assert not Lock.load().is_obeyed
    assert call("trust", "--list").stdout == "no folder is trusted\n"
    assert call("untrust").exit_code == 2


def test_a_folder_in_a_trusted_one_is_not_called_untrusted(folder: Path, call: Call) -> None:
    (folder / "inner").mkdir()
    assert f"{folder}/inner is not trusted; see" in call("untrust", "inner").stderr
    call("trust", "--yes")
    said = call("untrust", "inner")
    assert said.exit_code == 2
    assert f"{folder}/inner is not trusted itself, but a parent folder or one named by a variable is" in said.stderr


def test_a_damaged_file_cannot_be_trusted(folder: Path, call: Call) -> None:
    (folder / "twinkle.lock").write_text("<<<<<<< HEAD\n")
    result = call("trust", "--yes")
    assert result.exit_code == 2
    assert "twinkle.lock is damaged" in result.stderr
    assert call("trust", "--list").stdout == "no folder is trusted\n"


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["--yes", "trust", "variable"])
def test_code_of_a_folder_is_tested_once_somebody_agreed(
    folder: Path, call: Call, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = call("test", ".", answer="y\n")
    assert refused.exit_code == 2
    assert f"cannot test {folder}: its code would run with all your rights" in refused.stderr
    assert f"add --yes, or trust it once: twinkle plugins trust {folder}" in refused.stderr
    assert not (folder / "ran").exists()
    if way == "trust":
        call("trust", "--yes")
    if way == "variable":
        monkeypatch.setenv("TWINKLE_TRUST_FOLDER", str(folder))
    result = call("test", ".", *(["--yes"] if way == "--yes" else []))
    assert "filter Odd: " in result.stdout, result.output
    assert (folder / "ran").exists()


@pytest.mark.parametrize("answer", ["y", "n"])
def test_at_a_terminal_it_is_asked(folder: Path, answer: str) -> None:
    code, output = at_a_terminal(folder, "test", ".", answer=f"{answer}\n")
    assert f"Run the code in {folder}? It runs with all your rights [y/N]" in output
    assert (folder / "ran").exists() == (answer == "y")
    assert (code == 2) == (answer == "n")
    code, output = at_a_terminal(folder, "trust", answer=f"{answer}\n")
    assert "Trust this folder? Code that it names runs with all your rights [y/N]" in output
    assert code == (0 if answer == "y" else 1)
    assert Lock.load().is_obeyed == (answer == "y")
