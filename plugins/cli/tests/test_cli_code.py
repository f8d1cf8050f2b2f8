"""`twinkle plugins add|lock|verify|remove` and `twinkle --frozen`, over a folder that stands for a hub repository."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from twinkle._registry import registry
from twinkle.cli import main

Call = Callable[..., Result]
LOSS = '''
"""A loss for tests."""
from twinkle.loss import Loss

class Focal(Loss):
    """Focal."""
    def __call__(self, inputs, outputs, **kwargs): ...
'''
MANIFEST = """
schema = 1
core = ">=0.1,<1"
name = "acme-focal"

[[component]]
kind = "loss"
name = "Focal"
ref = ".focal:Focal"
summary = "A loss for tests"
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A repository with a manifest; the working directory and the cache are this test's own."""
    folder = tmp_path / "hub" / "acme-focal"
    folder.mkdir(parents=True)
    (folder / "focal.py").write_text(LOSS)
    (folder / "twinkle-plugin.toml").write_text(MANIFEST)
    for name in [name for name in os.environ if name.startswith("TWINKLE_")]:
        monkeypatch.delenv(name)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TWINKLE_TRUST_FOLDER", str(tmp_path / "work"))
    registry.cache_clear()
    if "file" not in registry().names("hub"):
        pytest.skip("twinkle-hub is not installed")
    yield f"file://{folder}"
    registry.cache_clear()
    for name in [name for name in sys.modules if name.startswith("twinkle_registry.code.acme_focal")]:
        del sys.modules[name]


@pytest.fixture
def call() -> Call:
    def invoke(*arguments: str, answer: str = "") -> Result:
        registry.cache_clear()
        return CliRunner().invoke(main, list(arguments), input=answer, env={"COLUMNS": "120"})

    return invoke


def test_add_shows_what_there_is_asks_and_locks(repository: str, call: Call) -> None:
    declined = call("plugins", "add", repository, answer="n\n")
    assert declined.exit_code == 1
    assert f"not trusted: {repository}" in declined.stdout
    assert not Path("twinkle.lock").exists()
    asked = call("plugins", "add", repository, answer="y\n")
    assert asked.exit_code == 0
    lines = asked.stdout.splitlines()
    assert lines[0].split() == ["file", repository] or lines[0].split() == ["hub", repository]
    assert "offers   loss Focal" in lines
    assert [line.split() for line in lines if line.startswith("focal.py")] == [
        ["focal.py", str(len(LOSS)), "twinkle.loss", "-"]
    ]
    assert f"Trust {repository}? It will run with all your rights [y/N]" in asked.stdout
    assert lines[-1].endswith("twinkle.lock: 1 written, 0 unchanged, 0 declined")
    again = call("plugins", "add", repository)
    assert again.stdout.endswith("0 written, 1 unchanged, 0 declined\n")
    (plain,) = json.loads(call("plugins", "info", "Focal", "--json").stdout)
    assert (Path(plain["file"]).name, plain["line"]) == ("focal.py", 5)


def test_a_folder_may_be_named_by_its_path(repository: str, call: Call) -> None:
    assert call("plugins", "add", "../hub/acme-focal", "--yes").exit_code == 0
    assert call("plugins", "remove", repository).stdout == f"no longer trusted: {repository}\n"
    assert "there is no folder" in call("plugins", "add", "../hub/acme-fokal", "--yes").stderr


def test_nobody_who_answers_is_no_yes(repository: str, call: Call) -> None:
    result = call("plugins", "add", repository)
    assert result.exit_code == 2
    assert "no answer; review the text above, then add --yes" in result.stderr
    assert result.stdout.endswith("[y/N]: \n"), "the error begins on a line of its own"
    assert not Path("twinkle.lock").exists()


def test_one_file_is_one_file_and_what_tests_need_is_told_apart(repository: str, call: Call) -> None:
    folder = Path(repository.removeprefix("file://"))
    (folder / "twinkle-plugin.toml").rename(folder.parent / "kept.toml")
    assert f"1 file, {len(LOSS)} bytes; needs twinkle\n" in call("plugins", "add", repository, answer="n\n").stdout
    (folder / "tests").mkdir()
    (folder / "tests" / "test_focal.py").write_text("import pytest")
    (folder / "x.so").write_bytes(b"")
    shown = call("plugins", "add", repository, answer="n\n").stdout
    assert "3 files, " in shown
    assert "; needs twinkle; its tests need pytest too\n" in shown
    assert next(line for line in shown.splitlines() if line.startswith("x.so")).endswith("is native code")


def test_what_still_leads_to_trusted_code_is_told_when_it_is_removed(repository: str, call: Call) -> None:
    link = Path(repository.removeprefix("file://")).parent / "linked"
    link.symlink_to(repository.removeprefix("file://"), target_is_directory=True)
    for reference in (repository, f"file://{link}"):
        assert call("plugins", "add", reference, "--yes").exit_code == 0
    told = call("plugins", "remove", f"file://{link}").stdout
    assert f"file://{link} still resolves to {repository}@" in told
    assert f"remove that too: twinkle plugins remove {repository}\n" in told


def test_as_json_nothing_is_asked_and_without_yes_nothing_changes(repository: str, call: Call) -> None:
    shown = call("plugins", "add", repository, "--json")
    (plain,) = json.loads(shown.stdout)
    assert (plain["sort"], plain["state"], plain["accepted"], plain["offers"]) == ("hub", "new", False, ["loss Focal"])
    assert plain["review"]["files"][0]["path"] == "focal.py"
    assert shown.exit_code == 1
    assert not Path("twinkle.lock").exists()
    kept = call("plugins", "add", repository, "--json", "--yes")
    assert json.loads(kept.stdout)[0]["accepted"] is True
    assert kept.exit_code == 0
    checked = call("plugins", "verify", "--json")
    assert json.loads(checked.stdout)[0]["problem"] == ""
    assert json.loads(call("plugins", "remove", repository, "--json").stdout) == [repository]


def test_what_is_new_is_shown_and_escaped(repository: str, call: Call) -> None:
    call("plugins", "add", repository, "--yes")
    source = Path(repository.removeprefix("file://")) / "focal.py"
    source.write_text(LOSS + "import subprocess  # \x1b[2K\u202e harmless\n")
    result = call("plugins", "add", repository, answer="n\n")
    assert "changed: focal.py" in result.stdout
    assert "+import subprocess  # \\x1b[2K\\u202e harmless" in result.stdout
    assert "starts processes" in result.stdout
    assert "\x1b" not in result.stdout
    trusted = [line for line in result.stdout.splitlines() if line.startswith("trusted")]
    assert len(trusted) == 1
    assert call("plugins", "verify").exit_code == 0


def test_verify_fails_when_a_byte_was_edited_and_fetch_mends_it(repository: str, call: Call, tmp_path: Path) -> None:
    call("plugins", "add", repository, "--yes")
    assert call("plugins", "verify").stdout == "1 checked, 0 wrong\n"
    (stored,) = (tmp_path / "cache/code/trees").glob("*/files/focal.py")
    stored.write_text(LOSS.replace("Focal", "Fokal"))
    wrong = call("plugins", "verify")
    assert wrong.exit_code == 1
    assert "was changed after it was added" in wrong.stdout
    assert wrong.stdout.endswith("1 checked, 1 wrong\n")
    doctor = call("plugins", "doctor")
    assert doctor.exit_code == 1
    assert "was changed after it was added" in doctor.stdout
    assert call("plugins", "verify", "--fetch").exit_code == 0
    assert stored.read_text() == LOSS
    assert "was changed after it was added" not in call("plugins", "doctor").stdout


def test_lock_takes_in_what_is_installed_and_frozen_uses_that_alone(repository: str, call: Call) -> None:
    refused = call("--frozen", "plugins", "info", "CrossEntropyLoss")
    assert "this run is frozen, and there is no" in refused.output
    result = call("plugins", "lock")
    assert result.exit_code == 0, result.output
    assert call("plugins", "verify").exit_code == 0
    listed = json.loads(call("--frozen", "plugins", "list", "--json").stdout)
    assert {plain["status"] for plain in listed} == {"ok"}
    assert "TWINKLE_FROZEN" not in os.environ
    assert (
        "cannot change the lock: this run is frozen" in call("--frozen", "plugins", "add", repository, "--yes").stderr
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINKLE_FROZEN", "1")
        registry.cache_clear()
        assert registry().resolve("CrossEntropyLoss", "loss").__name__ == "CrossEntropyLoss"


def test_remove_forgets_and_says_when_there_is_nothing_to_forget(repository: str, call: Call) -> None:
    call("plugins", "add", repository, "--yes")
    assert call("plugins", "remove", repository).stdout == f"no longer trusted: {repository}\n"
    assert "does not list" in call("plugins", "remove", repository).stderr
    folder = os.path.relpath(repository.removeprefix("file://"))
    assert call("plugins", "add", f"./{folder}", "--yes").exit_code == 0
    assert call("plugins", "info", repository).stdout.startswith("plugin      acme-focal ")
    assert call("plugins", "remove", f"./{folder}").stdout == f"no longer trusted: {repository}\n"
    registry.cache_clear()
    from twinkle.errors import NotTrusted

    with pytest.raises(NotTrusted, match="twinkle plugins add file://"):
        registry().resolve(repository, "loss")


def test_a_damaged_lock_is_one_clear_message(repository: str, call: Call) -> None:
    Path("twinkle.lock").write_text("<<<<<<< HEAD\n[[hub]]\n")
    for command in (["list"], ["verify"], ["add", repository, "--yes"], ["remove", repository]):
        result = call("plugins", *command)
        assert result.exit_code == 2, command
        assert "twinkle.lock is damaged: it cannot be read as TOML" in result.stderr
    assert "twinkle.lock is damaged" in call("plugins", "doctor").stdout


def test_a_pipe_in_a_repository_is_refused_by_add(repository: str) -> None:
    os.mkfifo(Path(repository.removeprefix("file://")) / "odd.py")
    command = [sys.executable, "-m", "twinkle.cli", "plugins", "add", repository, "--yes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "odd.py is a pipe, not a regular file" in done.stderr
