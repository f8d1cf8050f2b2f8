"""The result of a pass says which code computed its loss: another version of a plugin has another digest."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_pool import Bench, datum, request
from server_reference import Reference

from twinkle import registry
from twinkle_client import wire
from twinkle_registry.trust.lock import Lock
from twinkle_server.engine.executor import Pass
from twinkle_server.engine.native.calls import payload_of
from twinkle_server.operations import Create
from twinkle_server.wire import codec, json_bodies

MANIFEST = """schema = 1
core = ">=0.1,<1"
name = "acme-scale"

[[component]]
kind = "loss"
name = "AcmeScale"
ref = ".loss:AcmeScale"
runtimes = ["local", "served"]
tenant_safe = true
"""
LOSS = '''"""A loss."""

from twinkle.data_format import LossOutput


def AcmeScale(inputs, outputs):
    """Return the scaled sum."""
    return LossOutput(-{scale} * (outputs["logps"] * (inputs["labels"] != -100)).sum(), 1.0)
'''


def write(site: Path, version: str, scale: float) -> dict[str, str]:
    """Write the plugin as pip installs it, in place of another version; return its files with their SHA-256."""
    for old in site.glob("acme_scale*"):
        shutil.rmtree(old)
    info, package = site / f"acme_scale-{version}.dist-info", site / "acme_scale"
    texts = {
        package / "__init__.py": '"""A plugin."""\n',
        package / "loss.py": LOSS.format(scale=scale),
        package / "twinkle-plugin.toml": MANIFEST,
        info / "METADATA": f"Metadata-Version: 2.1\nName: acme-scale\nVersion: {version}\n",
        info / "entry_points.txt": "[twinkle]\nacme-scale = acme_scale\n",
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    names = {path.relative_to(site).as_posix(): text for path, text in texts.items()}
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in (*names, f"{info.name}/RECORD")))
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in names.items()}


def digest(files: dict[str, str]) -> str:
    """Return the digest of a listing, as `sha256sum | sha256sum` gives it."""
    return hashlib.sha256("".join(f"{files[path]}  {path}\n" for path in sorted(files)).encode()).hexdigest()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "site"
    write(folder, "1.0", 2.0)
    sys.path.append(str(folder))
    registry.cache_clear()
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_scale"]:
        del sys.modules[name]
    registry.cache_clear()


def native(bench: Bench, *, loss: str | None = "AcmeScale") -> dict[str, Any]:
    """Run one pass of a new native model."""
    bench.executor.remove("n")
    bench.executor.create("n", Create(2, 1, native=True), None)
    if loss is not None:
        bench.executor.call("n", payload_of("set_loss", wire.pack({"name": loss, "options": {}})))
    tokens, inputs = datum(6, 1)
    row = {"input_ids": tokens, "labels": inputs["target_tokens"]}
    call = payload_of("forward_backward", wire.pack({"inputs": [row]}))
    [found], _ = bench.executor.run([Pass("n", call, 1, native=True)])
    assert isinstance(found, bytes), found
    value: dict[str, Any] = wire.unpack(found)["value"]
    return value


def tinker(bench: Bench, loss: str = "AcmeScale") -> bytes:
    tokens, inputs = datum(6, 1)
    [found], _ = bench.executor.run(
        [Pass("t", request([(tokens, {"target_tokens": inputs["target_tokens"]})], loss), 1)]
    )
    assert isinstance(found, bytes), found
    return found


@pytest.mark.parametrize("place", [pytest.param("worker", marks=pytest.mark.full), "engine"])
def test_each_version_of_a_plugin_has_its_own_digest(fresh: Callable[..., Bench], site: Path, place: str) -> None:
    extra = {"loss_workers": {"seconds": 30.0}} if place == "worker" else {"loss_workers": None}
    codes, losses = [], []
    for version, scale in (("1.0", 2.0), ("1.0", 3.0), ("1.1", 3.0)):
        files = write(site, version, scale)
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme_scale"]:
            del sys.modules[name]
        registry.cache_clear()
        bench = fresh(extra=extra)
        result = native(bench)
        expected = {"loss": "AcmeScale", "plugin": "acme-scale", "version": version, "sha256": digest(files)}
        assert result["loss_code"] == expected
        bench.create("t", 2)
        answered = tinker(bench)
        assert codec.read_output_type(answered) == "ArrayRecord;" + ";".join(f"{k}={v}" for k, v in expected.items())
        assert f'"{codec.read_output_type(answered)}"'.encode() in json_bodies.pass_json(answered)
        codes.append(expected["sha256"])
        losses.append(result["loss"])
        if bench.executor._losses.workers is not None:
            bench.executor._losses.workers.close()
    assert len(set(codes)) == 3
    assert losses[1] == losses[2] == pytest.approx(losses[0] * 1.5), "the digest is that of the code that ran"


@pytest.mark.full
def test_a_running_worker_keeps_the_digest_of_the_code_that_it_has_imported(
    fresh: Callable[..., Bench], site: Path
) -> None:
    bench = fresh(extra={"loss_workers": {"seconds": 30.0}})
    first = native(bench)
    write(site, "1.0", 3.0)
    again = native(bench)
    assert (again["loss_code"], again["loss"]) == (first["loss_code"], first["loss"])
    workers = bench.executor._losses.workers
    assert workers is not None
    for plugin in workers._tree.plugins.values():
        workers._drop(plugin)  # its process ended
    later = native(bench)
    workers.close()
    assert later["loss"] == pytest.approx(first["loss"] * 1.5)
    assert later["loss_code"]["sha256"] != first["loss_code"]["sha256"]


@pytest.mark.full
def test_a_loss_of_a_plugin_sees_sets_of_tokens(fresh: Callable[..., Bench], site: Path) -> None:
    bench = fresh(extra={"loss_workers": {"seconds": 30.0}})
    tokens, sets = datum(6, 1)[0], np.random.default_rng(1).integers(1, 256, (6, 3))
    bench.executor.create("n", Create(2, 1, native=True), None)
    bench.executor.call("n", payload_of("set_loss", wire.pack({"name": "AcmeScale", "options": {}})))
    call = payload_of("forward_backward", wire.pack({"inputs": [{"input_ids": tokens, "labels": sets}]}))
    [found], _ = bench.executor.run([Pass("n", call, 1, native=True)])
    assert isinstance(found, bytes), found
    output = wire.unpack(found)["value"]
    expected = Reference(bench.base).logps(tokens, sets).detach()
    np.testing.assert_allclose(output["logps"][0], expected.numpy(), atol=2e-5)
    assert output["loss"] == pytest.approx(-2.0 * float(expected.sum()), rel=1e-5)
    assert output["loss_code"]["loss"] == "AcmeScale"
    assert bench.executor._losses.workers is not None
    bench.executor._losses.workers.close()


def test_losses_of_the_service_name_their_code_too_and_published_results_stay_as_published(shared: Bench) -> None:
    code = native(shared, loss="CrossEntropyLoss")["loss_code"]
    assert (code["loss"], code["plugin"], len(code["sha256"])) == ("CrossEntropyLoss", "twinkle-losses", 64)
    assert "loss_code" not in native(shared, loss=None)
    [found], _ = shared.executor.run([Pass("a", request([datum(5, 1)]), 1)])
    assert isinstance(found, bytes)
    assert codec.read_output_type(found) == "ArrayRecord"


def test_the_digest_of_a_repository_is_that_of_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "hub" / "acme-scale"
    repository.mkdir(parents=True)
    for name, text in (("__init__.py", ""), ("twinkle-plugin.toml", MANIFEST), ("loss.py", LOSS.format(scale=2.0))):
        (repository / name).write_text(text)
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TWINKLE_LOCK", str(tmp_path / "twinkle.lock"))
    command = [sys.executable, "-m", "twinkle.cli", "plugins", "add", f"file://{repository}", "--yes"]
    added = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ})
    assert added.returncode == 0, added.stdout + added.stderr
    registry.cache_clear()
    try:
        [spec] = registry().specs("loss")["AcmeScale"]
        found = registry().identity(spec)
        [locked] = Lock.load().hub
        assert (found.plugin, found.version, found.sha256) == ("acme-scale", locked.commit, locked.digest)
        assert str(tmp_path) not in found.version
    finally:
        registry.cache_clear()
