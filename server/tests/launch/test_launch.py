"""The published configuration file: what it maps to, what is refused, and a service that starts from it."""

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from twinkle.errors import ArgumentError, ConfigError
from twinkle.server import ServerLauncher, launch_server
from twinkle.testing import tiny_model
from twinkle_server.cli.published import main

CONFIG = """
proxy_location: EveryNode
http_options: {host: localhost, port: 8123}
persistence: {mode: file, file_path: /srv/state/state.json}
applications:
- name: server
  route_prefix: /api/v1
  import_path: server
  args:
    server_config: {per_token_model_limit: 3}
    supported_models: [Qwen/Qwen3.5-4B]
  deployments: [{name: Gateway, max_ongoing_requests: 50, autoscaling_config: {min_replicas: 1, max_replicas: 4}}]
- name: models-Qwen3.5-4B
  route_prefix: /api/v1/model/Qwen/Qwen3.5-4B
  import_path: model
  args:
    model_id: ms://Qwen/Qwen3.5-4B
    nproc_per_node: 1
    device_group: {name: model, ranks: 1, device_type: cuda}
    device_mesh: {device_type: cuda, dp_size: 1}
    backend: transformers
    adapter_config: {adapter_timeout: 60}
    queue_config: {rps_limit: 100, max_input_tokens: 9000, execution_timeout: 120}
    max_loras: 5
- name: sampler-Qwen3.5-4B
  route_prefix: /api/v1/sampler/Qwen/Qwen3.5-4B
  import_path: sampler
  args: {model_id: ms://Qwen/Qwen3.5-4B, sampler_type: vllm, engine_args: {max_model_len: 4096}}
- name: processor
  route_prefix: /api/v1/processor
  import_path: processor
  args: {ncpu_proc_per_node: 2}
"""


def config(**changes: Any) -> dict[str, Any]:
    """Return the configuration; keys such as `applications__1__args__backend` change parts of it."""
    fields = yaml.safe_load(CONFIG)
    for path, value in changes.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("__")]
        target = fields
        for part in parents:
            target = target[part]
        target[last] = copy.deepcopy(value)
    return fields


def test_the_published_file_becomes_settings() -> None:
    mapped = ServerLauncher(config()).mapped()
    settings = mapped.settings
    assert (settings.model, settings.name) == ("ms://Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-4B")
    assert (settings.host, settings.port, settings.auth) == ("127.0.0.1", 8123, False)
    assert settings.data == Path("/srv/state")
    assert (settings.times.session, settings.times.deadline) == (60.0, 120.0)
    assert settings.limits.request_tokens == 9000
    assert settings.datasets.resources > 0
    notes = "\n".join(mapped.notes)
    for word in ("deployments", "max_loras", "own engine", "rates are limits of keys", "does not use Ray"):
        assert word in notes


def test_without_a_processor_there_are_no_data_resources() -> None:
    fields = config(http_options__host="0.0.0.0")
    del fields["applications"][3]
    mapped = ServerLauncher(fields).mapped()
    assert mapped.settings.datasets.resources == 0
    assert mapped.settings.auth


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"applications__2__args__model_id": "ms://Qwen/Other"}, "start one service for each"),
        ({"applications__0__args__supported_models": ["Qwen/Other"]}, "supported_models"),
        ({"applications__1__args__nproc_per_node": 2}, "nproc_per_node is 2; this service trains and samples on one"),
        ({"applications__1__args__device_mesh": {"dp_size": 4}}, "'dp_size': 4"),
        ({"applications__1__args__device_group": {"ranks": [0, 1]}}, "device_group"),
        ({"applications__1__args__backend": "megatron"}, "use 'transformers'"),
        ({"applications__2__args__sampler_type": "mock"}, "use 'torch'"),
        ({"persistence": {"mode": "redis", "redis_url": "redis://x"}}, "use mode: file"),
        ({"persistance": {}}, "persistance: Extra inputs are not permitted"),
        ({"applications__1__args__strategy": "ddp"}, "strategy: Extra inputs are not permitted"),
        ({"applications__1__import_path": "modell"}, "import_path|tag"),
        ({"applications": []}, "at least 1 item"),
    ],
)
def test_what_the_service_does_not_have_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ServerLauncher(config(**changes)).mapped()


def test_arguments_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINKLE_SERVER_CONFIG", raising=False)
    with pytest.raises(ArgumentError, match="not both"):
        launch_server(config(), config_path=tmp_path)
    with pytest.raises(ArgumentError, match="TWINKLE_SERVER_CONFIG"):
        launch_server()
    with pytest.raises(ConfigError, match="cannot read"):
        launch_server(config_path=tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [", "utf-8")
    monkeypatch.setenv("TWINKLE_SERVER_CONFIG", str(tmp_path / "bad.yaml"))
    with pytest.raises(ConfigError, match="not valid YAML"):
        launch_server()


def test_the_command_checks_and_prints(tmp_path: Path) -> None:
    path = tmp_path / "cfg.yaml"
    path.write_text(CONFIG, "utf-8")
    checked = CliRunner().invoke(main, ["check-config", "-c", str(path)])
    assert checked.exit_code == 0, checked.output
    assert "ok: Qwen/Qwen3.5-4B (ms://Qwen/Qwen3.5-4B) at 127.0.0.1:8123" in checked.output
    printed = CliRunner().invoke(main, ["print-config", "-c", str(path), "--format", "json"])
    assert ServerLauncher(json.loads(printed.output)).mapped().settings == ServerLauncher(config()).mapped().settings
    cleared = CliRunner().invoke(main, ["clear", "persistence", "-c", str(path)])
    assert cleared.exit_code == 1
    assert "/srv/state also holds the checkpoints" in cleared.output


@pytest.mark.full
def test_a_service_starts_from_the_file(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    fields = config(
        applications__1__args__model_id=str(model), applications__2__args__model_id=str(model), http_options__port=0,
        persistence__file_path=str(tmp_path / "state" / "state.json"),
    )  # fmt: skip
    (tmp_path / "cfg.yaml").write_text(yaml.safe_dump(fields), "utf-8")
    command = [sys.executable, "-m", "twinkle_server.cli.published", "launch", "-c", str(tmp_path / "cfg.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("Twinkle serves"):
                break
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert lines[-1].startswith("Twinkle serves Qwen/Qwen3.5-4B at http://127.0.0.1:")
    assert (tmp_path / "state").is_dir()
