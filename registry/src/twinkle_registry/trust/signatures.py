"""Signatures of a repository, where the policy requires them: a file beside the code that signs the file listing.

- `twinkle-plugin.sig`: base64 of an ed25519 signature (package `cryptography`), for private hubs.
- `twinkle-plugin.sigstore.json`: a Sigstore bundle (package `sigstore`), by an identity that the policy names.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import NotTrusted, RequirementMissing, SettingsError
from ..naming import nearest_or_all
from .store import Tree, hash_folder, listing_text

ED25519_FILE = "twinkle-plugin.sig"
SIGSTORE_FILE = "twinkle-plugin.sigstore.json"
# Prevents other data signed with the same key from being accepted as a plugin.
_PREFIX = b"twinkle plugin, version 1\n"
_KEY_BYTES = 32
_SORTS = ("ed25519", "sigstore")
_SIGSTORE = ("identity", "issuer")


@dataclass(frozen=True)
class Signer:
    """A required signer: an ed25519 public key, or a Sigstore identity with its issuer."""

    ed25519: bytes = b""
    identity: str = ""
    issuer: str = ""

    def __str__(self) -> str:
        """Return the name used in errors."""
        return f"key {base64.b64encode(self.ed25519).decode()}" if self.ed25519 else self.identity


def signer_from_table(where: str, table: Any) -> Signer:
    """Read `{ ed25519 = "key" }` or `{ sigstore = { identity = "...", issuer = "..." } }`.

    Raises:
        SettingsError: It is neither, or the key is not 32 bytes in base64.
    """
    if not isinstance(table, Mapping) or len(table) != 1:
        raise SettingsError(f'{where} must be {{ ed25519 = "public key" }} or {{ sigstore = {{...}} }}, got {table!r}')
    ((sort, value),) = table.items()
    if sort == "ed25519":
        return Signer(ed25519=public_key(where, value))
    if sort != "sigstore":
        raise SettingsError(f"{where}: unknown key {sort!r}, {nearest_or_all(sort, _SORTS)}")
    fine = (
        isinstance(value, Mapping)
        and set(value) == set(_SIGSTORE)
        and all(isinstance(v, str) and v for v in value.values())
    )
    if not fine:
        raise SettingsError(f"{where}: sigstore must have 'identity' and 'issuer', both strings, got {value!r}")
    return Signer(identity=value["identity"], issuer=value["issuer"])


def signed_bytes(files: Mapping[str, str]) -> bytes:
    """Return the signed bytes: the listing of all files except the signatures."""
    return _PREFIX + listing_text({p: h for p, h in files.items() if p not in (ED25519_FILE, SIGSTORE_FILE)}).encode()


def sign_folder(folder: Path, private_key: bytes) -> Path:
    """Write `twinkle-plugin.sig` into a folder of code and return its path.

    Args:
        folder: The repository, as it will be uploaded.
        private_key: An ed25519 private key: 32 raw bytes, or PEM without a password.
    """
    key = read_private_key(private_key, "to sign a plugin")
    signature = key.sign(signed_bytes(hash_folder(folder, context=f"sign {folder}")))
    target = folder / ED25519_FILE
    target.write_text(base64.b64encode(signature).decode() + "\n", "ascii")
    return target


def read_private_key(private_key: bytes, purpose: str) -> Any:
    """Return an ed25519 private key.

    Args:
        private_key: 32 raw bytes, or PEM without a password.
        purpose: Purpose of the key, for the error if the package is missing.
    """
    ed25519 = ed25519_module(purpose)
    if len(private_key) == _KEY_BYTES:
        return ed25519.Ed25519PrivateKey.from_private_bytes(private_key)
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(private_key, password=None)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"the private key must be {_KEY_BYTES} bytes, or PEM without a password") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise SettingsError("the private key must be an ed25519 key")
    return key


def new_private_key(purpose: str = "to make a key") -> tuple[bytes, str]:
    """Return a new ed25519 private key as PEM, and its public key in the form that policies use."""
    key = ed25519_module(purpose).Ed25519PrivateKey.generate()
    from cryptography.hazmat.primitives import serialization as forms

    pem = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    return pem, base64.b64encode(key.public_key().public_bytes_raw()).decode()


def public_key(where: str, value: Any) -> bytes:
    """Return the 32 bytes of a public key in base64.

    Raises:
        SettingsError: It is not a public key.
    """
    try:
        key = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except binascii.Error:
        key = b""
    if len(key) != _KEY_BYTES:
        raise SettingsError(f"{where}: an ed25519 public key must be {_KEY_BYTES} bytes in base64, got {value!r}")
    return key


def check_signature(tree: Tree, signer: Signer, *, context: str) -> None:
    """Check that a tree has a valid signature of `signer`.

    Raises:
        NotTrusted: It has none, a wrong one, or one that cannot be checked.
        RequirementMissing: The package that checks it is not installed.
    """
    name = ED25519_FILE if signer.ed25519 else SIGSTORE_FILE
    if name not in tree.files:
        raise NotTrusted(
            f"{context}: the policy requires a signature by {signer}, but it has no {name}; ask its author to sign it"
        )
    (_check_ed25519 if signer.ed25519 else _check_sigstore)(tree, signer, context)


def _check_ed25519(tree: Tree, signer: Signer, context: str) -> None:
    ed25519 = ed25519_module(f"{context}: to check its signature")
    from cryptography.exceptions import InvalidSignature

    try:
        signature = base64.b64decode(tree.read(ED25519_FILE).strip(), validate=True)
        ed25519.Ed25519PublicKey.from_public_bytes(signer.ed25519).verify(signature, signed_bytes(tree.files))
    except (InvalidSignature, ValueError) as error:
        raise NotTrusted(f"{context}: {ED25519_FILE} is not a signature of these files by {signer}") from error


def _check_sigstore(tree: Tree, signer: Signer, context: str) -> None:
    try:
        from sigstore.errors import Error
        from sigstore.models import Bundle
        from sigstore.verify import Verifier, policy
    except ImportError as error:
        raise RequirementMissing(
            f"{context}: to check its Sigstore signature, run: pip install 'sigstore>=4'"
        ) from error
    try:
        bundle = Bundle.from_json(tree.read(SIGSTORE_FILE))
        # Uses the Sigstore keys in the package: no network on the load path.
        verifier = Verifier.production(offline=True)
        verifier.verify_artifact(
            signed_bytes(tree.files), bundle, policy.Identity(identity=signer.identity, issuer=signer.issuer)
        )
    except NotTrusted:
        raise
    except (Error, ValueError, KeyError, OSError) as error:
        raise NotTrusted(
            f"{context}: {SIGSTORE_FILE} is not a signature of these files by {signer}, or cannot be checked: {error}"
        ) from error


def ed25519_module(purpose: str) -> Any:
    """Return the module of `cryptography` for ed25519; if it is missing, the error begins with `purpose`."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise RequirementMissing(f"{purpose}, run: pip install 'cryptography>=42'") from error
    return ed25519
