"""`twinkle plugins info` and `search`: what a component takes, where and whose it is, what is published."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from twinkle.cli import main
from twinkle_cli.source import locate
from twinkle_registry import ComponentSpec, index
from twinkle_registry.index import IndexEntry

Make = Callable[..., Path]
FOCAL = '''
"""Losses."""
from typing import Any

from twinkle.loss import Loss


class FocalLoss(Loss):
    """Focal loss.

    Args:
        gamma: 0 is cross entropy; the larger, the less do
            easy tokens count: (1 - p)^gamma.
        rest (int): more of it.

    Raises:
        ValueError: gamma is negative.
    """

    def __init__(self, gamma: float = 2.0, *rest: int, name: "str | None" = None) -> None:
        """Make one.

        Args:
            name: what it is called.
        """

    def __call__(self, inputs: Any, outputs: Any) -> Any: ...
'''
COMPONENT = """
[[component]]
kind = "loss"
name = "FocalLoss"
ref = "{package}.focal:FocalLoss"
summary = "Focal loss"
runtimes = ["local", "served"]
tenant_safe = true
inputs = {{ advantages = "float32[T]" }}
config = "{package}.focal_config:Options"
"""
CONFIG = """
from pydantic import BaseModel, ConfigDict, Field


class Inner(BaseModel):
    width: int = Field(3, description="how wide")


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    gamma: float = Field(description="how much")
    inner: Inner = Inner()
"""


def info(name: str) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["plugins", "info", name, "--json"])
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)
    return dict(found)


def shown(*args: str) -> str:
    return CliRunner().invoke(main, ["plugins", *args]).output


def test_what_a_component_takes_and_what_it_means(make_plugin: Make) -> None:
    make_plugin("acme_focal", COMPONENT, focal=FOCAL, focal_config=CONFIG)
    found = info("FocalLoss")
    assert found["signature"] == "FocalLoss(gamma: float = 2.0, *rest: int, name: str | None = None)"
    assert [(p["name"], p["meaning"]) for p in found["parameters"]] == [
        ("gamma", "0 is cross entropy; the larger, the less do easy tokens count: (1 - p)^gamma."),
        ("*rest", "more of it."),
        ("name", "what it is called."),
    ]
    text = shown("info", "FocalLoss")
    assert "signature  FocalLoss(gamma: float = 2.0, *rest" in text
    assert "gamma: float = 2.0\n             0 is cross entropy" in text
    for capability in ("local, served", "safe to share", "advantages: float32[T]"):
        assert capability in text


def test_a_long_signature_is_whole_and_wrapped(make_plugin: Make) -> None:
    takes = ", ".join(f"argument_{number}: float = {number}.5" for number in range(9))
    make_plugin("acme_long", COMPONENT, focal=f"class FocalLoss:\n    def __init__(self, {takes}, *, last): ...\n")
    assert info("FocalLoss")["signature"] == f"FocalLoss({takes}, *, last)"
    lines = shown("info", "FocalLoss").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("signature"))
    assert max(len(line) for line in lines[first : first + 3]) <= 112
    assert takes in " ".join(" ".join(lines[first : first + 4]).split())


def test_the_options_model_is_listed_field_by_field(make_plugin: Make) -> None:
    folder = make_plugin("acme_options", COMPONENT, focal=FOCAL, focal_config=CONFIG)
    assert info("FocalLoss")["options"] == [
        {"name": "gamma", "type": "float", "default": None, "required": True, "meaning": "how much"},
        {"name": "inner.width", "type": "int", "default": "3", "required": False, "meaning": "how wide"},
    ]
    (folder / "focal_config.py").write_text("Options = 3")
    sys.modules.pop("acme_options.focal_config")
    found = info("FocalLoss")
    assert found["options"] is None
    assert found["options_unknown_because"] == "unknown: acme_options.focal_config:Options is not a pydantic model"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("metadata", "licence", "homepage"),
    [
        ("License-Expression: MIT\nHome-page: https://acme.example\n", "MIT", "https://acme.example"),
        ("License: BSD\n", "BSD", ""),
        ("Project-URL: Source Code, https://a.example\nProject-URL: Home-Page, https://b.example\n", "", "https://b.example"),
        ("Project-URL: source, https://a.example\n", "", "https://a.example"),
        ("", "", ""),
    ],
)  # fmt: skip
def test_licence_and_homepage_are_those_of_the_distribution(
    metadata: str, licence: str, homepage: str, make_plugin: Make, tmp_path: Path
) -> None:
    make_plugin("acme_owned", COMPONENT, focal=FOCAL, focal_config=CONFIG)
    with (tmp_path / "site" / "acme_owned-1.0.dist-info" / "METADATA").open("a") as file:
        file.write(metadata)
    for name in ("FocalLoss", "acme_owned"):
        found = info(name)
        assert (found["licence"], found["homepage"]) == (licence, homepage)
        text = shown("info", name)
        assert ("licence " in text, "homepage " in text) == (bool(licence), bool(homepage))


def test_a_package_that_raises_is_explained_and_its_source_still_found(make_plugin: Make) -> None:
    folder = make_plugin("acme_raises", COMPONENT, focal=FOCAL)
    (folder / "__init__.py").write_text("raise RuntimeError('the telescope is not calibrated')\n")
    found = info("FocalLoss")
    assert found["parameters"] is None
    assert "RuntimeError: the telescope is not calibrated" in found["parameters_unknown_because"]
    assert found["file"] == str(folder / "focal.py")
    assert found["line"] == FOCAL.splitlines().index("class FocalLoss(Loss):") + 1


def test_nothing_of_a_plugin_for_another_core_is_imported(make_plugin: Make, tmp_path: Path) -> None:
    trap = f"from pathlib import Path\nPath({str(tmp_path / 'imported')!r}).touch()\n"
    make_plugin("acme_newer", COMPONENT, core=">=7", focal=trap + FOCAL, focal_config=trap)
    found = info("FocalLoss")
    assert found["status"] == "incompatible"
    assert found["parameters_unknown_because"] == "unknown: its plugin is incompatible"
    assert found["options_unknown_because"] == "unknown: its plugin is incompatible"
    assert "needs twinkle-core >=7" in shown("info", "FocalLoss")
    assert not (tmp_path / "imported").exists()


RE_EXPORTED = {
    "__init__": "from .sub import Thing as Other\nfrom .sub.deep import *\nfrom . import sub\n",
    "sub/__init__": "try:\n    import absent\nexcept ImportError:\n    from .deep import Thing\n",
    "sub/deep": "import sys\nif sys:\n    class Thing:\n        class Inner: ...\nelse:\n    Thing = None\n",
    "round": "from acme_spread.about import X\n",
    "about": "from acme_spread.round import X\n",
}


@pytest.mark.parametrize(
    ("ref", "file", "line"),
    [
        ("acme_spread.sub.deep:Thing.Inner", "sub/deep.py", 4),
        ("acme_spread.sub:Thing", "sub/deep.py", 3),
        ("acme_spread:Other", "sub/deep.py", 3),
        ("acme_spread:Other.Inner", "sub/deep.py", 4),
        ("acme_spread.round:X", "", 0),
        ("acme_spread.absent:X", "", 0),
        ("acme_spread.sub:Absent", "", 0),
        ("absent:X", "", 0),
        ("sys:path", "", 0),
    ],
)
def test_the_definition_is_found_through_what_a_package_re_exports(
    ref: str, file: str, line: int, make_plugin: Make
) -> None:
    folder = make_plugin("acme_spread", "")
    (folder / "sub").mkdir()
    for name, source in RE_EXPORTED.items():
        (folder / f"{name}.py").write_text(source)
    found = locate(ComponentSpec("loss", "X", ref))
    assert found == ((str(folder / file), line) if file else None)
    assert "acme_spread" not in sys.modules


ENTRIES = (
    IndexEntry("loss", "FocalLoss", "Fewer easy tokens", "Acme", package="acme-losses", licence="MIT"),
    IndexEntry("patch", "FocalPatch", "Sharper", "Bolt", repository="ms://bolt/focal"),
)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, make_plugin: Make) -> Make:
    monkeypatch.setattr(index, "index_entries", lambda: ENTRIES)
    return make_plugin


def test_search_says_how_to_get_what_it_finds(published: Make) -> None:
    lines = [" ".join(line.split()) for line in shown("search", "focal").splitlines()]
    assert lines == [
        "kind name get it by summary",
        "loss FocalLoss pip install acme-losses Fewer easy tokens",
        "patch FocalPatch twinkle plugins add ms://bolt/focal Sharper",
    ]
    published("acme_losses", "")
    assert "acme-losses (installed)" in shown("search", "--kind", "loss")
    rows = json.loads(shown("search", "TOKENS", "acme", "--json"))
    assert [(row["name"], row["installed"], row["command"]) for row in rows] == [
        ("FocalLoss", True, "pip install acme-losses")
    ]


@pytest.mark.usefixtures("published")
def test_search_that_finds_nothing_says_what_is_near() -> None:
    done = CliRunner().invoke(main, ["plugins", "search", "foclaloss", "--kind", "loss"])
    assert done.exit_code == 1
    assert done.stdout == (
        "the index of published plugins has nothing of kind loss with 'foclaloss'; nearest: FocalLoss; "
        "what is installed here only: twinkle plugins list KIND\n"
    )
    done = CliRunner().invoke(main, ["plugins", "search", "telescope", "--json"])
    assert (done.exit_code, done.stdout) == (1, "[]\n")
    assert "nothing with 'telescope'; `twinkle plugins search` shows everything" in shown("search", "telescope")
    assert "there is no kind 'los'; nearest: 'loss'" in shown("search", "--kind", "los")


def test_info_of_a_kind_that_is_none_names_the_nearest() -> None:
    assert "there is no kind 'los'; nearest: 'loss'" in shown("info", "los:CrossEntropyLoss")
    assert "no metric is called so, but there is loss:CrossEntropyLoss" in shown("info", "metric:CrossEntropyLoss")


@pytest.mark.usefixtures("published")
def test_info_of_a_name_that_the_index_has_says_where_to_get_it() -> None:
    for name in ("FocalLoss", "loss:FocalLoss", "acme-losses/FocalLoss"):
        assert "the index lists it in 'acme-losses'; run: pip install acme-losses" in shown("info", name)
    assert "the index" not in shown("info", "patch:FocalLoss")
