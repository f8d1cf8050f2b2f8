"""The data directory's secret: 32 random bytes in a file that only its owner may read."""

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

from twinkle_server.failpoints import reach
from twinkle_server.store.faults import StoreError
from twinkle_server.store.filesystem import sync_folder

_SIZE: Final = 32


def read_secret(data: Path) -> bytes:
    """Return the secret of a data directory; it is made if it is not there.

    Raises:
        StoreError: the file is not what was written.
    """
    path = data / "secret"
    if not path.exists():
        _make(path)
    secret = path.read_bytes()
    if len(secret) != _SIZE:
        raise StoreError(
            f"{path} must have {_SIZE} bytes, got {len(secret)}; restore it from a backup, or remove it, which "
            f"invalidates existing download links and unfinished futures"
        )
    path.chmod(0o600)
    return secret


def _make(path: Path) -> None:
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(_SIZE))
        file.flush()
        os.fsync(file.fileno())
    reach("secret.before_link")
    with contextlib.suppress(FileExistsError):  # another process was faster: its secret holds
        path.hardlink_to(temporary)
    temporary.unlink()
    sync_folder(path.parent)
