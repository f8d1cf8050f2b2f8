"""The files for deployment: what they name exists, and what they run works as they run it."""

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from house import ROOT
from ledger_engine import ENGINE, MODEL
from serving import Served

from twinkle_server.cli.serve import FLAGS, variable
from twinkle_server.cli.serve import main as serve
from twinkle_server.cli.server import main as server
from twinkle_server.configuration import load

DEPLOY = ROOT / "server" / "deploy"


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, each with its arguments on one line."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, rest in lines]


def last_stage() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, rest in instructions():
        if name == "FROM":
            found = {}
        found[name] = f"{found[name]}\n{rest}" if name in found else rest
    return found


def environment() -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(last_stage()["ENV"]))


def command_of(words: list[str]) -> click.Command:
    """Return the command that `twinkle ...` runs, or raise what click does for unknown words."""
    assert words[0].rpartition("/")[2] == "twinkle"
    if words[1] == "serve":
        serve.make_context("serve", [word for word in words[2:] if not word.endswith(".yaml") and word != "--config"])
        return serve
    command = server.get_command(click.Context(server), words[2])
    assert command is not None, words
    return command


def test_the_image_has_two_stages_and_no_root() -> None:
    names = [name for name, _ in instructions()]
    assert names.count("FROM") == 2
    stage = last_stage()
    user = stage["USER"].partition(":")[0]
    assert user.isdigit()
    assert int(user) > 0
    assert f"--uid {user}" in stage["RUN"]
    assert stage["STOPSIGNAL"] == "SIGTERM"
    assert "pip" not in stage["RUN"], "what builds is not in the image that serves"


def test_what_the_image_names_exists() -> None:
    stage, variables = last_stage(), environment()
    assert {name for name in variables if name.startswith("TWINKLE_SERVE_")} <= set(map(variable, FLAGS))
    assert variables["TWINKLE_SERVE_DATA"].startswith(stage["VOLUME"])
    assert stage["EXPOSE"] == variables["TWINKLE_SERVE_PORT"]
    check = json.loads(stage["HEALTHCHECK"].partition("CMD ")[2])
    assert command_of(check).name == "ready"
    assert command_of([*json.loads(stage["ENTRYPOINT"]), *json.loads(stage["CMD"])]) is serve
    (install,) = (rest for name, rest in instructions() if name == "RUN" and "pip install" in rest)
    for name in re.findall(r"-c (\S+)", install):
        assert (ROOT / name).is_file()
    assert "'.[train]'" in install


def test_the_image_runs_as_its_file_says(tmp_path: Path) -> None:
    """The same words and variables in this environment; only the paths, the model and the port differ."""
    stage, data = last_stage(), tmp_path / "data"
    variables = {**environment(), "TWINKLE_SERVE_DATA": str(data), "TWINKLE_SERVE_PORT": "0"}
    variables = {name: value for name, value in variables.items() if name.startswith(("TWINKLE_SERVE_", "PYTHON"))}
    check = json.loads(stage["HEALTHCHECK"].partition("CMD ")[2])[1:]
    data.mkdir()

    def healthy() -> int:
        done = subprocess.run(
            [sys.executable, "-m", "twinkle.cli", *check], env={**os.environ, **variables}, check=False, timeout=60
        )
        return done.returncode

    assert healthy() == 1
    command = [sys.executable, "-m", "twinkle.cli", *json.loads(stage["ENTRYPOINT"])[1:], str(MODEL)]
    service = Served(data, [*command, "--backend", ENGINE, "--name", "m"], variables)
    service.start(wait=False)
    try:
        end = time.monotonic() + 60
        while healthy() != 0:
            assert time.monotonic() < end, service.log()
            time.sleep(0.2)
        assert "http://0.0.0.0:" in service.log()
    finally:
        assert service.stop() == 0
    assert healthy() == 1


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "twinkle.service")
    return parser


def test_the_unit_runs_commands_that_exist() -> None:
    section = unit()["Service"]
    for key in ("ExecStart", "ExecStartPre"):
        assert command_of(shlex.split(section[key])).name in ("serve", "check")
    assert (section["Type"], section["KillMode"]) == ("notify", "mixed")
    assert load(DEPLOY / "serve.yaml").settings.trusted_proxies == ("127.0.0.1",)


def test_the_guide_has_commands_for_the_folder_of_the_unit() -> None:
    guide = (ROOT / "docs" / "guides" / "operator" / "deployment.md").read_text().partition("## systemd")[2]
    names = []
    for line in re.findall(r"(/opt/twinkle/bin/twinkle server .*)", guide):
        words = shlex.split(line)
        command, rest = command_of(words), words[3:]
        if isinstance(command, click.Group):
            command, rest = command.commands[rest[0]], rest[1:]
        given, *_ = command.make_parser(click.Context(command)).parse_args(list(rest))
        assert given["data"] == str(load(DEPLOY / "serve.yaml").settings.data)
        names.append(command.name)
    assert names == ["create", "backup", "backup"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_no_fault_with_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "twinkle.service").read_text().replace("/opt/twinkle/bin/twinkle", "/bin/true")
    (tmp_path / "twinkle.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(tmp_path / "twinkle.service")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    faults = [line for line in done.stderr.splitlines() if "twinkle.service" in line]
    assert faults == []
    assert done.returncode == 0, done.stderr


def test_systemd_is_told_of_the_start_of_reloads_and_of_the_end(tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(60)
        heard: list[dict[str, str]] = []

        def hear(key: str) -> dict[str, str]:
            while True:
                fields = dict(line.split("=", 1) for line in manager.recv(4096).decode().splitlines())
                heard.append(fields)
                if key in fields:
                    return fields

        command = [sys.executable, "-m", "twinkle.cli", "serve", str(MODEL), "--backend", ENGINE, "--no-auth"]
        variables = {"NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "1500000"}
        service = Served(tmp_path / "data", [*command, "--data", str(tmp_path / "data"), "--port", "0"], variables)
        service.start(wait=False)
        try:
            ready = hear("READY")
            assert ready["STATUS"].startswith("Serving ledger_model at http://127.0.0.1:")
            assert any(fields.get("STATUS") == "Loading ledger_model" for fields in heard)
            assert CliRunner().invoke(server, ["ready", "--data", str(service.data)]).exit_code == 0
            hear("WATCHDOG")
            assert service.process is not None
            service.process.send_signal(signal.SIGHUP)
            assert int(hear("RELOADING")["MONOTONIC_USEC"]) > 0
            hear("READY")
            assert service.alive, "a reload is no end, even without a certificate"
            service.process.send_signal(signal.SIGTERM)
            hear("STOPPING")
            service.process.wait(30)
        finally:
            assert service.stop() == 0


def test_the_proxy_of_the_example_removes_the_prefix_that_it_names() -> None:
    text = (DEPLOY / "nginx.conf").read_text()
    prefix: Any = re.search(r"location (/\w+)/ \{", text)
    assert f"X-Forwarded-Prefix {prefix[1]};" in text
    assert re.search(r"proxy_pass http://[\d.:]+/;", text), "without the slash, nginx keeps the prefix"
