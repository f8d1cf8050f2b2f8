"""Every commit, rename and publish of the service has a failpoint before it: what is not named cannot be tested."""

import ast
import re
from collections.abc import Iterator

import pytest
from server_failpoints import REACH, SOURCE, failpoints, served_failpoints

# Functions that rename or link without a failpoint, and why none is needed.
_DRAFT = "fills a generation that is not complete, between backup.before_database and backup.before_rename"
WITHOUT = {
    "backup/generations.py:copy": _DRAFT,
    "backup/generations.py:link_or_copy": _DRAFT,
    "backup/generations.py:remove": "one rename; the next run removes what is left of a crash",
    "backup/making.py:_copy_database": _DRAFT,
    "telemetry/status.py:announce": "tells where a server listens; without it, status reads the database",
    "engine/exports.py:write": "fills a draft, between files.before_write and files.before_manifest",
    "engine/files.py:_place": "fills a draft, between files.before_write and files.before_manifest",
}
OWN_TESTS = ("checkpoints/test_trash.py", "store/test_lost_database.py", "store/test_backup.py")
METHODS = ("rename", "hardlink_to", "link_to", "symlink_to")
FUNCTIONS = {"os": ("rename", "renames", "replace", "link", "symlink"), "shutil": ("move",)}


def test_failpoints_have_names_of_their_own() -> None:
    found = [name for text in sources().values() for name in re.findall(REACH, text)]
    assert sorted(found) == failpoints(), "a name is there twice"
    assert all(re.fullmatch(r"[a-z]+\.[a-z_]+", name) for name in found)
    assert len(re.findall(r"\breach\(", "".join(sources().values()))) == len(found), (
        "a name is not a literal: nothing would cover it"
    )


def test_every_commit_and_rename_has_a_failpoint_before_it() -> None:
    assert {f"{path}:{name}" for path, text in sources().items() for name in bare(text)} == set(WITHOUT)


@pytest.mark.parametrize(
    "act",
    [
        "a.rename(b)", "a.replace(b)", "Path(a).replace(b)", "a.hardlink_to(b)", "a.symlink_to(b)", "os.link(a, b)",
        "os.rename(a, b)", "os.replace(a, b)", "shutil.move(a, b)", "raw.execute('COMMIT')",
    ],
)  # fmt: skip
def test_an_act_without_a_failpoint_before_it_is_found(act: str) -> None:
    assert [*bare(f"def f(a, b):\n    {act}")] == ["f"]
    assert [*bare(f"def f(a, b):\n    {act}\n    reach('x.y')")] == ["f"], "after it is too late"
    assert [*bare(f"def f(a, b):\n    reach('x.y')\n    {act}")] == []
    assert [*bare(f"async def f(a, b):\n    def g():\n        reach('x.y')\n    {act}")] == ["f"], "g is not called"
    assert [*bare(act)] == ["the module"]


@pytest.mark.parametrize("act", ["a.replace('x', 'y')", "time.replace(hour=1)", "dataclasses.replace(a, b=1)"])
def test_what_changes_no_file_needs_none(act: str) -> None:
    assert [*bare(f"def f(a):\n    {act}")] == []


def test_nobody_imports_what_renames_under_a_name_of_its_own() -> None:
    for path, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                names = {alias.name for alias in node.names} & {*FUNCTIONS.get(node.module or "", ())}
                assert not names, f"{path}: write {node.module}.{names}, so that this file sees it"


def sources() -> dict[str, str]:
    """Return every module of the service but the one that offers failpoints."""
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if path.name != "failpoints.py"]
    return {str(path.relative_to(SOURCE)): path.read_text("utf-8") for path in paths}


def bare(text: str) -> Iterator[str]:
    """Yield functions that commit or rename, and do not say before that they are about to."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [*own(node)]
            said = min([call.lineno for call in inner if is_reach(call)], default=None)
            acts = [call.lineno for call in inner if is_act(call)]
            if acts and (said is None or said > min(acts)):
                yield getattr(node, "name", "the module")


def own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a module or function, and not in a function in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from own(child)


def is_reach(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "reach"


def is_act(node: ast.AST) -> bool:
    """Return whether a node commits, renames or links."""
    if isinstance(node, ast.Constant) and node.value == "COMMIT":
        return True
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner, name = node.func.value, node.func.attr
    if isinstance(owner, ast.Name) and owner.id in FUNCTIONS:
        return name in FUNCTIONS[owner.id]
    return name in METHODS or (name == "replace" and len(node.args) == 1 and not node.keywords)


def test_what_requests_do_not_reach_is_killed_by_tests_of_its_own() -> None:
    tests = SOURCE.parents[1] / "tests"
    texts = "".join((tests / path).read_text("utf-8") for path in OWN_TESTS)
    assert [name for name in set(failpoints()) - set(served_failpoints()) if f'"{name}' not in texts] == []
