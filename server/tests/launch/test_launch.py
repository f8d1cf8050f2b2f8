"""The published configuration file: what it maps to, what is refused, and a service that starts from it."""

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel

from twinkle.errors import ArgumentError, ConfigError
from twinkle.server import ServerLauncher, launch_server
from twinkle.testing import tiny_model
from twinkle_server.cli.published import main
from twinkle_server.launch.config import (
    ModelApplication,
    ProcessorApplication,
    SamplerApplication,
    ServerApplication,
    ServerConfig,
)
from twinkle_server.launch.verdicts import verdict_of

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
FIELDS = yaml.safe_load(CONFIG)


def config(**changes: Any) -> dict[str, Any]:
    """Return the configuration; keys such as `applications__1__args__backend` change parts of it."""
    fields = copy.deepcopy(FIELDS)
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
    assert settings.limits.adapters == 3
    for word in ("server.deployments", "max_loras", "own engine", "rates are quotas of keys", "without Ray"):
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
        ({"applications__0__route_prefix": "/other"}, "use /api/v1"),
        ({"applications__0__args__http_options": {"port": 9}}, "leave one of them out"),
        ({"applications__1__args__device_group": {"ranks": [3]}}, "CUDA_VISIBLE_DEVICES"),
        ({"telemetry": {"enabled": True, "otlp_endpoint": "localhost"}}, "must be a URL such as"),
    ],
)
def test_what_the_service_does_not_have_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ServerLauncher(config(**changes)).mapped()


@pytest.mark.parametrize(
    ("endpoint", "expected", "note"),
    [
        ("http://localhost:4317", "http://localhost:4318", "port 4317 for gRPC"),
        ("https://[::1]:4317/a", "https://[::1]:4318/a", "port 4317 for gRPC"),
        ("http://otel:4318", "http://otel:4318", "over HTTP, not gRPC"),
    ],
)
def test_telemetry_is_sent_to_the_collector(endpoint: str, expected: str, note: str) -> None:
    mapped = ServerLauncher(config(telemetry={"enabled": True, "otlp_endpoint": endpoint})).mapped()
    assert mapped.settings.otlp_endpoint == expected
    assert note in "\n".join(mapped.notes)
    mapped = ServerLauncher(config(telemetry={"enabled": False, "otlp_endpoint": endpoint})).mapped()
    assert mapped.settings.otlp_endpoint is None
    assert "telemetry" not in "\n".join(mapped.notes)


def test_limits_that_are_off_and_times_that_are_too_short_are_noted() -> None:
    queue = {"enabled": False, "max_input_tokens": 5, "execution_timeout": 0}
    mapped = ServerLauncher(config(applications__1__args__queue_config=queue)).mapped()
    assert mapped.settings.limits.request_tokens > 5
    assert mapped.settings.times.deadline == 600.0
    notes = "\n".join(mapped.notes)
    assert "max_input_tokens has no effect: queue_config.enabled is false" in notes
    assert "execution_timeout is 0: the time limit of a pass is 600 s" in notes


KINDS = ("server", "model", "sampler", "processor")
COMPLETE = {
    "telemetry": {"enabled": True},
    "applications__1__args__queue_config": {"enabled": True, "max_input_tokens": 9000},
}
LABELS = {f"{kind}.name" for kind in KINDS}
"""Keys that only name parts of the file in messages."""


def leaves(kind: type[BaseModel], key: str = "", place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield all keys of a part of the published configuration, with their place in the file and their type."""
    for name, field in kind.model_fields.items():
        below = (f"{key}.{name}".strip("."), f"{place}__{name}".strip("_"))
        parts = [part for part in (field.annotation, *get_args(field.annotation)) if part is not type(None)]
        models = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        if name == "applications":
            for index, application in enumerate(KINDS):
                member = next(
                    each
                    for each in applications()
                    if each.model_fields["import_path"].annotation == Literal[application]
                )
                yield from leaves(member, application, f"applications__{index}")
        elif models:
            listed = get_origin(field.annotation) is list
            yield from leaves(models[0], below[0], below[1] + "__0" * listed)
        else:
            yield *below, parts[-1] if get_origin(field.annotation) in (Union, UnionType) else field.annotation


def applications() -> tuple[type[BaseModel], ...]:
    return (ServerApplication, ModelApplication, SamplerApplication, ProcessorApplication)


def other(key: str, annotation: Any, default: Any) -> Any:
    """Return a valid value of a key that is neither its default nor that of the file."""
    given = {
        "telemetry.otlp_endpoint": "http://collector:4318", "persistence.mode": "memory",
        "persistence.file_path": "/a/b", "model.args.backend": "megatron", "sampler.args.sampler_type": "torch",
        "model.args.model_id": "Qwen/Other", "sampler.args.model_id": "Qwen/Other",
        "model.route_prefix": "/api/v1/model/Other", "server.args.supported_models.model_name": "Other",
    }  # fmt: skip
    if key in given:
        return given[key]
    kind = get_origin(annotation) or annotation
    if kind is bool:
        return not default
    values = {int: 7, float: 61.0, str: "other", dict: {"a": "1"}, Annotated: 7, list: [0, 1]}
    return values[kind]


@pytest.mark.parametrize(("key", "place", "annotation"), list(leaves(ServerConfig)), ids=lambda value: str(value)[:60])
def test_every_published_key_is_mapped_noted_or_refused(key: str, place: str, annotation: Any) -> None:
    verdict = verdict_of(key)
    assert verdict is not None, f"{key} has no verdict"
    if key.endswith(".import_path"):
        return
    before = ServerLauncher(config(**COMPLETE)).mapped()
    fields = config(**COMPLETE)
    *parents, last = [int(part) if part.isdigit() else part for part in place.split("__")]
    target: Any = fields
    for part, following in pairwise([*parents, last]):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(target, list) and part >= len(target):
            target.append({})
        elif isinstance(target, dict) and target.get(part) is None:
            target[part] = empty
        if isinstance(target[part], str):  # a published short form, such as a name in supported_models
            target[part] = {"model_name": target[part]}
        target = target[part]
    if key.startswith("server.args.http_options"):
        del fields["http_options"]
        before = ServerLauncher(fields).mapped()
    target[last] = other(key, annotation, target.get(last))
    try:
        after = ServerLauncher(fields).mapped()
    except ConfigError as error:
        after, refusal = before, str(error)
    else:
        refusal = ""
    if refusal:
        assert verdict.used, refusal
        assert key.rpartition(".")[2] in refusal or "models" in refusal
        return
    new = [note for note in after.notes if note not in before.notes]
    if verdict.used:
        assert after.settings != before.settings or new or key in LABELS or key == "sampler.args.sampler_type"
    else:
        assert after.settings == before.settings
        named = key.partition("deployments")[0] + "deployments" if "deployments" in key else key
        assert any(named in note and verdict.text in note for note in after.notes), after.notes


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
