"""A frozen run uses what the lock lists, as it was locked: plugins of pip, modules, local files and hub code alike."""

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle_registry import ComponentNotFound, NotTrusted, Registry, SettingsError
from twinkle_registry.resolving import open_hub
from twinkle_registry.trust.editor import EntryCheck, LockEditor, remove, verify
from twinkle_registry.trust.lock import Lock

House = Callable[..., Registry]
HOOKS = "from twinkle_registry import hookimpl\n@hookimpl\ndef twinkle_step_end(metrics): metrics.append('fired')\n"
FOCAL = "from house_contracts import Loss\nclass Focal(Loss):\n    def __call__(self, inputs): ...\n"


@pytest.fixture
def acme(site: Any, table: Any, loss_source: str) -> Path:
    """A plugin that pip installed, with hooks; the folder of its package."""
    hooks = 'hooks = { module = "acme.hooks", implements = ["twinkle_step_end"] }\n'
    manifest = site.plugin("acme", hooks + table("PlainLoss", "acme.loss:PlainLoss"), loss=loss_source, hooks=HOOKS)
    return Path(manifest.parent)


@pytest.fixture
def freeze(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setenv("TWINKLE_FROZEN", "1")


def editor(registry: Registry, says: bool = True) -> LockEditor:
    return LockEditor(registry, lambda scheme: open_hub(scheme, registry, context=scheme), lambda _: says)


def problems(registry: Registry, **options: bool) -> dict[str, str]:
    report = verify(registry.records, lambda scheme: open_hub(scheme, registry, context=scheme), **options)
    return {entry.name: entry.problem for entry in report}


def write_record(site: Any, acme: Path) -> None:
    """Write the RECORD that pip would have written."""
    folder = site.folder / "acme-1.0.dist-info"
    lines = []
    for path in [*acme.rglob("*"), folder / "METADATA"]:
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")
        lines.append(f"{path.relative_to(site.folder).as_posix()},sha256={digest},{path.stat().st_size}")
    lines += ["../../bin/acme,sha256=abc,1", "acme/__pycache__/loss.cpython-311.pyc,,", "acme-1.0.dist-info/RECORD,,"]
    (folder / "RECORD").write_text("\n".join(lines) + "\n")


def test_without_a_lock_a_frozen_run_uses_no_plugin(acme: Path, house: House, freeze: Any) -> None:
    freeze()
    registry = house()
    with pytest.raises(NotTrusted, match=r"plugin acme .*this run is frozen, and there is no .*twinkle\.lock"):
        registry.resolve("PlainLoss", "loss")
    metrics: list[str] = []
    registry.hook("twinkle_step_end")(metrics=metrics)
    assert metrics == []


def test_what_is_locked_is_used(acme: Path, site: Any, house: House, freeze: Any) -> None:
    write_record(site, acme)
    assert [p.state for p in editor(house()).renew()] == ["new"]
    assert [p.state for p in editor(house()).renew()] == ["same"]
    locked = Lock.load().pypi[0]
    assert (locked.name, locked.version) == ("acme", "1.0")
    assert {"acme/loss.py", "acme/twinkle-plugin.toml", "acme-1.0.dist-info/METADATA"} <= set(locked.files)
    assert not [path for path in locked.files if "RECORD" in path or path.endswith(".pyc") or path.startswith("..")]
    freeze()
    registry = house()
    assert registry.resolve("PlainLoss", "loss").__name__ == "PlainLoss"
    assert registry.resolve("acme.loss:PlainLoss", "loss").__name__ == "PlainLoss"
    metrics: list[str] = []
    registry.hook("twinkle_step_end")(metrics=metrics)
    assert metrics == ["fired"]


@pytest.mark.parametrize("change", ["edit", "plant", "remove"])
def test_a_plugin_that_was_changed_since_is_refused_before_it_is_imported(
    acme: Path, house: House, freeze: Any, change: str
) -> None:
    editor(house()).renew()
    if change == "edit":
        (acme / "loss.py").write_text("raise SystemExit('edited')")
    elif change == "plant":
        (acme / "planted.py").write_text("")
    else:
        (acme / "hooks.py").unlink()
    assert problems(house())["acme"].startswith("files differ from the lock: 'acme/")
    freeze()
    for text in ("PlainLoss", "acme.loss:PlainLoss"):
        with pytest.raises(NotTrusted):
            house().resolve(text, "loss")
    registry = house()
    metrics: list[str] = []
    registry.hook("twinkle_step_end")(metrics=metrics)
    assert metrics == []


def test_another_version_is_refused_with_the_command_to_install_the_locked_one(
    acme: Path, site: Any, house: House, freeze: Any
) -> None:
    editor(house()).renew()
    (site.folder / "acme-1.0.dist-info").rename(site.folder / "acme-2.0.dist-info")
    site.metadata("acme", "2.0", "acme")
    assert problems(house())["acme"].startswith("version 2.0 is installed; run: pip install 'acme==1.0'")
    freeze()
    with pytest.raises(
        NotTrusted, match=r"has acme 1\.0, but version 2\.0 is installed; run: pip install 'acme==1\.0'"
    ):
        house().resolve("PlainLoss", "loss")


def test_what_was_edited_after_installation_is_not_even_locked(acme: Path, site: Any, house: House) -> None:
    write_record(site, acme)
    (acme / "loss.py").write_text("raise SystemExit('edited')")
    (proposal,) = editor(house()).renew()
    assert proposal.problem.startswith(
        "acme was changed after its installation (acme/loss.py); run: pip install --force"
    )
    assert not Path("twinkle.lock").exists()


def test_an_editable_installation_is_locked_by_its_sources(acme: Path, site: Any, house: House) -> None:
    write_record(site, acme)
    url = {"url": "file:///x", "dir_info": {"editable": True}}
    (site.folder / "acme-1.0.dist-info" / "direct_url.json").write_text(json.dumps(url))
    editor(house()).renew()
    assert set(Lock.load().pypi[0].files) == {f"acme/{path.name}" for path in acme.iterdir() if path.is_file()}


def test_a_module_of_no_locked_plugin_is_refused(acme: Path, site: Any, house: House, freeze: Any) -> None:
    site.write("stranger/__init__.py", "raise SystemExit('imported')")
    site.write("namespace/part.py", "raise SystemExit('imported')")
    editor(house()).renew()
    freeze()
    for module in ("stranger", "namespace.part", "json", "nowhere", "__main__"):
        with pytest.raises(NotTrusted, match=f"'{module.partition('.')[0]}' belongs to no plugin that"):
            house().resolve(f"{module}:X", "optimizer")


def test_a_local_file_is_used_as_it_was_locked(acme: Path, house: House, freeze: Any) -> None:
    file = Path("my_loss.py")
    file.write_text(FOCAL)
    registry = house()
    assert editor(registry).add("./my_loss.py").state == "new"  # type: ignore[union-attr]
    assert editor(registry).add("my_loss.py:Focal").state == "same"  # type: ignore[union-attr]
    freeze()
    assert house().resolve("./my_loss.py:Focal", "loss").__name__ == "Focal"
    file.write_text("raise SystemExit('edited')")
    with pytest.raises(NotTrusted, match=r"my_loss\.py was changed since it was locked"):
        house().resolve("./my_loss.py:Focal", "loss")
    Path("other.py").write_text(FOCAL)
    with pytest.raises(NotTrusted, match=r"this run is frozen, and .* does not list it"):
        house().resolve("./other.py:Focal", "loss")
    with pytest.raises(NotTrusted, match="does not list it"):
        house().resolve("./missing.py:Focal", "loss")


def test_without_freezing_files_and_plugins_of_pip_may_change(acme: Path, house: House) -> None:
    file = Path("my_loss.py")
    file.write_text(FOCAL)
    editor(house()).add("./my_loss.py")
    file.write_text(FOCAL + "# edited")
    assert house().resolve("./my_loss.py:Focal", "loss").__name__ == "Focal"
    assert problems(house())["my_loss.py"].startswith("it was changed since it was locked")
    file.unlink()
    assert problems(house())["my_loss.py"].startswith("it cannot be read (No such file")


def test_hub_code_that_is_allowed_and_not_locked_is_refused_when_frozen(
    hub: Any, acme: Path, house: House, freeze: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("acme/focal", {"__init__.py": FOCAL})
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    found = house().resolve("hf://acme/focal", "loss")
    editor(house()).renew()
    freeze()
    with pytest.raises(NotTrusted, match=r"this run is frozen, and .* does not list it"):
        house().resolve("hf://acme/focal", "loss")
    with pytest.raises(NotTrusted, match="this run is frozen"):
        __import__("importlib").reload(__import__("sys").modules[found.__module__])
    monkeypatch.delenv("TWINKLE_FROZEN")
    editor(house()).add("hf://acme/focal")
    freeze()
    assert house().resolve("hf://acme/focal", "loss") is not None


def test_a_frozen_lock_does_not_change(acme: Path, house: House, freeze: Any) -> None:
    registry = house()
    freeze()
    with pytest.raises(SettingsError, match="cannot change the lock: this run is frozen"):
        editor(registry)
    with pytest.raises(SettingsError, match="cannot change the lock: this run is frozen"):
        remove("acme")


def test_verify_says_of_each_entry_what_is_wrong(hub: Any, acme: Path, house: House, tmp_path: Path) -> None:
    with pytest.raises(ComponentNotFound, match=r"there is no .*twinkle\.lock; create it with: twinkle plugins lock"):
        problems(house())
    commit = hub.push("acme/focal", {"__init__.py": FOCAL})
    editor(house()).add("hf://acme/focal")
    hub.asked.clear()
    assert problems(house()) == {"hf://acme/focal": ""}
    assert hub.asked == [], "it works without a network"
    editor(house()).renew()
    assert set(problems(house()).values()) == {""}
    (source,) = (tmp_path / "cache" / "code" / "trees").glob("*/files/__init__.py")
    source.write_text("raise SystemExit('tampered')")
    assert "was changed after it was added" in problems(house())["hf://acme/focal"]
    assert set(problems(house(), fetch=True).values()) == {""}
    assert source.read_text() == FOCAL
    moved = hub.push("acme/focal", {"__init__.py": FOCAL + "# new"})
    assert problems(house(), online=True)["hf://acme/focal"].startswith(f"it is at {moved} now, but {commit} is locked")
    hub.push("evil/focal", {"__init__.py": FOCAL})
    hub.moved["acme/focal"] = "evil/focal"
    assert problems(house(), online=True)["hf://acme/focal"].startswith("it resolves to hf://evil/focal now")
    hub.offline = True
    assert "there is no network" in problems(house(), online=True)["hf://acme/focal"]


def test_verify_names_what_is_not_locked_or_not_installed(acme: Path, site: Any, house: House, table: Any) -> None:
    editor(house()).renew()
    site.plugin("other")
    assert problems(house())["other"] == "installed, but not locked; run: twinkle plugins lock"
    for path in (site.folder / "acme-1.0.dist-info").iterdir():
        path.unlink()
    (site.folder / "acme-1.0.dist-info").rmdir()
    registry = house()
    assert problems(registry)["acme"] == "not installed; run: pip install 'acme==1.0'"
    editor(registry).renew()
    assert verify(registry.records, lambda scheme: None) == [EntryCheck("pypi", "other", "1.0")]  # type: ignore[arg-type, return-value]


def test_renewing_asks_for_branches_that_moved_and_keeps_what_is_declined(hub: Any, acme: Path, house: House) -> None:
    first = hub.push("acme/focal", {"__init__.py": FOCAL})
    pinned = hub.push("acme/pinned", {"__init__.py": FOCAL})
    for reference in ("hf://acme/focal", f"hf://acme/pinned@{pinned}"):
        editor(house()).add(reference)
    second = hub.push("acme/focal", {"__init__.py": FOCAL + "# new\n"})
    hub.push("acme/pinned", {"__init__.py": FOCAL + "# new\n"})
    assert [p.name for p in editor(house(), says=False).renew()] == [f"hf://acme/pinned@{pinned}"]
    assert {entry.commit for entry in Lock.load().hub} == {first, pinned}
    proposals = {p.name: p for p in editor(house()).renew()}
    moved = proposals["hf://acme/focal"]
    assert (moved.state, moved.trusted, moved.version) == ("changed", first, second)
    assert moved.review.changed == ("__init__.py",)
    assert "+# new" in moved.review.diff
    assert proposals[f"hf://acme/pinned@{pinned}"].state == "same"
    hub.offline = True
    offline = {p.name: p.problem for p in editor(house()).renew()}
    assert "there is no network" in offline["hf://acme/focal"]
    assert offline[f"hf://acme/pinned@{pinned}"] == "", "a commit does not move, so nobody is asked"
    assert offline["acme"] == ""


def test_adding_what_is_not_there_says_what_may_be_added(acme: Path, house: House) -> None:
    with pytest.raises(
        ComponentNotFound, match=r"no plugin 'acmee' is installed; nearest: 'acme'; write code from a hub as"
    ):
        editor(house()).add("acmee")
    with pytest.raises(ComponentNotFound, match=r"there is no file .*missing\.py"):
        editor(house()).add("./missing.py")


@pytest.mark.parametrize("value", ["2", "frozen"])
def test_a_switch_that_is_neither_on_nor_off_is_an_error(
    house: House, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TWINKLE_FROZEN", value)
    with pytest.raises(SettingsError, match=f"TWINKLE_FROZEN must be 1 or 0, got '{value}'"):
        house()
