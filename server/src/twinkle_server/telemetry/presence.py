"""Where the running server of a data directory is: a small file in it, for commands on the same machine."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from twinkle_server.engine.files import TEMPORARY
from twinkle_server.ids import new_id

FILE = "server.json"
FOLDER_TOKEN = "X-Twinkle-Folder"
"""Header with the token of the file, which only a process that can read the data directory knows."""


@dataclass(frozen=True, slots=True)
class Presence:
    """A server that runs, or was killed.

    Attributes:
        pid: of its API process.
        url: as this machine reaches it.
        name: what clients call the model.
        started: UTC seconds.
        token: that shows the server that this file could be read; see `health.Access`.
    """

    pid: int
    url: str
    name: str
    started: float
    token: str = ""


def announce(data: Path, presence: Presence) -> None:
    """Write the file, whole or not at all."""
    work = data / f"{TEMPORARY}{new_id()}"
    work.touch(mode=0o600, exist_ok=False)  # before the token is in it
    work.write_bytes(orjson.dumps(asdict(presence)))
    work.replace(data / FILE)


def withdraw(data: Path) -> None:
    """Remove the file."""
    (data / FILE).unlink(missing_ok=True)


def find(data: Path) -> Presence | None:
    """Return the server that runs on a data directory; None if there is none."""
    try:
        found = Presence(**orjson.loads((data / FILE).read_bytes()))
        os.kill(found.pid, 0)
    except (FileNotFoundError, ValueError, TypeError, ProcessLookupError):
        return None
    except PermissionError:  # it runs, as another user
        pass
    return found
