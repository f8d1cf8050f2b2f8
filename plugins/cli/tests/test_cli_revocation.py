"""`twinkle plugins keygen|revoke|revoked`: what a publisher signs, and what a user sees of it."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from twinkle._registry import registry
from twinkle.cli import main

Call = Callable[..., Result]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command in an empty folder that is trusted."""
    for name in [name for name in os.environ if name.startswith("TWINKLE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TWINKLE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("TWINKLE_TRUST_FOLDER", str(tmp_path / "work"))

    def invoke(*arguments: str) -> Result:
        registry.cache_clear()
        return CliRunner().invoke(main, ["plugins", *arguments])

    return invoke


@pytest.fixture
def public(call: Call) -> str:
    """The public half of the key in `key.pem`."""
    return call("keygen", "key.pem").stdout.strip()


def revoke(call: Call, *arguments: str) -> Result:
    return call("revoke", "revoked.json", *arguments, "--key", "key.pem")


def codes(call: Call) -> list[str]:
    (known,) = json.loads(call("revoked", "--json").stdout)
    return [entry["code"] or entry["sha256"] for entry in known["revoked"]]


def test_a_private_key_is_its_owners_alone_and_is_never_replaced(call: Call, public: str) -> None:
    key = Path("key.pem")
    assert key.stat().st_mode & 0o077 == 0
    before = key.read_bytes()
    again = call("keygen", "key.pem")
    assert again.exit_code == 2
    assert "cannot write key.pem: File exists; choose a file that does not exist yet" in again.stderr
    assert key.read_bytes() == before


def test_each_list_follows_the_one_before(call: Call, public: str) -> None:
    Path("twinkle.toml").write_text(f'[[trust.revoked]]\nlist = "revoked.json"\ned25519 = "{public}"\n')
    digest = "0a" * 32
    said = revoke(call, "hf://acme/focal@3f2a*", f"sha256:{digest.upper()}", "--reason", "it sends prompts elsewhere")
    assert re.fullmatch(r"revoked\.json: list number 1, 2 revoked, expires \d{4}-\d\d-\d\d\n", said.stdout)
    assert codes(call) == ["hf://acme/focal@3f2a*", digest]
    assert "list number 2, 3 revoked" in revoke(call, "ms://acme/*", "--reason", "bad").stdout
    assert "list number 3, 3 revoked" in revoke(call).stdout, "it was signed again with new dates"
    assert "list number 4, 2 revoked" in revoke(call, "--restore", "hf://acme/focal@3f2a*").stdout
    assert codes(call) == [digest, "ms://acme/*"]
    assert call("revoked").exit_code == 0


def test_what_cannot_be_restored_or_has_no_reason_leaves_the_list_as_it_is(call: Call, public: str) -> None:
    revoke(call, "hf://acme/focal", "--reason", "bad")
    before = Path("revoked.json").read_bytes()
    for arguments, words in (
        (("--restore", "hf://acme/focal", "--restore", "hf://acme/other"), "does not revoke hf://acme/other"),
        (("hf://acme/more", "--restore", "hf://acme/other", "--reason", "bad"), "does not revoke hf://acme/other"),
        (("hf://acme/more",), "--reason must state why the code is revoked, got an empty string"),
        (("acme/more", "--reason", "bad"), "must be a pattern such as"),
    ):
        refused = revoke(call, *arguments)
        assert refused.exit_code == 2
        assert words in refused.stderr
    call("keygen", "other.pem")
    stranger = call("revoke", "revoked.json", "hf://acme/more", "--reason", "bad", "--key", "other.pem")
    assert "has no valid signature" in stranger.stderr
    assert Path("revoked.json").read_bytes() == before


def test_a_list_with_a_problem_is_shown_with_it_and_the_command_fails(call: Call, public: str) -> None:
    Path("twinkle.toml").write_text(f'[[trust.revoked]]\nlist = "revoked.json"\ned25519 = "{public}"\n')
    result = call("revoked")
    assert result.exit_code == 1
    assert "  problem: " in result.stdout
    assert "revoked.json cannot be read: No such file or directory" in result.stdout
