"""How `twinkle` is called from here, and how several processes of it are started."""

import os
import signal
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from twinkle import DeviceMesh
from twinkle.command import twinkle_command
from twinkle.errors import ConfigError
from twinkle_cli.run import check_mesh, process_count, start_ranks, without_nproc


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
        with pytest.raises(ConfigError, match="processes >= 1"):
            process_count(text)


@pytest.mark.usefixtures("bin_folder")
def test_those_that_torchrun_started_start_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert process_count("2") == process_count(None) == 1
    with pytest.raises(ConfigError, match="started 2 processes already; omit --nproc"):
        process_count("3")


def test_torchrun_gets_everything_but_its_own_number() -> None:
    given = ["run", "sft", "--nproc", "2", "--epochs", "3", "--nproc=2", "--nprocess", "4"]
    assert without_nproc(given) == ["run", "sft", "--epochs", "3", "--nprocess", "4"]


@pytest.mark.parametrize(("code", "shown"), [(0, 0), (2, 2), (130, 130), (-9, 137)])
def test_the_exit_code_is_that_of_the_first_rank_to_fail(
    monkeypatch: pytest.MonkeyPatch, code: int, shown: int
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    asked = []

    def run(arguments: Namespace) -> None:
        asked.append(arguments)
        if code:
            raise ChildFailedError("twinkle", {1: ProcessFailure(1, 7, code, "none.json")})

    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert start_ranks(2, ["run", "sft", "--nproc", "2", "--epochs", "3"]) == shown
    (arguments,) = asked
    assert (arguments.nproc_per_node, arguments.standalone, arguments.module) == ("2", True, True)
    assert [arguments.training_script, *arguments.training_script_args] == [
        "twinkle_cli",
        "run",
        "sft",
        "--epochs",
        "3",
    ]
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_ctrl_c_ends_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def run(arguments: Namespace) -> None:
        raise SignalException("stopped", signal.SIGINT)

    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert start_ranks(2, ["run", "sft"]) == 130


def test_a_mesh_of_other_processes_says_how_many_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    check_mesh(None, 3)
    check_mesh(DeviceMesh.from_sizes(fsdp_size=2), 2)
    for processes, size, told in ((1, 2, "use --nproc 2"), (2, 3, "use --nproc 3"), (2, 1, "use no --nproc")):
        with pytest.raises(ConfigError, match=told):
            check_mesh(DeviceMesh.from_sizes(fsdp_size=size), processes)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun has started 2 processes"):
        check_mesh(DeviceMesh.from_sizes(fsdp_size=3), 2)
