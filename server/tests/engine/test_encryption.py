"""Checkpoints that are encrypted with age: every file, to every recipient, in little memory."""

import threading
import time
from pathlib import Path

import pyrage
import pytest

from twinkle_server.engine.encryption import MAX_RECIPIENTS, Encrypted, check_recipients

FILES = {"adapter_model.safetensors": bytes(range(256)) * 4096, "adapter_config.json": b"{}"}


class Copy:
    """A copy of a model that is written as some files."""

    def write(self, folder: Path) -> None:
        for name, data in FILES.items():
            (folder / name).write_bytes(data)


@pytest.fixture
def ssh_key() -> tuple[str, str]:
    """A public and a private key, made here."""
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return public.decode(), private.decode()


def test_every_recipient_reads_every_file_and_nothing_else_is_left(tmp_path: Path, ssh_key: tuple[str, str]) -> None:
    first, second = (pyrage.x25519.Identity.generate() for _ in range(2))
    recipients = (str(first.to_public()), str(second.to_public()), ssh_key[0])
    check_recipients(recipients)
    Encrypted(Copy(), recipients).write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.age" for name in FILES}
    for name, data in FILES.items():
        written = (tmp_path / f"{name}.age").read_bytes()
        for identity in (first, second, pyrage.ssh.Identity.from_buffer(ssh_key[1].encode())):
            assert pyrage.decrypt(written, [identity]) == data
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(written, [pyrage.x25519.Identity.generate()])


def test_other_threads_run_while_a_large_file_is_encrypted(tmp_path: Path) -> None:
    class Large:
        def write(self, folder: Path) -> None:
            (folder / "adapter_model.safetensors").write_bytes(bytes(2**26))

    recipients = (str(pyrage.x25519.Identity.generate().to_public()),)
    thread = threading.Thread(target=lambda: Encrypted(Large(), recipients).write(tmp_path))
    thread.start()
    encrypted, turns = tmp_path / "adapter_model.safetensors.age", 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += encrypted.exists()
    thread.join()
    # 64 MiB are a thousand pieces, and another thread can run between any two; one that is shut out has one turn
    assert turns >= 5


@pytest.mark.parametrize(
    "wrong",
    ["", "age1qqqq", "nobody", "ssh-ed25519 AAAA", "ssh-dss AAAA", "AGE-SECRET-KEY-1QQQ", "age1" + "q" * 58],
)
def test_a_recipient_that_is_none_is_named(wrong: str) -> None:
    good = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(ValueError, match=r"age_encryption_recipients\[1\] must be an age X25519 recipient"):
        check_recipients([good, wrong])


def test_a_recipient_longer_than_any_key_is_refused_in_few_words() -> None:
    with pytest.raises(ValueError, match="a recipient must have at most 2048 characters, got 1000008") as caught:
        check_recipients(["ssh-rsa " + "A" * 10**6])
    assert len(str(caught.value)) < 500


def test_none_and_too_many_recipients_are_refused() -> None:
    good = str(pyrage.x25519.Identity.generate().to_public())
    for recipients in ([], [good] * (MAX_RECIPIENTS + 1)):
        with pytest.raises(ValueError, match=f"must have 1 to {MAX_RECIPIENTS} recipients, got {len(recipients)}"):
            check_recipients(recipients)
