"""The disk cache saves work and changes no answer."""

import json
import os
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from twinkle_registry import discovery, installed_plugins, reading

SUBPROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
from twinkle_registry import discovery
discovery._path_entries = lambda: [sys.argv[1]]
records = discovery.installed_plugins("0.1.0")
heavy = [m for m in ("importlib.metadata", "importlib.util", "tomllib", "packaging", "pluggy") if m in sys.modules]
print([r.status for r in records], heavy)
"""


def cache_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache").glob("plugins-*.json")
    return file


def forbid(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{name} was called")

    monkeypatch.setattr(module, name, fail)


def test_a_hit_reads_no_metadata_and_no_toml(site: Any, table: Any) -> None:
    site.plugin("acme", table("L", "acme.loss:L", requires='["torch>=2"]'))
    site.settle()
    command = [sys.executable, "-S", "-c", SUBPROCESS, str(site.folder)]
    # Without site-packages, whose .pth files import importlib.util; the package itself comes by PYTHONPATH.
    paths = {str(Path(m.__file__ or "").parents[1]) for m in (discovery, __import__("packaging"))}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    first = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    second = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    assert "tomllib" in first
    assert second.strip() == "['ok'] []"


def test_the_cached_records_equal_the_scanned_ones(site: Any, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = '\nhooks = { module = "acme.hooks", implements = ["twinkle_step_end"] }\n'
    command = '[[command]]\nname = "x"\nref = "acme:x"\n'
    inputs = table("L", "acme.loss:L", inputs='{ advantages = "float32[T]" }')
    site.plugin("acme", hooks + inputs + command)
    site.plugin("other", table("M", "other.m:M", kind="metric"))
    site.settle()
    scanned = installed_plugins()
    forbid(monkeypatch, reading, "read_toml")
    forbid(monkeypatch, discovery, "scan_path")
    forbid(monkeypatch, discovery, "locate")
    assert installed_plugins() == scanned
    assert [r.status for r in scanned] == ["ok", "ok"]


def test_an_edited_manifest_is_seen_at_once(site: Any, table: Any) -> None:
    manifest = site.plugin("acme", table("L", "acme.loss:L"))
    site.settle()
    for name in ("L", "A", "B", "C"):
        manifest.write_text(manifest.read_text().replace('name = "L"', f'name = "{name}"'))
        (record,) = installed_plugins()
        assert record.manifest is not None
        assert record.manifest.components[0].name == name
        manifest.write_text(manifest.read_text().replace(f'name = "{name}"', 'name = "L"'))


def test_a_plugin_that_is_installed_or_removed_is_seen_at_once(site: Any) -> None:
    site.plugin("acme")
    site.settle()
    assert [r.dist for r in installed_plugins()] == ["acme"]
    site.plugin("other")
    assert [r.dist for r in installed_plugins()] == ["acme", "other"]
    for file in (site.folder / "acme-1.0.dist-info").iterdir():
        file.unlink()
    (site.folder / "acme-1.0.dist-info").rmdir()
    assert [r.dist for r in installed_plugins()] == ["other"]


def test_a_manifest_that_goes_and_comes_back_is_seen_at_once(site: Any) -> None:
    manifest = site.plugin("acme")
    text = manifest.read_text()
    site.settle()
    installed_plugins()
    manifest.unlink()
    assert [r.status for r in installed_plugins()] == ["broken"]
    manifest.write_text(text)
    assert [r.status for r in installed_plugins()] == ["ok"]


def test_a_change_elsewhere_does_not_read_the_manifests_again(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("acme")
    site.settle()
    work = tmp_path / "work"
    monkeypatch.setattr(discovery, "_path_entries", lambda: [str(work), str(site.folder)])
    installed_plugins()
    (work / "train.log").write_text("a log that grows beside the script")
    forbid(monkeypatch, reading, "read_toml")
    forbid(monkeypatch, discovery, "_plugins_of")
    assert [r.status for r in installed_plugins()] == ["ok"]


def test_broken_plugins_are_looked_at_again(site: Any) -> None:
    manifest = site.plugin("acme", "wrong = 1\n")
    site.settle()
    assert [r.status for r in installed_plugins()] == ["broken"]
    text = manifest.read_text().replace("wrong = 1\n", "")
    manifest.write_text(text)
    os.utime(manifest, (1_000_000_000, 1_000_000_000))
    assert [r.status for r in installed_plugins()] == ["ok"]


def valid(content: Any) -> bytes:
    body = json.dumps(content).encode()
    return f"twinkle 1 {zlib.crc32(body):08x}\n".encode() + body


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{}",
        b"twinkle 1 00000000\n{}",
        b"twinkle 1 deadbeef\nnot json",
        b"\n\n",
        valid({}),
        valid([]),
        valid({"scans": 3}),
    ],
)
def test_a_corrupt_cache_is_no_cache(site: Any, tmp_path: Path, content: bytes) -> None:
    site.plugin("acme")
    site.settle()
    installed_plugins()
    file = cache_file(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(content)
    assert [r.status for r in installed_plugins()] == ["ok"]
    assert file.read_bytes() == whole


def test_a_truncated_cache_is_no_cache(site: Any, tmp_path: Path) -> None:
    site.plugin("acme")
    site.settle()
    installed_plugins()
    file = cache_file(tmp_path)
    whole = file.read_bytes()
    for size in range(0, len(whole), 37):
        file.write_bytes(whole[:size])
        assert [r.status for r in installed_plugins()] == ["ok"]


def test_a_folder_that_cannot_be_written_does_no_harm(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("acme")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert [r.status for r in installed_plugins()] == ["ok"]


def test_the_switch_turns_it_off(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("acme")
    monkeypatch.setenv("TWINKLE_CACHE", "0")
    installed_plugins()
    assert not (tmp_path / "cache").exists()


def test_its_usual_place_is_below_the_home_folder(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("acme")
    monkeypatch.delenv("TWINKLE_CACHE_DIR")
    installed_plugins()
    assert list((tmp_path / "home" / ".cache" / "twinkle").glob("plugins-*.json"))


def test_the_usual_place_follows_the_desktop_convention(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TWINKLE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    site.plugin("acme")
    installed_plugins()
    assert list((tmp_path / "xdg" / "twinkle").glob("plugins-*.json"))


def test_a_cache_of_another_user_is_not_believed(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("acme")
    site.settle()
    installed_plugins()
    monkeypatch.setattr(os, "getuid", lambda: 12345, raising=False)
    forbid(monkeypatch, discovery, "manifest_from_rows")
    assert [r.status for r in installed_plugins()] == ["ok"]


def test_old_cache_files_are_pruned(site: Any, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    for i in range(70):
        file = folder / f"plugins-{i:08x}.json"
        file.write_text("")
        os.utime(file, (1_000_000_000 + i, 1_000_000_000 + i))
    (folder / "code").mkdir()
    site.plugin("acme")
    installed_plugins()
    left = sorted(p.name for p in folder.glob("plugins-*"))
    assert len(left) == 64
    assert "plugins-00000000.json" not in left
    assert (folder / "code").is_dir()


def test_processes_that_race_all_get_the_answer(site: Any, tmp_path: Path, table: Any) -> None:
    for i in range(20):
        site.plugin(f"acme-{i}", table(f"L{i}", f"acme_{i}.loss:L"))
    site.settle()
    counts: list[int] = []

    def work() -> None:
        for _ in range(10):
            counts.append(sum(r.status == "ok" for r in installed_plugins()))
            for file in (tmp_path / "cache").glob("plugins-*.json"):
                file.unlink(missing_ok=True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [20] * 40
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_a_change_within_the_tick_of_the_clock_is_not_missed(site: Any, table: Any) -> None:
    manifest = site.plugin("acme", table("L", "acme.loss:L"))
    now = time.time()
    for name in ("L", "M", "N"):
        manifest.write_text(manifest.read_text()[:-1])
        text = manifest.read_text()
        manifest.write_text(text.rsplit("name", 1)[0] + f'name = "{name}"\nref = "acme.loss:L"\n')
        os.utime(manifest, (now, now))
        (record,) = installed_plugins()
        assert record.manifest is not None
        assert record.manifest.components[0].name == name
