"""Files that lie in a folder are obeyed once the user trusted them, and never silently left out before."""

import builtins
import io
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle_registry import NotTrusted, Registry, Settings, SettingsError
from twinkle_registry.settings import untrusted_notice
from twinkle_registry.trust.editor import remove, verify
from twinkle_registry.trust.folders import is_trusted_folder, trust, trusted_paths, untrust
from twinkle_registry.trust.lock import Lock
from twinkle_registry.trust.policy import Policy
from twinkle_registry.trust.reference import Origin

House = Callable[..., Registry]
FILES = {"__init__.py": "from house_contracts import Loss\nclass Focal(Loss):\n    def __call__(self, inputs): ...\n"}
MANIFEST = """
schema = 1
core = ">=0.1,<1"
name = "acme-focal"
[[component]]
kind = "loss"
name = "Focal"
ref = ".:Focal"
"""
FOCAL = Origin("hf", "acme/focal", "3f" * 20)


@pytest.fixture(autouse=True)
def nothing_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINKLE_TRUST_FOLDER")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "work"


@pytest.fixture
def foreign_lock(hub: Any, house: House, add: Any, work: Path) -> Path:
    """A lock that somebody else made, in a checkout of theirs; its code is in the store of this machine, too."""
    hub.push("acme/focal", {**FILES, "twinkle-plugin.toml": MANIFEST})
    add(house(), "hf://acme/focal")
    untrust(str(work))
    return work / "twinkle.lock"


def test_a_lock_that_came_with_a_folder_lets_nothing_run(foreign_lock: Path, house: House, work: Path) -> None:
    with pytest.warns(UserWarning, match=r"^twinkle\.lock in .* is ignored, .*: twinkle plugins trust /"):
        registry = house()
    assert "Focal" not in registry.names("loss")
    with pytest.raises(NotTrusted, match=r"cannot run code .*twinkle\.lock in .* is ignored"):
        registry.resolve("hf://acme/focal", "loss")
    trust(str(foreign_lock), [foreign_lock.read_bytes()])
    assert house().resolve("Focal", "loss").__name__ == "Focal"
    assert untrusted_notice() == ""


def test_an_edited_lock_must_be_trusted_again_unless_twinkle_edited_it(
    hub: Any, house: House, add: Any, work: Path
) -> None:
    hub.push("acme/focal", {**FILES, "twinkle-plugin.toml": MANIFEST})
    hub.push("acme/other", FILES)
    add(house(), "hf://acme/focal")
    add(house(), "hf://acme/other")
    assert [entry.reference for entry in Lock.load().hub] == ["hf://acme/focal", "hf://acme/other"]
    before = Path("twinkle.lock").read_bytes()
    remove("hf://acme/other")
    assert Lock.load().is_obeyed
    Path("twinkle.lock").write_bytes(before)  # what was removed does not come back with an older file
    assert not Lock.load().is_obeyed
    assert Lock.load().hub == ()


def test_an_untrusted_lock_is_neither_changed_nor_verified(
    foreign_lock: Path, house: House, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = foreign_lock.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        registry = house()
    for change in (lambda: add(registry, "hf://acme/focal"), lambda: remove("hf://acme/focal")):
        with pytest.raises(NotTrusted, match=r"^cannot change .*twinkle\.lock: .* is ignored"):
            change()
    with pytest.raises(NotTrusted, match=r"^cannot verify .*twinkle\.lock: "):
        verify(registry.records, lambda scheme: None)
    assert foreign_lock.read_bytes() == before
    monkeypatch.setenv("TWINKLE_FROZEN", "1")
    with pytest.warns(UserWarning, match="is ignored"):
        registry = house()
    for asked in ("hf://acme/focal", "colorsys:rgb_to_hsv"):
        with pytest.raises(NotTrusted, match=r"this run is frozen, and twinkle\.lock in .* is ignored"):
            registry.resolve(asked, "loss")


@pytest.mark.parametrize("way", ["TWINKLE_LOCK", "TWINKLE_TRUST_FOLDER"])
def test_what_the_user_names_is_obeyed(
    foreign_lock: Path, house: House, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(way, str(foreign_lock if way == "TWINKLE_LOCK" else foreign_lock.parent))
    assert house().resolve("Focal", "loss").__name__ == "Focal"
    assert trusted_paths() == [], "it is for one process"


def test_a_relative_folder_in_the_variable_would_mean_any(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("twinkle.lock").write_text("schema = 1\n")
    monkeypatch.setenv("TWINKLE_TRUST_FOLDER", ".")
    with pytest.raises(SettingsError, match=r"TWINKLE_TRUST_FOLDER must be absolute paths .*, got '\.'"):
        Lock.load()


def test_settings_that_take_away_are_obeyed_and_those_that_give_are_not(work: Path) -> None:
    Path("twinkle.toml").write_text(
        '[plugins]\ndisable = ["acme"]\nprefer = { "loss:X" = "acme" }\n'
        '[trust]\nallow = ["hf://acme/*"]\nonly = ["hf://**"]\ndeny = ["hf://acme/old"]\n'
    )
    assert Settings.load().disabled == {"acme"}
    assert Settings.load().prefer == {"loss:X": "acme"}
    policy = Policy.load()
    assert not policy.allows(FOCAL)
    assert policy.forbids(Origin("ms", "acme/focal", "3f" * 20))
    assert policy.denies("hf://acme/old")
    assert untrusted_notice().startswith(f"[trust] allow of twinkle.toml in {work} is ignored")
    trust("twinkle.toml", [Path("twinkle.toml").read_bytes()])
    assert Policy.load().allows(FOCAL)
    assert untrusted_notice() == ""
    Path("twinkle.toml").write_text('[trust]\nallow = ["hf://**"]\n')
    assert not Policy.load().allows(FOCAL)


def test_settings_without_anything_that_gives_trust_need_none(work: Path, house: House) -> None:
    Path("twinkle.toml").write_text('[plugins]\nprefer = {}\n[trust]\ndeny = ["hf://acme/old"]\n')
    assert untrusted_notice() == ""
    house()


def test_a_folder_cannot_lift_what_the_users_own_file_says(work: Path, tmp_path: Path) -> None:
    own = tmp_path / "home/.config/twinkle/twinkle.toml"
    own.parent.mkdir(parents=True)
    own.write_text('[plugins]\ndisable = ["mine"]\nonly = ["a"]\nprefer = { "loss:X" = "a" }\n[trust]\nallow = ["*"]\n')
    Path("twinkle.toml").write_text(
        '[plugins]\ndisable = ["theirs"]\nonly = ["b"]\nprefer = { "loss:X" = "b", "loss:Y" = "b" }\n'
    )
    settings = Settings.load()
    assert settings.disabled == {"mine", "theirs"}
    assert settings.enabled_only == {"a"}
    assert settings.prefer == {"loss:X": "a", "loss:Y": "b"}
    assert settings.source("disable") == f"[plugins] disable of {own} and [plugins] disable of {work}/twinkle.toml"
    assert "[plugins] in place of ~/.config/twinkle/twinkle.toml of twinkle.toml" in untrusted_notice()
    assert Policy.load().allows(FOCAL), "the user's own file is the user's own word"
    trust("twinkle.toml", [Path("twinkle.toml").read_bytes()])
    assert Settings.load().disabled == {"theirs"}


def test_a_file_is_trusted_where_it_is_and_not_where_it_is_copied_to(work: Path, tmp_path: Path) -> None:
    Path("twinkle.lock").write_text("schema = 1\n")
    trust("twinkle.lock", [b"schema = 1\n"])
    assert Lock.load().is_obeyed
    (tmp_path / "link").symlink_to(work)
    command = "from twinkle_registry.trust.lock import Lock; print(Lock.load().is_obeyed)"
    for folder, obeyed in (("link", "True"), ("copy", "False")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "twinkle.lock").write_text("schema = 1\n")
        found = subprocess.run([sys.executable, "-c", command], cwd=tmp_path / folder, capture_output=True, text=True)
        assert found.stdout.strip() == obeyed, found.stderr


def test_a_record_of_another_file_or_a_damaged_one_trusts_nothing(work: Path, tmp_path: Path) -> None:
    Path("twinkle.lock").write_text("schema = 1\n")
    trust("twinkle.lock", [b"schema = 1\n"])
    (record,) = (tmp_path / "home/.local/state/twinkle/trusted").iterdir()
    assert record.stat().st_mode & 0o077 == 0
    for text in ("", "[]", '{"path": 1}', record.read_text().replace("twinkle.lock", "twinkle.toml")):
        record.write_text(text)
        assert not Lock.load().is_obeyed


def test_a_lock_that_cannot_be_read_stops_only_what_needs_it(
    work: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("twinkle.lock").write_text("schema = 1\n")
    real = builtins.open

    def refuse(file: Any, *args: Any, **options: Any) -> Any:
        if str(file) == str(work / "twinkle.lock"):
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *args, **options)

    monkeypatch.setattr(builtins, "open", refuse)  # of a file's mode root takes no notice
    assert house().names("loss") == []
    monkeypatch.setattr(io, "open", refuse)
    with pytest.raises(SettingsError, match=r"twinkle\.lock cannot be read: Permission denied"):
        Lock.load()


@pytest.mark.parametrize("variable", ["TWINKLE_STATE_DIR", "XDG_STATE_HOME"])
def test_records_that_a_checkout_brings_along_count_for_nothing(
    work: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    Path("twinkle.lock").write_text("schema = 1\n")
    theirs = work / "state" if variable == "TWINKLE_STATE_DIR" else work / "state" / "twinkle"
    monkeypatch.setenv("TWINKLE_STATE_DIR", str(theirs))
    trust("twinkle.lock", [b"schema = 1\n"])
    assert Lock.load().is_obeyed
    monkeypatch.delenv("TWINKLE_STATE_DIR")
    monkeypatch.setenv(variable, "state")
    if variable == "XDG_STATE_HOME":  # its specification says that a relative path is to be ignored
        assert not Lock.load().is_obeyed
    else:
        with pytest.raises(
            SettingsError, match=r"TWINKLE_STATE_DIR must be the absolute path of a folder, got 'state'"
        ):
            Lock.load()


def test_code_is_trusted_with_its_folder_and_what_is_below_until_that_is_taken_back(work: Path) -> None:
    (work / "plugin" / "inner").mkdir(parents=True)
    assert not is_trusted_folder("plugin/inner")
    trust(str(work / "plugin"))
    assert is_trusted_folder("plugin/inner")
    assert not is_trusted_folder(str(work))
    assert untrust("plugin") == [str(work / "plugin")]
    assert not is_trusted_folder("plugin/inner")


def test_a_state_folder_that_cannot_be_written_is_an_error_and_changes_no_lock(
    hub: Any, house: House, add: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.push("acme/focal", FILES)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWINKLE_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(SettingsError, match=r"^cannot record that .*twinkle\.lock is trusted: .* TWINKLE_STATE_DIR"):
        add(house(), "hf://acme/focal")
    assert not Path("twinkle.lock").exists()
