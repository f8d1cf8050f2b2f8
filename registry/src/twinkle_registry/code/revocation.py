"""A revocation list: code that must not run any more, with the reasons, signed by somebody whom the policy names.

The file is a DSSE envelope (https://github.com/secure-systems-lab/dsse) around JSON:

{"schema": 1, "sequence": 7, "issued": 1795392000, "expires": 1797984000,
 "revoked": [{"code": "hf://acme/focal@3f2a*", "sha256": "", "reason": "reads ~/.ssh"}]}

Times are seconds since 1970, UTC. `code` is a pattern as in `[trust] deny`; `sha256` is the digest of a tree, as
`twinkle.lock` has it, and revokes the same files wherever they come from.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import NotTrusted, SettingsError
from .listing import shown
from .matching import check_pattern, matches
from .reference import Origin
from .signatures import ed25519_module, read_private_key

SCHEMA = 1
PAYLOAD_TYPE = "application/vnd.twinkle.revocations+json"
MAX_BYTES = 4 * 2**20
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Revoked:
    """One entry: a pattern of code, the digest of a tree, or both, and why it must not run."""

    code: str = ""
    sha256: str = ""
    reason: str = ""

    def means(self, place: str, commit: str, digest: str) -> bool:
        """Say whether this is the code; upper and lower case are the same here."""
        if self.sha256 and digest and self.sha256.startswith(digest):
            return True
        return bool(self.code) and matches(self.code.casefold(), place.casefold(), commit.casefold())


@dataclass(frozen=True, slots=True)
class RevocationList:
    """What one signed file says.

    Attributes:
        sequence: Grows with each list; an older one never takes the place of a newer one.
        issued: When it was signed, in seconds since 1970.
        expires: When it must have been replaced, in seconds since 1970.
        revoked: The entries.
    """

    sequence: int
    issued: int
    expires: int
    revoked: tuple[Revoked, ...] = ()

    def why(self, origin: Origin, digest: str) -> str:
        """Return the reason why code is revoked, or an empty text."""
        found = [entry for entry in self.revoked if entry.means(origin.place, origin.commit, digest)]
        return found[0].reason if found else ""


def sign(revocations: RevocationList, private_key: bytes) -> bytes:
    """Return the signed file.

    Args:
        revocations: What it says.
        private_key: An ed25519 private key: 32 raw bytes, or PEM without a password.
    """
    key = read_private_key(private_key, "to sign a revocation list")
    payload = json.dumps({"schema": SCHEMA, **asdict(revocations)}, ensure_ascii=True).encode()
    public = key.public_key().public_bytes_raw()
    signature = {"keyid": _text(public), "sig": _text(key.sign(_signed_bytes(payload)))}
    envelope = {"payloadType": PAYLOAD_TYPE, "payload": _text(payload), "signatures": [signature]}
    return json.dumps(envelope, indent=1).encode() + b"\n"


def read_list(content: bytes, keys: Iterable[bytes], *, where: str) -> RevocationList:
    """Return what a file says, if one of the keys signed it.

    Args:
        content: The file.
        keys: ed25519 public keys, 32 bytes each.
        where: How errors name the file.

    Raises:
        NotTrusted: It is not a list, or none of the keys signed it.
        RequirementMissing: The package that checks signatures is not installed.
    """
    try:
        envelope = json.loads(content)
        payload = base64.b64decode(envelope["payload"], validate=True)
        signatures = [base64.b64decode(each["sig"], validate=True) for each in envelope["signatures"]]
        if envelope["payloadType"] != PAYLOAD_TYPE:
            raise ValueError(f"its payloadType is {shown(str(envelope['payloadType']))}")
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise NotTrusted(f"{where} is not a signed revocation list ({type(error).__name__}: {error})") from error
    if not any(_verifies(key, signature, payload) for key in keys for signature in signatures[:16]):
        raise NotTrusted(f"{where} has no valid signature by a key that the policy names, so it is not obeyed")
    try:
        return _parsed(json.loads(payload))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotTrusted(f"{where} is signed, and cannot be read: {error}") from error


def _parsed(said: Mapping[str, Any]) -> RevocationList:
    if said["schema"] != SCHEMA:
        raise ValueError(f"schema is {said['schema']!r}, and this version reads {SCHEMA}")
    numbers = [said[name] for name in ("sequence", "issued", "expires")]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"sequence, issued and expires must be whole numbers, got {numbers!r}")
    entries = []
    for entry in said["revoked"]:
        made = Revoked(**entry)
        if not all(isinstance(value, str) for value in asdict(made).values()) or not (made.code or made.sha256):
            raise ValueError(f"an entry must have texts and a code or a sha256, got {entry!r}")
        check_entry(made)
        entries.append(made)
    return RevocationList(said["sequence"], said["issued"], said["expires"], tuple(entries))


def check_entry(entry: Revoked) -> None:
    """Raise `SettingsError` if an entry could mean no code."""
    if entry.code:
        check_pattern("revoked", entry.code)
    if entry.sha256 and not _HEX.fullmatch(entry.sha256):
        raise SettingsError(f"revoked: sha256 must be 64 hexadecimal digits, got {shown(entry.sha256)}")
    if not entry.reason.strip():
        raise SettingsError(f"revoked: {entry.code or entry.sha256} needs a reason, which users will read")


def _signed_bytes(payload: bytes) -> bytes:
    """Return the pre-authentication encoding of DSSE."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def _verifies(key: bytes, signature: bytes, payload: bytes) -> bool:
    ed25519 = ed25519_module("to check a revocation list")
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(key).verify(signature, _signed_bytes(payload))
    except (InvalidSignature, ValueError):
        return False
    return True


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
