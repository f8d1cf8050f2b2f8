"""Two real processes under torchrun, on gloo: what the summary says when they fail, and how long they wait."""

import json
import os
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ranks import command, torchrun

from twinkle.errors import MeshError, RankError, SettingsError
from twinkle.platform import CPU, GPU, NPU
from twinkle.runtime import RuntimeOptions, process, reporting

BEGIN = """
import torch, torch.distributed as dist, twinkle
from twinkle.platform import Platform
twinkle.initialize()
rank = Platform.get_rank()
"""


def run(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    return torchrun(script, ranks=2, environment={"CUDA_VISIBLE_DEVICES": "", **environment}, timeout=120)


def summary(done: subprocess.CompletedProcess[str]) -> str:
    """Return torchrun's last words, below what the ranks themselves printed."""
    return done.stderr.rpartition("FAILED")[2]


@pytest.mark.full
def test_a_rank_that_raises_stops_all_and_its_error_is_the_summarys(tmp_path: Path) -> None:
    code = """
    print("joined\\n", end="", flush=True)
    if rank == 1:
        raise ValueError("the disk of rank one is full")
    import time
    time.sleep(600)  # longer than the test waits
    """
    done = run(tmp_path, BEGIN + textwrap.dedent(code))
    assert done.returncode != 0
    assert done.stdout.splitlines().count("joined") == 2
    assert "ValueError: the disk of rank one is full" in summary(done)
    assert 'raise ValueError("the disk of rank one is full")' in summary(done)


@pytest.mark.full
def test_a_world_of_another_size_is_told_by_every_rank(tmp_path: Path) -> None:
    code = """
    import twinkle
    mesh = twinkle.DeviceMesh.from_sizes(dp_size=2, fsdp_size=2, device_type="cpu")
    twinkle.initialize(global_device_mesh=mesh)
    """
    done = run(tmp_path, code)
    assert done.returncode != 0
    text = (
        "MeshError: the global mesh has fsdp 2 x dp 2 = 4 ranks, but 2 processes run (WORLD_SIZE=2): start the script "
        "with `torchrun --nproc_per_node=4 SCRIPT`, or give a mesh whose sizes multiply to 2"
    )
    assert text in summary(done)


@pytest.mark.full
def test_ranks_wait_as_long_as_they_are_told(tmp_path: Path) -> None:
    code = (
        BEGIN
        + """
from torch.distributed.distributed_c10d import _get_default_group
timeout = _get_default_group()._get_backend(torch.device("cpu")).options._timeout
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {rank} {timeout.total_seconds()} {total.item()}\\n", end="", flush=True)
"""
    )
    done = run(tmp_path, code, TWINKLE_DIST_TIMEOUT_SECONDS="77")
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 77.0 2.0",
        "rank 1 77.0 2.0",
    ]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", "1e99"])
def test_a_time_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_DIST_TIMEOUT_SECONDS", text)
    with pytest.raises(SettingsError, match=f"TWINKLE_DIST_TIMEOUT_SECONDS is '{text}'"):
        process._timeout()


def test_without_a_time_torch_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINKLE_DIST_TIMEOUT_SECONDS", raising=False)
    assert process._timeout() is None
    monkeypatch.setenv("TWINKLE_DIST_TIMEOUT_SECONDS", "1.5")
    assert process._timeout() == timedelta(seconds=1.5)


def test_tensors_on_the_cpu_are_exchanged_beside_those_on_the_device() -> None:
    assert [process._backend(platform) for platform in (CPU, GPU, NPU)] == [
        "gloo",
        "cpu:gloo,cuda:nccl",
        "cpu:gloo,npu:hccl",
    ]


# The error file, without torchrun


@pytest.fixture
def errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setattr(reporting, "_failed", False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def raise_into_hook(error: BaseException) -> list[Any]:
    """Let an error end the process, so to speak; return what the hook of before was given."""
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", lambda *given: seen.append(given))
        take_off = reporting.report_errors()
        try:
            raise error
        except BaseException as caught:
            sys.excepthook(type(caught), caught, caught.__traceback__)
        take_off()
    return seen


def test_the_file_is_what_torch_reads_and_the_hook_of_before_is_called(errors: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    error = ValueError("no")
    assert raise_into_hook(error) == [(ValueError, error, error.__traceback__)]
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(errors))
    assert failure.message["message"] == "ValueError: no"
    assert failure.message["extraInfo"]["py_callstack"].endswith("ValueError: no\n")
    assert abs(failure.timestamp - time.time()) < 30


def test_a_rank_error_is_never_the_first_of_its_second(errors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 100.7)
    raise_into_hook(RankError("rank 1 has left"))
    assert json.loads(errors.read_text())["message"]["extraInfo"]["timestamp"] == "101"


def test_a_file_that_is_there_stays_and_one_that_cannot_be_written_is_no_second_error(
    errors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors.write_text("{}")
    assert len(raise_into_hook(ValueError("no"))) == 1
    assert errors.read_text() == "{}"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(errors / "below" / "a" / "file"))
    assert len(raise_into_hook(ValueError("no"))) == 1
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert len(raise_into_hook(ValueError("no"))) == 1


def test_an_interrupt_is_not_an_error(errors: Path) -> None:
    assert len(raise_into_hook(KeyboardInterrupt())) == 1
    assert not errors.exists()
    assert reporting.has_failed()


def test_a_hook_that_somebody_put_on_top_stays(errors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(*given: Any) -> None:
        """Do nothing."""

    def on_top(*given: Any) -> None:
        """Do nothing."""

    monkeypatch.setattr(sys, "excepthook", plain)
    take_off = reporting.report_errors()
    monkeypatch.setattr(sys, "excepthook", on_top)
    take_off()
    assert sys.excepthook is on_top


def test_the_hook_is_there_among_several_ranks_only_and_goes_with_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(*given: Any) -> None:
        """Do nothing."""

    monkeypatch.setattr(sys, "excepthook", plain)
    monkeypatch.setattr("twinkle.platform.seed_everything", lambda *given: None)
    monkeypatch.setattr(process.LocalRuntime, "_join", lambda self: None)
    runtime = process.LocalRuntime()
    monkeypatch.setenv("WORLD_SIZE", "2")
    runtime.initialize(RuntimeOptions())
    runtime.initialize(RuntimeOptions())
    assert sys.excepthook is not plain
    runtime.shutdown()
    assert sys.excepthook is plain
    monkeypatch.setenv("WORLD_SIZE", "1")
    runtime.initialize(RuntimeOptions())
    assert sys.excepthook is plain


def test_a_process_that_fails_does_not_wait_for_the_others_at_its_end(
    errors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []
    monkeypatch.setattr(process.LocalRuntime, "shutdown", lambda self: left.append(self))
    runtime = process.LocalRuntime()
    runtime._leave()
    assert left == [runtime]
    reporting.report(ValueError("no"))
    runtime._leave()
    assert left == [runtime]


def test_an_environment_that_torchrun_did_not_make_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match=r"WORLD_SIZE=2\), but RANK, MASTER_ADDR, MASTER_PORT is not set; start the"):
        process.LocalRuntime()._join()


def test_an_error_of_the_command_is_reported_too(errors: Path) -> None:
    from click.testing import CliRunner

    from twinkle.cli import main

    assert CliRunner().invoke(main, ["run", "sfft"]).exit_code == 2
    assert "ComponentNotFound" in json.loads(errors.read_text())["message"]["message"]


@pytest.mark.full
def test_ranks_whose_torchrun_is_killed_end_by_themselves(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # One write a rank: where Python is unbuffered, `print` writes the line's end apart, and two ranks' lines may mix.
    script.write_text(BEGIN + "import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(600)\n")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (tmp_path / "err.txt").open("w") as err:
        agent = subprocess.Popen(
            command(script, ranks=2), env=environment, stdout=subprocess.PIPE, stderr=err, text=True
        )
        assert agent.stdout is not None
        ranks = [int(agent.stdout.readline()) for _ in range(2)]
        agent.kill()
        agent.communicate(timeout=60)  # the last rank has closed the pipe, as a process does on its way out
    deadline = time.monotonic() + 30
    while any(map(_is_running, ranks)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(_is_running, ranks))
    assert "is gone; the rank stops too" in (tmp_path / "err.txt").read_text()


def _is_running(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(") ")[2][0] not in "ZX"
