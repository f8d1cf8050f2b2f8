"""Ids and checkpoint paths; random ids have 128 bits and cannot be guessed."""

import re
import secrets
from dataclasses import dataclass

from twinkle_server.errors import BadRequest
from twinkle_server.telemetry.logs import holds_key

KINDS = ("weights", "sampler_weights", "external_weights")
"""Kinds of checkpoints in a `tinker://` path."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def new_id() -> str:
    """Return 128 random bits as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def model_id(session: str, number: int) -> str:
    """Return the id of a session's model; the SDK computes the same id."""
    return f"{session}:train:{number}"


def sampler_id(session: str, number: int) -> str:
    """Return the id of a session's sampling session."""
    return f"{session}:sample:{number}"


def check_name(name: str) -> str:
    """Validate the name of a checkpoint.

    Raises:
        BadRequest: it is empty, too long, has other characters than `[A-Za-z0-9._-]`, has only dots, or contains a key.
    """
    if holds_key(name):
        raise BadRequest(f"the name must not contain an API key, got {name[:140]!r}; choose another name")
    if not _NAME.fullmatch(name) or not name.strip("."):
        raise BadRequest(
            f"a checkpoint name must be 1 to 128 letters, digits, '.', '_' and '-', not only dots, got {name[:140]!r}"
        )
    return name


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """`tinker://<run>/<kind>/<name>`, or `twinkle://...`, which names the same checkpoint.

    Attributes:
        run: id of the model that was saved.
        kind: "weights" (for training), "sampler_weights" or "external_weights".
        name: of the checkpoint.
    """

    run: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def twinkle(self) -> str:
        """The path with the scheme of the native protocol."""
        return f"twinkle://{self.run}/{self.kind}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> "CheckpointPath":
        """Parse a path.

        Raises:
            BadRequest: it is invalid.
        """
        scheme, _, rest_of_path = text.partition("://")
        run, kind, name, *rest = [*rest_of_path.split("/"), "", "", ""]
        if scheme not in ("tinker", "twinkle") or any(rest) or not run or kind not in KINDS:
            raise BadRequest(f"a checkpoint path must be tinker://<run>/<{'|'.join(KINDS)}>/<name>, got {text[:300]!r}")
        return cls(run, kind, check_name(name))
