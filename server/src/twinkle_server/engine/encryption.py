"""Encryption of checkpoint files with age, each for every recipient, in constant memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twinkle.engine import SavedAdapter

SUFFIX: Final = ".age"
MAX_RECIPIENTS: Final = 64
"""Maximum number of recipients of a checkpoint; each adds a stanza to every file."""
_LONGEST: Final = 2048
"""Maximum length of a recipient in characters; an RSA key of 4096 bits, the largest allowed, has about 750."""
_PIECE: Final = 2**16
_KINDS: Final = (("age1", "x25519"), ("ssh-ed25519 ", "ssh"), ("ssh-rsa ", "ssh"))


def check_recipients(recipients: Sequence[str]) -> None:
    """Check that files can be encrypted for these recipients.

    Raises:
        ValueError: there are none or too many, or one is not an X25519 key of age (`age1…`) or an SSH public key.
    """
    if not 1 <= len(recipients) <= MAX_RECIPIENTS:
        raise ValueError(f"age_encryption_recipients must have 1 to {MAX_RECIPIENTS} recipients, got {len(recipients)}")
    for number, recipient in enumerate(recipients):
        try:
            _recipient(recipient)
        except ValueError as error:
            raise ValueError(
                f"age_encryption_recipients[{number}] must be an age X25519 recipient (age1...) or an SSH public key "
                f"(ssh-ed25519 or ssh-rsa), got {recipient[:80]!r}: {error}"
            ) from error


@dataclass(frozen=True, slots=True)
class Encrypted:
    """An encrypted copy of a model: the files of another copy, each with `SUFFIX` appended to its name.

    Attributes:
        copy: the copy to write.
        recipients: who can decrypt it; see `check_recipients`.
    """

    copy: SavedAdapter
    recipients: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Write the files; see `SavedAdapter`. Unencrypted files are removed before this returns."""
        import pyrage

        recipients: list[Any] = [_recipient(recipient) for recipient in self.recipients]
        self.copy.write(folder)
        for path in list(folder.iterdir()):
            # `encrypt_file` holds the GIL for a whole file; Python's file objects release it for each piece
            with path.open("rb", _PIECE) as plain, path.with_name(path.name + SUFFIX).open("xb", _PIECE) as encrypted:
                pyrage.encrypt_io(plain, encrypted, recipients)
            path.unlink()


def _recipient(text: str) -> Any:
    """Parse a recipient.

    Raises:
        ValueError: its kind is unknown, or the key is invalid.
    """
    import pyrage

    if len(text) > _LONGEST:
        raise ValueError(f"a recipient must have at most {_LONGEST} characters, got {len(text)}")
    for prefix, kind in _KINDS:
        if text.startswith(prefix):
            try:
                return getattr(pyrage, kind).Recipient.from_str(text)
            except pyrage.RecipientError as error:
                raise ValueError(str(error)[-200:]) from error
    raise ValueError("unknown kind of recipient")
