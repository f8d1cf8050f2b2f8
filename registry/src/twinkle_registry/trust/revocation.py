"""Revocation lists: code that must no longer run, with reasons, signed by a key that the policy names.

The file is a DSSE envelope (https://github.com/secure-systems-lab/dsse) around JSON:

{"schema": 1, "sequence": 7, "issued": 1795392000, "expires": 1797984000,
 "revoked": [{"code": "hf://acme/focal@3f2a*", "sha256": "", "reason": "reads ~/.ssh"}]}

Times are seconds since 1970, UTC. `code` is a pattern as in `[trust] deny`; `sha256` is the digest of a tree, as
`twinkle.lock` has it, and revokes these files in any repository.

`[[trust.revoked]]` has `list` (a path, or an address with file://, https:// or http://), `ed25519` (a public key or
several) and `stale` ("warn", or "refuse" to run code from a hub without a valid list). The last valid list is kept in
the state folder, so that revoked code does not run again without a network or with an older list.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import NotTrusted, SettingsError
from ..naming import nearest_or_all, safe_repr
from ..regular import open_regular
from .folders import state_folder
from .reference import Origin, check_pattern, matches
from .signatures import ed25519_module, public_key, read_private_key
from .store import sha256

SCHEMA = 1
PAYLOAD_TYPE = "application/vnd.twinkle.revocations+json"
MAX_BYTES = 4 * 2**20
_DIGEST = re.compile(r"[0-9a-f]{64}")
REFRESH = 60.0
"""Seconds after which a list from the network is read again when code is loaded."""
_TIMEOUT = 10.0  # seconds
_SOURCE_KEYS = ("list", "ed25519", "stale")
_STALE = ("warn", "refuse")
_SCHEMES = ("file", "http", "https")


@dataclass(frozen=True, slots=True)
class Revoked:
    """One entry: a pattern of code, the digest of a tree, or both, and why it must not run."""

    code: str = ""
    sha256: str = ""
    reason: str = ""

    def means(self, place: str, commit: str, digest: str) -> bool:
        """Return whether this entry matches the code, ignoring case."""
        if self.sha256 and digest and self.sha256.startswith(digest):
            return True
        return bool(self.code) and matches(self.code.casefold(), place.casefold(), commit.casefold())


@dataclass(frozen=True, slots=True)
class RevocationList:
    """The content of one signed list.

    Attributes:
        sequence: Increases with each list; an older list never replaces a newer one.
        issued: When it was signed, in seconds since 1970.
        expires: When a new list is due, in seconds since 1970.
        revoked: The entries.
    """

    sequence: int
    issued: int
    expires: int
    revoked: tuple[Revoked, ...] = ()

    def why(self, origin: Origin, digest: str) -> str:
        """Return the reason why code is revoked, or an empty string."""
        reasons = (entry.reason for entry in self.revoked if entry.means(origin.place, origin.commit, digest))
        return next(reasons, "")


def sign(revocations: RevocationList, private_key: bytes) -> bytes:
    """Return the signed file.

    Args:
        revocations: Content of the list.
        private_key: An ed25519 private key: 32 raw bytes, or PEM without a password.
    """
    key = read_private_key(private_key, "to sign a revocation list")
    payload = json.dumps({"schema": SCHEMA, **asdict(revocations)}, ensure_ascii=True).encode()
    public = key.public_key().public_bytes_raw()
    signature = {"keyid": _base64(public), "sig": _base64(key.sign(_signed_bytes(payload)))}
    envelope = {"payloadType": PAYLOAD_TYPE, "payload": _base64(payload), "signatures": [signature]}
    return json.dumps(envelope, indent=1).encode() + b"\n"


def read_list(content: bytes, keys: Iterable[bytes], *, where: str) -> RevocationList:
    """Return the content of a file, if one of the keys signed it.

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
            raise ValueError(f"its payloadType is {safe_repr(str(envelope['payloadType']))}")
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise NotTrusted(f"{where} is not a signed revocation list ({type(error).__name__}: {error})") from error
    if not any(_verifies(key, signature, payload) for key in keys for signature in signatures[:16]):
        raise NotTrusted(f"{where} has no valid signature by a key that the policy names, so it is ignored")
    try:
        return _parsed(json.loads(payload))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotTrusted(f"{where} is signed, but cannot be read: {error}") from error


def _parsed(fields: Mapping[str, Any]) -> RevocationList:
    if fields["schema"] != SCHEMA:
        raise ValueError(f"schema is {fields['schema']!r}, and this version reads {SCHEMA}")
    numbers = [fields[name] for name in ("sequence", "issued", "expires")]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"sequence, issued and expires must be whole numbers, got {numbers!r}")
    entries = []
    for entry in fields["revoked"]:
        revoked = Revoked(**entry)
        if not all(isinstance(value, str) for value in asdict(revoked).values()) or not (
            revoked.code or revoked.sha256
        ):
            raise ValueError(f"an entry must have strings and a code or a sha256, got {entry!r}")
        check_entry(revoked)
        entries.append(revoked)
    return RevocationList(fields["sequence"], fields["issued"], fields["expires"], tuple(entries))


def check_entry(entry: Revoked) -> None:
    """Raise `SettingsError` if an entry cannot match any code."""
    if entry.code:
        check_pattern("revoked", entry.code)
    if entry.sha256 and not _DIGEST.fullmatch(entry.sha256):
        raise SettingsError(f"revoked: sha256 must be 64 hexadecimal digits, got {safe_repr(entry.sha256)}")
    if not entry.reason.strip():
        raise SettingsError(f"revoked: {entry.code or entry.sha256} must have a reason, which users will read")


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


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


@dataclass(frozen=True, slots=True)
class Source:
    """One `[[trust.revoked]]`: the location of the list, its keys, and whether code runs without a valid list.

    `is_read` is False if the settings that name it are not trusted: it is not requested then, and the last valid list
    stays in effect, so that an edit of the settings does not lift revocations.
    """

    location: str
    keys: tuple[bytes, ...]
    refuses_stale: bool = False
    is_read: bool = True

    @property
    def path(self) -> Path | None:
        """The path, if the list is a local file."""
        if self.location.startswith("file://"):
            return Path(urllib.request.url2pathname(urllib.parse.urlsplit(self.location).path))
        return None if "://" in self.location else Path(self.location)


@dataclass(frozen=True, slots=True)
class KnownList:
    """The state of one list.

    Attributes:
        source: Its location and keys.
        revocations: The last valid list; None if there has been none.
        checked: When it was last read, in seconds since 1970.
        problem: It cannot be reached, is older than the recorded one, or has expired; the last valid one is used.
        error: The list that was read has no valid signature, or contradicts the last valid one.
    """

    source: Source
    revocations: RevocationList | None = None
    checked: float = 0.0
    problem: str = ""
    error: str = ""


def sources_from_table(where: str, tables: Any, folder: str) -> tuple[Source, ...]:
    """Read `[[trust.revoked]]`; a relative path is below `folder`, that of the settings file.

    Raises:
        SettingsError: A key, a type or a value is wrong.
    """
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise SettingsError(f"{where} must be a list of tables, got {tables!r}")
    return tuple(_source(where, table, folder) for table in tables)


def _source(where: str, table: Mapping[str, Any], folder: str) -> Source:
    for key in table:
        if key not in _SOURCE_KEYS:
            raise SettingsError(f"{where} {key}: unknown key, {nearest_or_all(key, _SOURCE_KEYS)}")
    location, keys, stale = table.get("list"), table.get("ed25519"), table.get("stale", "warn")
    if not isinstance(location, str) or not location:
        raise SettingsError(f"{where}: list must be a path or an address of a signed list, got {location!r}")
    scheme, colon, _ = location.partition("://")
    if colon and scheme not in _SCHEMES:
        raise SettingsError(
            f"{where}: list must be a path, or begin with file://, https:// or http://, got {location!r}"
        )
    if stale not in _STALE:
        raise SettingsError(f"{where}: stale must be 'warn' or 'refuse', got {stale!r}")
    given = keys if isinstance(keys, list) and keys else [keys]
    if not colon:
        location = str(Path(folder, Path(location).expanduser()))
    return Source(location, tuple(public_key(f"{where}: ed25519", key) for key in given), stale == "refuse")


def known_list(source: Source, *, fetch: bool, max_age: float = REFRESH) -> KnownList:
    """Return the state of a list; a local file is always read.

    Args:
        source: The location of the list and its keys.
        fetch: Read it from the network if that was not done within `max_age` seconds.
        max_age: See `fetch`.
    """
    kept = _recorded(source)
    if not source.is_read:
        why = f"{source.location} is not read, because the settings that name it are not trusted any more"
        kept = replace(kept, problem=f"{why}{_in_effect(kept.revocations)}", error="")
    elif source.path is not None or (fetch and not 0 <= time.time() - kept.checked < max_age):
        kept = _refreshed(kept)
    expired = kept.revocations is not None and kept.revocations.expires < time.time()
    if expired and kept.revocations is not None:
        late = f"{source.location} has expired on {_day(kept.revocations.expires)}; ask its publisher for a new one"
        return replace(kept, problem="; ".join(filter(None, (kept.problem, late))))
    if kept.revocations is None and not kept.problem:
        return replace(kept, problem=f"{source.location} was never read")
    return kept


def _refreshed(kept: KnownList) -> KnownList:
    """Read the list from its location and record the outcome."""
    source, old = kept.source, kept.revocations
    now = replace(kept, checked=time.time(), problem="", error="")
    content = None
    try:
        content = _read_source(source)
        new = read_list(content, source.keys, where=source.location)
    except NotTrusted as error:
        now, content = replace(now, error=str(error)), None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        text = safe_repr(str(reason)) if isinstance(error, http.client.HTTPException) else reason
        now, content = replace(now, problem=f"{source.location} cannot be read: {text}{_in_effect(old)}"), None
    else:
        if old is not None and new.sequence < old.sequence:
            what = f"{source.location} has list number {new.sequence}, which is older than number {old.sequence}"
            now, content = replace(now, problem=f"{what}; the newer one stays in effect"), None
        elif old is not None and new.sequence == old.sequence and new != old:
            what = f"{source.location} has a different list number {new.sequence} than the recorded one"
            now, content = replace(now, error=f"{what}; its publisher must sign one with a higher number"), None
        else:
            now = replace(now, revocations=new)
    return _record(now, content)


def _read_source(source: Source) -> bytes:
    if (path := source.path) is not None:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
    else:
        request = urllib.request.Request(source.location, headers={"User-Agent": "twinkle-registry"})
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            if urllib.parse.urlsplit(answer.url).scheme not in _SCHEMES[1:]:
                raise ValueError(f"it redirects to {answer.url}")
            content = answer.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES // 2**20} MiB")
    return bytes(content)


def _file(source: Source) -> Path:
    return Path(state_folder(), "revocations", f"{sha256(source.location.encode())[:32]}.json")


def _recorded(source: Source) -> KnownList:
    """Return the recorded state; a list that was signed by none of the current keys is ignored."""
    try:
        fields = json.loads(_file(source).read_bytes())
        kept = KnownList(source, None, float(fields["checked"]), str(fields["problem"]), str(fields["error"]))
        envelope = str(fields["envelope"]).encode()
    except (OSError, ValueError, KeyError, TypeError):
        return KnownList(source)
    with contextlib.suppress(NotTrusted):
        return replace(kept, revocations=read_list(envelope, source.keys, where=source.location) if envelope else None)
    return KnownList(source)


def _record(now: KnownList, content: bytes | None) -> KnownList:
    """Record the outcome; without new `content` the recorded list is kept."""
    file = _file(now.source)
    try:
        if content is None:
            with contextlib.suppress(OSError, ValueError, KeyError):
                content = str(json.loads(file.read_bytes())["envelope"]).encode()
        fields = {"location": now.source.location, "checked": now.checked, "problem": now.problem, "error": now.error}
        text = json.dumps(fields | {"envelope": (content or b"").decode()})
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        work = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
        work.write_text(text, "utf-8")
        work.replace(file)
    except OSError as error:
        lost = f"{file} cannot be written ({error.strerror}), so an older list would not be detected"
        return replace(now, problem="; ".join(filter(None, (now.problem, lost))))
    return now


def _in_effect(old: RevocationList | None) -> str:
    return f"; the list number {old.sequence} of {_day(old.issued)} stays in effect" if old else ""


def _day(seconds: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return str(seconds)
