"""Creates a project from the scaffold with copier; the new folder appears complete or not at all."""

import datetime
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from twinkle.errors import ArgumentError, OutputError
from twinkle_scaffolds.naming import check_kind, check_name

SCAFFOLD = Path(__file__).parent / "scaffold"


@cache
def scaffolds() -> tuple[str, ...]:
    """Return the names of the scaffolds: kinds, and the layout `hub-repo`."""
    lines = (SCAFFOLD / "kinds.yml").read_text("utf-8").splitlines()
    return tuple(line.removeprefix("- ") for line in lines if line.startswith("- "))


def bake(kind: str, name: str, parent: str | Path = ".", *, author: str | None = None) -> Path:
    """Write the project of a new plugin.

    Args:
        kind: one of `scaffolds()`.
        name: name of the distribution and the new folder, such as "acme-focal"; the package is `acme_focal`.
        parent: the folder in which to create it.
        author: the author in the licence; by default git's `user.name`.

    Returns:
        The new folder.

    Raises:
        ArgumentError: the kind is unknown or the name is not valid.
        OutputError: the folder exists and is not empty, or cannot be written.
    """
    kind, name = check_kind(kind, scaffolds()), check_name(name)
    answers: dict[str, Any] = {"kind": kind, "name": name, "year": datetime.date.today().year}
    answers["author"] = _line(author or git_author() or f"The authors of {name}")
    target = Path(parent) / name
    _check_free(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch:
            project = Path(scratch) / name
            _run_copier(project, answers)
            project.replace(target)  # also over an empty folder
    except OSError as error:
        raise OutputError(f"cannot make {target}: {error.strerror or error}") from error
    return target


def ask(kind: str | None, name: str | None) -> tuple[str, str]:
    """Ask for missing values on the terminal, with copier's questions; returns kind and name.

    Raises:
        KeyboardInterrupt: the user cancelled.
    """
    from copier import CopierAnswersInterrupt, run_copy

    given = {key: value for key, value in (("kind", kind), ("name", name)) if value is not None}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            answered = run_copy(str(SCAFFOLD), scratch, data=given, pretend=True, quiet=True).answers.combined
        except CopierAnswersInterrupt as error:
            raise KeyboardInterrupt from error
    return str(answered["kind"]), str(answered["name"])


def git_author() -> str:
    """Return git's `user.name`; empty without git or without a name."""
    try:
        done = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _line(author: str) -> str:
    text = " ".join(author.split())
    if not text.isprintable() or not text:
        raise ArgumentError(f"author {author!r}: use the printable name of a person or company")
    return text


def _check_free(target: Path) -> None:
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise OutputError(f"{target} exists already; choose another name, another folder (--into DIR), or remove it")


def _run_copier(target: Path, answers: dict[str, Any]) -> None:
    from copier import run_copy

    run_copy(str(SCAFFOLD), target, data=answers, defaults=True, quiet=True, skip_tasks=True)


def interactive() -> bool:
    """Return whether the command runs in a terminal and can ask questions."""
    return sys.stdin.isatty() and sys.stdout.isatty()
