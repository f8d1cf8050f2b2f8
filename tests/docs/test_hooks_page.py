"""The page of hooks gives the exact signature of every hook spec."""

import inspect
import re
from pathlib import Path

import pytest

from twinkle import hookspecs
from twinkle.kinds import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "hooks.md").read_text("utf-8")
DOCUMENTED = dict(re.findall(r"^### `(\w+)`\n\n```text\n(.+)\n```$", PAGE, re.MULTILINE))
SPECS = {name: value for name, value in vars(hookspecs).items() if name.startswith("twinkle_")}


def test_the_page_has_every_hook_spec_and_no_other() -> None:
    assert set(DOCUMENTED) == set(SPECS)
    assert len(re.findall(r"^### ", PAGE, re.MULTILINE)) == len(SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_the_signature_on_the_page_is_the_one_in_the_code(name: str) -> None:
    written = DOCUMENTED[name]
    assert written.startswith(f"{name}(")
    namespace = dict(vars(hookspecs))
    exec(f"def {written}: ...", namespace)
    page, code = inspect.signature(namespace[name]), inspect.signature(SPECS[name])
    assert page == code
    assert page.return_annotation == code.return_annotation


@pytest.mark.parametrize("name", SPECS)
def test_what_a_hook_is_for_is_on_the_page(name: str) -> None:
    below = PAGE.partition(f"### `{name}`\n")[2].partition("\n###")[0]
    assert " ".join((SPECS[name].__doc__ or "").split()) in " ".join(below.split())


def test_lifecycle_hooks_come_first_and_components_after_them() -> None:
    first, _, second = PAGE.partition("## Component hooks")
    assert set(re.findall(r"^### `twinkle_(\w+)`", second, re.MULTILINE)) == set(KINDS)
    assert not set(re.findall(r"^### `twinkle_(\w+)`", first, re.MULTILINE)) & set(KINDS)
