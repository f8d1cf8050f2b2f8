"""`twinkle plugins patches`: what each patch changes, for which versions, and whether it is of use here."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from twinkle._registry import registry
from twinkle.cli import main

ENTRY = (
    '\n[[component]]\nkind = "patch"\nname = "{name}"\nref = "{ref}"\nsummary = "Does {name}"\nrequires = {requires}\n'
)
SOURCE = """
from twinkle.patch import Patch

class Fits(Patch):
    versions = {"torch": ">=2"}
    changes = ("torch.nn.Linear.forward", "another")
    needed = "on Mondays"

class Old(Patch):
    versions = {"torch": "<1", "nothing-like-this": ">=1"}
    otherwise = "use the door"

class Wrong(Patch):
    versions = "any"

def plain(module): ...
"""


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs a plugin with these patches."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TWINKLE_PLUGINS_ONLY", "acme-patches")

    def make(**patches: tuple[str, list[str]]) -> None:
        folder, info = tmp_path / "acme_patches", tmp_path / "acme_patches-1.0.dist-info"
        folder.mkdir()
        info.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "parts.py").write_text(SOURCE)
        entries = [
            ENTRY.format(name=name, ref=f"acme_patches.parts:{attribute}", requires=json.dumps(requires))
            for name, (attribute, requires) in patches.items()
        ]
        head = 'schema = 1\ncore = ">=0.1,<1"\nname = "acme-patches"\n'
        (folder / "twinkle-plugin.toml").write_text(head + "".join(entries))
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-patches\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[twinkle]\nacme = acme_patches\n")
        registry.cache_clear()

    registry.cache_clear()
    yield make
    registry.cache_clear()
    for name in [name for name in sys.modules if name.startswith("acme_patches")]:
        del sys.modules[name]


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(main, ["plugins", "patches", *arguments], prog_name="twinkle", catch_exceptions=False)
    assert result.exit_code == 0
    if "--json" in arguments:
        return [row for row in json.loads(result.output) if row["plugin"] == "acme-patches"]
    return [text for text in result.output.split("\n\n") if ", of acme-patches " in text]


def test_a_patch_that_fits_says_what_it_changes_and_when_it_is_needed(offer: Any) -> None:
    from importlib.metadata import version

    offer(AcmeFits=("Fits", ["torch>=2"]))
    (row,) = run("--json")
    assert row == {
        "name": "AcmeFits",
        "plugin": "acme-patches",
        "version": "1.0",
        "summary": "Does AcmeFits",
        "changes": ["torch.nn.Linear.forward", "another"],
        "versions": {"torch": ">=2"},
        "needed": "on Mondays",
        "applies": True,
        "here": f"applies (torch {version('torch')})",
    }
    (text,) = run()
    assert text.splitlines() == [
        "patch    AcmeFits, of acme-patches 1.0",
        "summary  Does AcmeFits",
        "changes  torch.nn.Linear.forward",
        "         another",
        "knows    torch >=2",
        "needed   on Mondays",
        f"here     applies (torch {version('torch')})",
    ]


def test_one_for_other_versions_says_which_and_what_to_do(offer: Any) -> None:
    offer(AcmeOld=("Old", []))
    (row,) = run("--json")
    assert not row["applies"]
    assert row["here"].startswith("refused: it is for torch <1 (installed: ")
    assert row["here"].endswith("), nothing-like-this >=1 (not installed); use the door")


def test_what_is_not_installed_or_broken_is_told_and_hides_nothing(offer: Any) -> None:
    offer(
        AcmeNeeds=("Fits", ["surely-not-installed>=3"]),
        AcmeGone=("Gone", []),
        AcmeWrong=("Wrong", []),
        AcmePlain=("plain", []),
    )
    here = {row["name"]: row["here"] for row in run("--json")}
    assert here["AcmeNeeds"] == "needs surely-not-installed>=3 (not installed)"
    assert "acme_patches.parts has no 'Gone'" in here["AcmeGone"]
    assert "Wrong.versions is 'any'; write it as" in here["AcmeWrong"]
    assert here["AcmePlain"] == "applies"
