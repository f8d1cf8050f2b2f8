"""Platforms, the addresses of this machine, and the logger."""

import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twinkle import CPU, GPU, MPS, NPU, Platform, find_free_port, find_node_ip, get_logger
from twinkle.errors import MeshError, SettingsError, TwinkleError


def python(code: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **environ}
    )


def test_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    found = (Platform.get_rank(), Platform.get_local_rank(), Platform.get_world_size(), Platform.get_local_world_size())
    assert found == (5, 1, 8, 4)
    assert not Platform.is_master()


def test_a_process_started_alone_is_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (Platform.get_rank(), Platform.get_world_size()) == (0, 1)
    assert Platform.is_master()


def test_a_rank_that_is_no_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(MeshError, match="RANK is 'first', not a number"):
        Platform.get_rank()


@pytest.mark.parametrize(
    ("platform", "prefix", "backend", "variable"),
    [
        (CPU, "cpu", "gloo", None),
        (GPU, "cuda", "nccl", "CUDA_VISIBLE_DEVICES"),
        (NPU, "npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES"),
        (MPS, "mps", "gloo", None),
    ],
)
def test_each_platform_knows_its_names(
    platform: type[Platform], prefix: str, backend: str, variable: str | None
) -> None:
    assert (platform.device_prefix(), platform.device_backend(), platform.visible_device_env()) == (
        prefix,
        backend,
        variable,
    )
    assert Platform.get(prefix) is platform


def test_devices_are_numbered_by_local_rank_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert GPU.get_local_device() == "cuda:3"
    assert GPU.get_local_device(1) == "cuda:1"
    assert CPU.get_local_device() == "cpu"


def test_the_platform_that_is_there_is_found() -> None:
    expected = GPU if torch.cuda.is_available() else MPS if torch.backends.mps.is_available() else CPU
    assert Platform.get() is expected
    assert Platform.device_prefix() == expected.device_prefix()
    assert CPU.device_count() == 1


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux")
def test_a_cpu_computes_bfloat16_if_the_kernel_lists_such_instructions() -> None:
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    assert CPU.computes_bfloat16() is bool({"avx512_bf16", "amx_tile"} & set(flags.split()))


def test_a_cpu_has_no_generator_beside_torchs_own() -> None:
    assert CPU.get_device_rng_state() is None
    CPU.set_device_rng_state(None)
    CPU.synchronize()
    CPU.set_local_device()


def test_a_free_port_can_be_bound_and_a_taken_one_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", find_free_port("127.0.0.1")))
        port = taken.getsockname()[1]
        assert find_free_port("127.0.0.1", start_port=port) > port
        with pytest.raises(TwinkleError, match=f"no free port among 1 from {port}"):
            find_free_port("127.0.0.1", start_port=port, retry=1)


def test_the_node_has_an_address() -> None:
    socket.inet_aton(find_node_ip())


def test_the_logger_leaves_the_root_logger_alone() -> None:
    result = python(
        "import logging, twinkle\n"
        "twinkle.get_logger().info('once'); twinkle.get_logger('twinkle.part').debug('hidden')\n"
        "twinkle.get_logger(); print(logging.getLogger().handlers, logging.getLogger().level)"
    )
    assert result.stdout.strip() == "[] 30"
    assert result.stderr.count("once") == 1
    assert "hidden" not in result.stderr


def test_only_the_master_speaks_unless_a_level_is_asked_for() -> None:
    code = "import twinkle; log = twinkle.get_logger(); log.info('news'); log.warning('trouble')"
    other = python(code, RANK="1", WORLD_SIZE="2").stderr
    assert "news" not in other
    assert "trouble" in other
    assert "[rank 1]" in other
    assert "news" in python(code, RANK="1", WORLD_SIZE="2", TWINKLE_LOG_LEVEL="info").stderr
    assert "news" not in python(code, TWINKLE_LOG_LEVEL="ERROR").stderr


def test_an_application_with_handlers_of_its_own_gets_each_record_once() -> None:
    result = python("import logging, twinkle; logging.basicConfig(); twinkle.get_logger().warning('once')")
    assert result.stderr.count("once") == 1


def test_a_level_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_LOG_LEVEL", "LOUD")
    monkeypatch.setattr(logging.getLogger("loudness"), "handlers", [])
    with pytest.raises(SettingsError, match="TWINKLE_LOG_LEVEL is 'LOUD'; use one of DEBUG"):
        get_logger("loudness")
