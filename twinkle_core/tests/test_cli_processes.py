"""How `twinkle` is called from here, and how several processes of it are started."""

import os
import sys
from pathlib import Path

import pytest

from twinkle.cli.processes import become_torchrun, process_count, twinkle_command, without_nproc
from twinkle.errors import ConfigError


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment in the working directory, of which the shell does not know."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "twinkle"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_the_bare_name_is_given_only_where_the_shell_finds_this_installation(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert twinkle_command() == [str(Path(".venv", "bin", "twinkle"))]
    monkeypatch.setenv("PATH", str(bin_folder))
    assert twinkle_command() == ["twinkle"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "twinkle").write_text("#!/bin/sh\n")
    (other / "twinkle").chmod(0o755)
    monkeypatch.setenv("PATH", str(other))
    monkeypatch.chdir(other)
    assert twinkle_command() == [str(bin_folder / "twinkle")]
    (bin_folder / "twinkle").unlink()
    assert twinkle_command() == [str(bin_folder / "python"), "-m", "twinkle.cli"]


@pytest.mark.usefixtures("bin_folder")
def test_processes_are_counted_from_1() -> None:
    assert (process_count(None), process_count("1"), process_count("4")) == (1, 1, 4)
    for text in ("0", "-1", "two", ""):
        with pytest.raises(ConfigError, match="from 1 on"):
            process_count(text)


@pytest.mark.usefixtures("bin_folder")
def test_those_that_torchrun_started_start_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert process_count("2") == process_count(None) == 1
    with pytest.raises(ConfigError, match="started 2 processes already; leave --nproc out"):
        process_count("3")


def test_torchrun_gets_everything_but_its_own_number(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["run", "sft", "--nproc", "2", "--epochs", "3", "--nproc=2", "--nprocess", "4"]
    assert without_nproc(given) == ["run", "sft", "--epochs", "3", "--nprocess", "4"]
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: called.append(arguments))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    become_torchrun(2, given)
    python, *rest = called[0]
    assert python == str(bin_folder / "python")
    assert rest[:4] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert rest[4:] == ["-m", "twinkle.cli", "run", "sft", "--epochs", "3", "--nprocess", "4"]
    assert os.environ["OMP_NUM_THREADS"] == "3"
