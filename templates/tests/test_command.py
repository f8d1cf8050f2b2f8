"""`twinkle plugins new`: arguments, questions on a terminal, and what it says without the package."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from twinkle.cli import main


def twinkle(*words: str) -> Result:
    return CliRunner().invoke(main, ["plugins", *words])


def test_it_is_one_of_the_commands_of_plugins() -> None:
    result = twinkle("--help")
    assert "new " in result.output
    assert "Create a plugin project" in result.output


def test_it_says_what_it_made_and_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = twinkle("new", "loss", "acme-focal", "--author", "Ada")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "created acme-focal:"
    assert "  src/acme_focal/loss.py" in lines
    assert lines[-1] == "next: pip install -e ./acme-focal && twinkle plugins test acme-focal"
    assert "Ada" in Path("acme-focal/LICENSE").read_text("utf-8")


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = twinkle("new", "los", "acme-focal")
    assert (result.exit_code, result.stderr) == (2, "Error: unknown kind 'los'; nearest: 'loss'\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["loss"]])
def test_without_a_terminal_nothing_is_asked(words: list[str]) -> None:
    result = twinkle("new", *words)
    assert result.exit_code == 2
    assert "give KIND and NAME, as in `twinkle plugins new loss acme-focal`" in result.stderr


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    result = twinkle("new", "loss", "acme-focal", "--into", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "is a file" in result.stderr


@pytest.mark.full
def test_on_a_terminal_it_asks_for_what_is_missing(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "twinkle.cli", "plugins", "new", "loss"]
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    running = subprocess.Popen(argv, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = _until(ours, b"distribution called")
    assert b"Which kind of component" not in seen, "the kind was given"
    os.write(ours, b"acme-asked\r")
    seen = _until(ours, b"next: ")
    assert running.wait(timeout=60) == 0, seen
    os.close(ours)
    assert (tmp_path / "acme-asked" / "src" / "acme_asked" / "loss.py").is_file()


def _until(terminal: int, text: bytes) -> bytes:
    """Return what is shown up to and with a text, or all of it where that does not come within a minute."""
    seen = b""
    while text not in seen and select.select([terminal], [], [], 60)[0]:
        try:
            seen += os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
    return seen
