"""What each member may see of other people's code, and clean environments to try it in.

What an environment may import of other people is a folder of links into the site-packages that run the tests, one for
each file or folder that a chosen distribution owns. Nothing is downloaded, and an import that nobody declared fails.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

from house import MEMBERS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


@cache
def installed() -> dict[str, Distribution]:
    """Return what runs the tests, by canonical name."""
    return {canonicalize_name(dist.metadata["Name"]): dist for dist in reversed(list(distributions()))}


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Return what the requirements bring, and what these bring in turn, by canonical name; without our own members."""
    ours = {canonicalize_name(member.name) for member in MEMBERS}
    found: dict[str, Distribution] = {}
    todo = [(text, "") for text in requirements]
    seen = set(todo)
    while todo:
        text, extra = todo.pop()
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name in ours or name not in installed():
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        found[name] = installed()[name]
        new = {(text, wanted) for wanted in ("", *requirement.extras) for text in found[name].requires or ()} - seen
        seen |= new
        todo += new
    return found


def link(dists: Iterable[Distribution], folder: Path) -> Path:
    """Fill `folder` with links to all that the distributions own in site-packages, and to nothing else."""
    for dist in dists:
        for file in dist.files or ():
            parts = PurePosixPath(file).parts
            entry = Path(*parts[: 2 if parts[0] in _shared() else 1])
            if parts[0] not in ("..", "__pycache__") and not (folder / entry).is_symlink():
                (folder / entry).parent.mkdir(parents=True, exist_ok=True)
                (folder / entry).symlink_to(Path(str(dist.locate_file(str(entry)))).resolve())
    return folder


@cache
def _shared() -> set[str]:
    """Return the folders of site-packages that several distributions own, such as `google`."""
    owners: dict[str, set[str]] = {}
    for name, dist in installed().items():
        for file in dist.files or ():
            owners.setdefault(PurePosixPath(file).parts[0], set()).add(name)
    return {entry for entry, names in owners.items() if len(names) > 1}


def run(
    command: Sequence[str | Path], folder: Path, *, check: bool = True, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, away from the checkout, on one thread, with a home and caches of its own.

    `more` are further environment variables.
    """
    ours = ("TWINKLE", "PYTHON", "VIRTUAL_ENV", "PYTEST")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    variables |= {"HOME": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    variables |= more or {}
    argv = [str(part) for part in command]
    done = subprocess.run(argv, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=300)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(argv)}\nended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


@dataclass(frozen=True)
class Environment:
    """A virtual environment without pip."""

    folder: Path

    def run(
        self, command: str, *arguments: str | Path, check: bool = True, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a script of this environment, such as `python` or `twinkle`."""
        return run([self.folder / "bin" / command, *arguments], self.folder, check=check, more=more)

    def install(self, wheels: Path, *names: str, dependencies: bool = False) -> None:
        """Install wheels out of a folder by pip, as a user would, looking nowhere else.

        With `dependencies` pip must find in that folder, or installed already, all that they declare.
        """
        pip = [sys.executable, "-m", "pip", "--python", self.folder / "bin" / "python", "--disable-pip-version-check"]
        alone = [] if dependencies else ["--no-deps"]
        run([*pip, "install", "--quiet", *alone, "--no-index", "--find-links", wheels, *names], self.folder)


View = Callable[[Iterable[str]], Path]
EnvironmentMaker = Callable[[Iterable[str]], Environment]

_IMPORT_ALL = """
import importlib, json, sys
sys.path += json.loads(sys.argv[1])
failed = {}
for name in json.loads(sys.argv[2]):
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""


def import_all(names: Iterable[str], path: Iterable[Path], scratch: Path) -> dict[str, str]:
    """Import modules in a bare interpreter that sees the standard library and `path`; return what failed, and how."""
    arguments = json.dumps([str(entry) for entry in path]), json.dumps(list(names))
    bare = getattr(sys, "_base_executable", sys.executable)
    done = run([bare, "-I", "-S", "-B", "-c", _IMPORT_ALL, *arguments], scratch)
    failed: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failed
