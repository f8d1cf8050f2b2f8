"""The public names, and what importing them costs."""

import ast
import builtins
import graphlib
import re
import subprocess
import sys
from pathlib import Path

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


PACKAGE = Path(twinkle_registry.__file__).parent


def imports_of(file: Path) -> set[str]:
    """Return the modules of the registry that a module imports at any place, but for type checkers."""
    parts = ["twinkle_registry", *file.relative_to(PACKAGE).with_suffix("").parts]
    package = parts if parts[-1] == "__init__" else parts[:-1]
    tree = ast.parse(file.read_text("utf-8"))
    nodes: list[ast.AST] = [tree]
    modules = set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            named = [node.module] if node.module else [alias.name for alias in node.names]
            modules |= {".".join([*base, name]) for name in named}
    return modules


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count: a circle that is cut there is still one."""
    files = [file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py"]
    graph = {
        ".".join(["twinkle_registry", *file.relative_to(PACKAGE).with_suffix("").parts]): imports_of(file)
        for file in files
    }
    assert "twinkle_registry.trust.policy" in graph["twinkle_registry.trust.loading"]
    # Raises CycleError, which names the modules.
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("twinkle_registry.trust.lock") < order.index("twinkle_registry.trust.loading")
