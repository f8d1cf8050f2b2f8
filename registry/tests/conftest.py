"""A site folder of its own for every test: distributions with real metadata, and a small house to plug them into."""

import hashlib
import importlib
import os
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import twinkle_registry
from twinkle_registry import Registry, Settings, discovery
from twinkle_registry.discovery import locked_plugins
from twinkle_registry.resolving import open_hub
from twinkle_registry.trust.editor import LockEditor
from twinkle_registry.trust.review import Proposal

HOOKSPECS = """
from twinkle_registry import hookspec

@hookspec
def twinkle_loss(): "Losses."
@hookspec
def twinkle_metric(): "Metrics."
@hookspec
def twinkle_optimizer(): "Optimizers."
@hookspec
def twinkle_hub(): "Hubs."
@hookspec
def twinkle_step_end(metrics): "After a step."
@hookspec
def twinkle_run_end(run): "After a run."
"""
CONTRACTS = """
from abc import ABC, abstractmethod
from typing import Protocol

class Loss(ABC):
    @abstractmethod
    def __call__(self, inputs): ...

class Metric(Protocol):
    name: str
    def accumulate(self, value): ...
    def calculate(self): ...

class Hub(Protocol):
    def commit_of(self, repo, revision): ...
    def download_code(self, repo, commit, target): ...
"""
KINDS = {
    "loss": "house_contracts:Loss",
    "metric": "house_contracts:Metric",
    "optimizer": None,
    "hub": "house_contracts:Hub",
}
LONG_AGO = 1_000_000_000


class Site:
    """One folder on sys.path."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        folder.mkdir()

    def write(self, path: str, text: str = "") -> Path:
        file = self.folder / path
        self._forget(path.partition("/")[0].removesuffix(".py"))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text), "utf-8")
        importlib.invalidate_caches()
        return file

    def _forget(self, package: str) -> None:
        """A package of this name may be installed on this machine, and imported already."""
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            if str(self.folder) not in str(getattr(sys.modules[name], "__file__", "")):
                self._monkeypatch.delitem(sys.modules, name)

    def metadata(self, dist: str, version: str = "1.0", entry: str = "") -> None:
        stem = f"{dist.replace('-', '_')}-{version}.dist-info"
        self.write(f"{stem}/METADATA", f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n\nSome text.\n")
        if entry:
            self.write(f"{stem}/entry_points.txt", f"[console_scripts]\nx = y:z\n\n[twinkle]\nplugin = {entry}\n")

    def plugin(
        self, dist: str, body: str = "", *, core: str = ">=0.1,<1", version: str = "1.0", **modules: str
    ) -> Path:
        """Install a distribution with one package, its modules and a manifest; return the manifest."""
        package = dist.replace("-", "_")
        self.metadata(dist, version, package)
        self.write(f"{package}/__init__.py")
        for name, text in modules.items():
            self.write(f"{package}/{name}.py", text)
        head = f'schema = 1\ncore = "{core}"\nname = "{dist}"\n'
        return self.write(f"{package}/twinkle-plugin.toml", head + textwrap.dedent(body))

    def settle(self) -> None:
        """Let everything look old, as files of a real installation are."""
        for path in [*self.folder.rglob("*"), self.folder]:
            os.utime(path, (LONG_AGO, LONG_AGO))


def component(name: str, ref: str, kind: str = "loss", **more: str) -> str:
    """Return one [[component]] table; `more` holds TOML values."""
    lines = [f'kind = "{kind}"', f'name = "{name}"', f'ref = "{ref}"', *(f"{k} = {v}" for k, v in more.items())]
    return "\n".join(["", "[[component]]", *lines, ""])


LOSS = """
from house_contracts import Loss

class PlainLoss(Loss):
    def __init__(self, epsilon: float = 0.2, *, beta: float = 0.0):
        self.epsilon, self.beta = epsilon, beta

    def __call__(self, inputs):
        return "{}"
"""


class TinyHub:
    """Repositories in memory: commits that stay, branches and names that move, and faults on request."""

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self.branches: dict[tuple[str, str], str] = {}
        self.moved: dict[str, str] = {}
        self.offline = False
        self.spoil: Callable[[Path], None] | None = None
        self.asked: list[str] = []

    def push(self, repo: str, files: dict[str, str | bytes], branch: str = "main") -> str:
        """Commit the whole content of a repository and return the commit."""
        content = {p: textwrap.dedent(t).encode() if isinstance(t, str) else t for p, t in files.items()}
        commit = hashlib.sha1(repr((repo, branch, len(self.commits), sorted(content.items()))).encode()).hexdigest()
        self.commits[repo, commit] = content
        self.branches[repo, branch] = commit
        return commit

    def commit_of(self, repo: str, revision: str | None = None) -> tuple[str, str]:
        self.asked.append(f"commit_of {repo}")
        if self.offline:
            raise ConnectionError("there is no network")
        repo = self.moved.get(repo, repo)
        return repo, self.branches.get((repo, revision or "main"), revision or "")

    def download_code(self, repo: str, commit: str, target: Path) -> None:
        self.asked.append(f"download_code {repo}")
        if self.offline:
            raise ConnectionError("there is no network")
        for path, content in self.commits[repo, commit].items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(content)
        if self.spoil is not None:
            self.spoil(target)


@pytest.fixture
def hub(site: Site, monkeypatch: pytest.MonkeyPatch) -> TinyHub:
    """A hub behind hf:// and ms://, offered by an installed plugin."""
    made = TinyHub()
    module = types.ModuleType("house_hub")
    module.hub = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "house_hub", module)
    site.plugin("tiny-hub", "".join(component(name, "house_hub:hub", kind="hub") for name in ("hf", "ms")))
    return made


@pytest.fixture
def add() -> Callable[..., Proposal | None]:
    """Return a function that trusts a reference, as somebody would who says yes to everything."""

    def trust(registry: Registry, asked: str, decide: Callable[[Proposal], bool] = lambda _: True) -> Proposal | None:
        return LockEditor(registry, lambda scheme: open_hub(scheme, registry, context=asked), decide).add(asked)

    return trust


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No settings, home, cache or module of this machine or of another test is seen."""
    for name in [name for name in os.environ if name.startswith("TWINKLE_")]:
        monkeypatch.delenv(name)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TWINKLE_TRUST_FOLDER", str(tmp_path / "work"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    # Test modules are named after their folders, so `twinkle_core` may stand there; other tests load files too.
    for name in [name for name in sys.modules if name == "twinkle_core" or name.startswith("twinkle_registry.files.")]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Site:
    """The only folder in which plugins are looked for."""
    made = Site(tmp_path / "site", monkeypatch)
    monkeypatch.syspath_prepend(str(made.folder))
    monkeypatch.setattr(discovery, "_path_entries", lambda: [str(made.folder)])
    importlib.invalidate_caches()
    return made


@pytest.fixture
def hookspecs(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    for name, text in (("house_hookspecs", HOOKSPECS), ("house_contracts", CONTRACTS)):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(text, name, "exec"), vars(module))
    return sys.modules["house_hookspecs"]


@pytest.fixture
def house(site: Site, hookspecs: types.ModuleType) -> Callable[..., Registry]:
    """Return a function that loads what the site holds into a new registry."""

    def load(core_version: str = "0.1.0", settings: Settings | None = None, **more: Any) -> Registry:
        registry = twinkle_registry.Registry(
            hookspecs, **{"kinds": KINDS, "core_version": core_version, "settings": settings, **more}
        )
        registry.load_installed(extra=locked_plugins())
        return registry

    return load


@pytest.fixture
def table() -> Callable[..., str]:
    """The function that writes one [[component]] table."""
    return component


@pytest.fixture
def loss_source() -> str:
    """The text of a module with `PlainLoss`."""
    return LOSS
