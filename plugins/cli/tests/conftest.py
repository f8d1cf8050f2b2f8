"""Plugins made on the spot, for the tests of the command line."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from twinkle._registry import registry

Make = Callable[..., Path]


@pytest.fixture
def make_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return a function that installs a plugin (a package and its dist-info) for this test alone."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    before = set(sys.modules)

    def make(package: str, manifest: str | None, *, core: str = ">=0.1,<1", record: str = "", **modules: str) -> Path:
        folder = site / package
        if manifest is not None:
            folder.mkdir()
            (folder / "__init__.py").write_text("")
            head = f'schema = 1\ncore = "{core}"\nname = "{package}"\n'
            (folder / "twinkle-plugin.toml").write_text(
                head + manifest.replace("{package}", package).replace("{{", "{").replace("}}", "}")
            )
            for name, source in modules.items():
                (folder / f"{name}.py").write_text(textwrap.dedent(source))
        info = site / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[twinkle]\n{package} = {package}\n")
        (info / "RECORD").write_text(record)
        registry.cache_clear()
        return folder

    registry.cache_clear()
    yield make
    registry.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("acme"):
            del sys.modules[name]
