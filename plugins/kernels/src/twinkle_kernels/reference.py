"""References to kernels of a hub: `hub("org/repo:Layer", version=1)`, checked when written, loaded when used."""

import re
from dataclasses import dataclass
from pathlib import Path

from twinkle.errors import ArgumentError, Unsupported

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]{0,199}")
_FORM = "write hub('org/repo:Layer', revision='<commit>') or hub('org/repo:Layer', version=1)"


@dataclass(frozen=True)
class HubRef:
    """A layer or function of a kernel repository; nothing is downloaded until `kernelize` uses it.

    Attributes:
        repo: `org/repo` on Hugging Face, or the path of a local folder.
        layer: name of the layer in the repository's `layers`, or of a function.
        revision: branch, tag or commit; the same for everybody only if it is a commit.
        version: the repository's version `n`, its branch `v<n>`.
        backend: which of the repository's builds, such as `cpu` or `cuda`; by default the one for this torch.
    """

    repo: str
    layer: str
    revision: str | None = None
    version: int | None = None
    backend: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine."""
        return self.repo.startswith(("/", "./", "../", "~"))

    def __str__(self) -> str:
        """Return how errors name it: `kernel 'org/repo:Layer' (version 1)`."""
        pin = f"version {self.version}" if self.version is not None else f"revision {self.revision}"
        return f"kernel '{self.repo}:{self.layer}'" + ("" if self.is_local else f" ({pin})")


def hub(ref: str, *, revision: str | None = None, version: int | None = None, backend: str | None = None) -> HubRef:
    """Refer to a layer or function of a kernel repository, as a value of a mapping for `kernelize`.

    Args:
        ref: `org/repo:Layer` on Hugging Face, or `./folder:Layer` for a repository on this machine.
        revision: branch, tag or commit.
        version: version of the repository. Exactly one of `revision` and `version`; a folder has neither.
        backend: which of its builds; by default the one for this torch.

    Raises:
        ArgumentError: a malformed reference, or not exactly one of `revision` and `version`.
        Unsupported: a hub that has no kernel repositories.
    """
    if not isinstance(ref, str) or not (repo := ref.removeprefix("hf://").rpartition(":")[0]):
        raise ArgumentError(f"hub({ref!r}): there is no repository and layer in it; {_FORM}")
    layer = ref.rpartition(":")[2]
    if not all(part.isidentifier() for part in layer.split(".")):
        raise ArgumentError(f"hub({ref!r}): {layer!r} is not the name of a layer; {_FORM}")
    if backend is not None and not (isinstance(backend, str) and backend):
        raise ArgumentError(f"hub({ref!r}): backend={backend!r}; give a name such as 'cpu' or 'cuda'")
    found = HubRef(repo, layer, revision, version, backend)
    if found.is_local:
        if revision is not None or version is not None:
            raise ArgumentError(f"hub({ref!r}): a folder has neither revision nor version; leave them out")
        return found
    _check_repo(ref, repo)
    _check_pin(ref, revision, version)
    return found


def local_folder(ref: HubRef) -> Path:
    """Return the folder of a local reference.

    Raises:
        ArgumentError: the folder does not exist.
    """
    folder = Path(ref.repo).expanduser().resolve()
    if not folder.is_dir():
        raise ArgumentError(f"{ref}: there is no folder {folder}")
    return folder


def _check_repo(ref: str, repo: str) -> None:
    scheme, separator, _ = repo.partition("://")
    if separator:
        raise Unsupported(f"hub({ref!r}): kernel repositories are on Hugging Face, not on {scheme}://; {_FORM}")
    if not _REPO.fullmatch(repo) or ".." in repo:
        raise ArgumentError(f"hub({ref!r}): {repo!r} is not a repository; {_FORM}; a folder starts with './' or '/'")


def _check_pin(ref: str, revision: str | None, version: int | None) -> None:
    if (revision is None) == (version is None):
        what = "neither revision nor version is given" if revision is None else "both revision and version are given"
        raise ArgumentError(f"hub({ref!r}): {what}; give one of them, so that a run knows what code it uses; {_FORM}")
    if revision is not None and not (
        isinstance(revision, str) and _REVISION.fullmatch(revision) and ".." not in revision
    ):
        raise ArgumentError(f"hub({ref!r}): revision={revision!r} is not a branch, tag or commit")
    if version is not None and (not isinstance(version, int) or isinstance(version, bool) or version < 0):
        raise ArgumentError(f"hub({ref!r}): version={version!r}; give a whole number, or a name as revision=")
