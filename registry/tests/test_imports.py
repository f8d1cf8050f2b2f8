"""The public names, and what importing them costs."""

import builtins
import re
import subprocess
import sys

import pytest

import twinkle_registry
from twinkle_registry import errors


def modules_after(code: str) -> set[str]:
    script = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before))"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


def test_importing_the_package_imports_nothing_else() -> None:
    assert modules_after("import twinkle_registry") == {"twinkle_registry"}


def test_errors_and_names_are_cheap() -> None:
    after = modules_after("import twinkle_registry; twinkle_registry.TwinkleError; twinkle_registry.nearest")
    assert {m for m in after if m.startswith("twinkle_registry")} == {
        "twinkle_registry",
        "twinkle_registry.errors",
        "twinkle_registry.naming",
    }
    assert not after & {"pluggy", "tomllib", "importlib.metadata", "difflib", "inspect", "dataclasses"}


def test_the_registry_itself_waits_with_pluggy_and_the_rest() -> None:
    after = modules_after("import twinkle_registry; twinkle_registry.Registry")
    heavy = {"pluggy", "tomllib", "importlib.metadata", "difflib", "packaging", "logging", "pydantic", "pathlib"}
    assert not after & heavy


def test_every_public_name_is_there_and_listed() -> None:
    for name in twinkle_registry.__all__:
        assert getattr(twinkle_registry, name) is not None
        assert name in dir(twinkle_registry)
    assert set(twinkle_registry._HOME_OF) == set(twinkle_registry.__all__)
    with pytest.raises(AttributeError, match="module 'twinkle_registry' has no attribute 'Registri'"):
        _ = twinkle_registry.Registri


TREE = re.findall(r"─ (\w+) \((\w+)\)", errors.__doc__ or "")


@pytest.mark.parametrize(("name", "builtin"), TREE)
def test_every_error_is_also_the_builtin_it_says(name: str, builtin: str) -> None:
    error = getattr(twinkle_registry, name)
    assert issubclass(error, twinkle_registry.TwinkleError)
    assert issubclass(error, getattr(builtins, builtin))


def test_the_tree_shows_every_error() -> None:
    assert {name for name, _ in TREE} == {name for name in vars(errors) if name[0].isupper()} - {"TwinkleError"}
