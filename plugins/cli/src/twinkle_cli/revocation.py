"""`twinkle plugins keygen|revoke|revoked`: signed lists of code that must no longer run."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twinkle_cli.text import echo_json

if TYPE_CHECKING:
    from twinkle_registry.trust.revocation import KnownList, RevocationList, Revoked

_DAY = 86_400
_json = click.option("--json", "as_json", is_flag=True, help="Write JSON.")
_file = click.Path(dir_okay=False, path_type=Path)


@click.command(short_help="Create an ed25519 key for signing plugins and revocation lists.")
@click.argument("file", type=_file)
def keygen(file: Path) -> None:
    """Write a new private key to FILE, which must not exist yet, and its public key to standard output.

    The private key is PEM without a password, readable only by you; policies contain the public key.
    """
    import os

    from twinkle.errors import OutputError
    from twinkle_registry.trust.signatures import new_private_key

    private, public = new_private_key()
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror}; choose a file that does not exist yet") from error
    with os.fdopen(handle, "wb") as stream:
        stream.write(private)
    click.echo(public)


@click.command(short_help="Add code to a signed revocation list.")
@click.argument("file", type=_file)
@click.argument("code", nargs=-1, metavar="[CODE]...")
@click.option("--key", type=_file, required=True, help="The private key that signs the list.")
@click.option("--reason", default="", help="Reason for revoking CODE; shown to users and tenants.")
@click.option("--restore", multiple=True, metavar="CODE", help="Remove CODE from the list; may be repeated.")
@click.option(
    "--days", type=click.IntRange(1, 3650), default=30, show_default=True, help="Days until the list expires."
)
@_json
def revoke(
    file: Path, code: tuple[str, ...], key: Path, reason: str, restore: tuple[str, ...], days: int, as_json: bool
) -> None:
    """Write the next list to FILE: its present content and CODE; without CODE, sign it again with new dates.

    CODE is `hf://org/repo@commit`, a pattern such as `hf://org/*`, or `sha256:DIGEST` with the digest of an entry in
    twinkle.lock. If twinkle.lock lists a commit, the digest of its files is revoked as well, so that a copy in
    another repository does not run either. Publish FILE at the location that the policies of your users name.
    """
    from twinkle.errors import ArgumentError
    from twinkle.paths import write_text
    from twinkle_registry.trust.revocation import RevocationList, check_entry, sign
    from twinkle_registry.trust.signatures import read_private_key

    if code and not reason.strip():
        raise ArgumentError("--reason must state why the code is revoked, got an empty string")
    private = _read(key)
    public = read_private_key(private, "to sign a revocation list").public_key().public_bytes_raw()
    old = _old(file, public)
    new = [entry for text in code for entry in _entries(text, reason.strip())]
    for entry in new:
        check_entry(entry)
    remaining = [entry for entry in old.revoked if entry not in new and not _is_named(entry, restore)]
    if absent := [text for text in restore if not any(_is_named(entry, (text,)) for entry in old.revoked)]:
        raise ArgumentError(f"{file} does not revoke {', '.join(absent)}")
    now = int(time.time())
    renewed = RevocationList(old.sequence + 1, now, now + days * _DAY, (*remaining, *new))
    write_text(file, sign(renewed, private).decode())
    if as_json:
        echo_json(_plain(renewed))
    else:
        until = time.strftime("%Y-%m-%d", time.gmtime(renewed.expires))
        click.echo(f"{file}: list number {renewed.sequence}, {len(renewed.revoked)} revoked, expires {until}")


@click.command(short_help="Show the revocation lists that your policy names.")
@_json
@click.pass_context
def revoked(ctx: click.Context, as_json: bool) -> None:
    """Read every list that `[[trust.revoked]]` names, and show what is revoked; exit code 1 if a list has a problem."""
    from twinkle_registry.trust.policy import Policy

    sources = [known.source for known in Policy.load().revoked]
    from twinkle_registry.trust.revocation import known_list

    lists = [known_list(source, fetch=True, max_age=0.0) for source in sources]
    if as_json:
        echo_json([_plain_known(known) for known in lists])
    else:
        click.echo("\n".join(line for known in lists for line in _lines(known)) or "your policy names no list")
    ctx.exit(1 if any(known.error or known.problem for known in lists) else 0)


COMMANDS = (keygen, revoke, revoked)


def _read(file: Path) -> bytes:
    from twinkle.errors import ArgumentError

    try:
        return file.read_bytes()
    except OSError as error:
        raise ArgumentError(f"cannot read {file}: {error.strerror}") from error


def _old(file: Path, public: bytes) -> "RevocationList":
    """Return the present list, which must be signed by the same key; an empty one if the file does not exist."""
    from twinkle_registry.trust.revocation import RevocationList, read_list

    return read_list(_read(file), [public], where=str(file)) if file.exists() else RevocationList(0, 0, 0)


def _entries(text: str, reason: str) -> "list[Revoked]":
    from twinkle_registry.trust.lock import Lock
    from twinkle_registry.trust.revocation import Revoked

    if text.startswith("sha256:"):
        return [Revoked(sha256=text.removeprefix("sha256:").lower(), reason=reason)]
    locked = [entry for entry in Lock.load().hub if str(entry.origin) == text]
    return [Revoked(text, entry.digest, reason) for entry in locked] or [Revoked(text, "", reason)]


def _is_named(entry: "Revoked", texts: tuple[str, ...]) -> bool:
    return bool({entry.code, f"sha256:{entry.sha256}"} & {*texts})


def _plain(revocations: "RevocationList") -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(revocations)


def _plain_known(known: "KnownList") -> dict[str, Any]:
    plain = {"list": known.source.location, "problem": known.error or known.problem}
    return plain | (_plain(known.revocations) if known.revocations else {})


def _lines(known: "KnownList") -> list[str]:
    from twinkle_registry.trust.review import printable

    head = known.source.location
    if known.revocations is not None:
        dates = [
            time.strftime("%Y-%m-%d", time.gmtime(at)) for at in (known.revocations.issued, known.revocations.expires)
        ]
        head += f": list number {known.revocations.sequence}, issued {dates[0]}, expires {dates[1]}"
    lines = [head]
    lines += [f"  problem: {text}" for text in (known.error, known.problem) if text]
    for entry in known.revocations.revoked if known.revocations else ():
        lines.append(f"  {printable(entry.code or f'sha256:{entry.sha256}')}: {printable(entry.reason)}")
    return lines
