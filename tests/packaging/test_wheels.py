"""Each wheel stands beside core, the registry and its declared dependencies alone."""

import ast
import sys
import tarfile
from pathlib import Path

import pytest
from environments import View, closure, import_all
from hatchling.builders.sdist import SdistBuilder
from house import MEMBERS, ROOT, Member, imported, members_below, modules_below, providers_of_packages
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FLOORS = ("twinkle-registry", "twinkle-core")
GUESTS = {"torch", "transformers", "vllm"}
"""What core imports inside functions for callers who have it: it depends on none of them, and has no extras."""
each_member = pytest.mark.parametrize("member", MEMBERS, ids=str)
few_members = pytest.mark.sample(3)  # building a wheel takes seconds


@pytest.mark.parametrize(
    "member",
    [
        pytest.param(each, marks=() if each.name in (*FLOORS, "twinkle-losses") else pytest.mark.full)
        for each in MEMBERS
    ],
    ids=str,
)
def test_all_modules_import_beside_declared_dependencies_alone(
    member: Member, unpacked: dict[str, Path], view: View, tmp_path: Path
) -> None:
    below = members_below(member)
    declared = [*member.requirements, *(text for other in below for text in other.requirements)]
    seen = [unpacked[member.name], *(unpacked[other.name] for other in below), view(declared)]
    names = modules_below(unpacked[member.name])
    assert len(names) == len(modules_below(member.source.parent))
    assert import_all(names, seen, tmp_path) == {}


def test_an_undeclared_import_is_caught(unpacked: dict[str, Path], view: View, tmp_path: Path) -> None:
    (tmp_path / "careless.py").write_text("import rich\n", "utf-8")
    (tmp_path / "careful.py").write_text("import yaml, twinkle\n", "utf-8")
    seen = [tmp_path, *(unpacked[name] for name in FLOORS), view(["pyyaml", "pluggy", "packaging"])]
    failed = import_all(["careful", "careless"], seen, tmp_path)
    assert failed == {"careless": "ModuleNotFoundError: No module named 'rich'"}


@pytest.mark.sample(5)
@each_member
def test_every_import_anywhere_in_the_code_is_declared(member: Member) -> None:
    """Imports inside functions count as well; a package that only a dependency brings does not."""
    floors = members_below(member)
    declared = {canonicalize_name(Requirement(text).name) for m in (member, *floors) for text in m.requirements}
    declared |= GUESTS if member.name == "twinkle-core" else set()
    allowed = {*sys.stdlib_module_names, member.source.name, *(other.source.name for other in floors)}
    providers = providers_of_packages()
    undeclared = {
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in member.source.rglob("*.py")
        for line, name in imported(ast.parse(path.read_text("utf-8")))
        if name not in allowed and not declared & {canonicalize_name(dist) for dist in providers.get(name, [name])}
    }
    assert undeclared == set()


def test_imports_are_found_wherever_they_hide() -> None:
    code = """
import torch.nn
from .here import x
try:
    import optional
except ImportError:
    optional = None
def late():
    from numpy.linalg import norm
if TYPE_CHECKING:
    import types_only
"""
    assert [name for _, name in imported(ast.parse(code))] == ["torch", "numpy"]


@few_members
@each_member
def test_a_wheel_carries_all_files_of_its_package(member: Member, unpacked: dict[str, Path]) -> None:
    """Among them the manifest, `py.typed` and data."""
    left = {"__pycache__"}
    files = {p.relative_to(member.source) for p in member.source.rglob("*") if p.is_file() and not left & {*p.parts}}
    for folder, place in member.settings["build"]["targets"]["wheel"].get("force-include", {}).items():
        inside = Path(place).relative_to(member.source.name)
        files |= {inside / p.relative_to(member.folder / folder) for p in (member.folder / folder).rglob("*")}
    package = unpacked[member.name] / member.source.name
    assert {p.relative_to(package) for p in package.rglob("*") if p.is_file()} == files
    assert Path("py.typed") in files
    assert (Path("twinkle-plugin.toml") in files) == (member.name not in ("twinkle-registry", "twinkle-torch"))


@few_members
@each_member
def test_a_wheel_says_what_it_is(member: Member, unpacked: dict[str, Path]) -> None:
    (file,) = unpacked[member.name].glob("*.dist-info/METADATA")
    metadata = file.read_text("utf-8")
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "License-File: LICENSE\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert "Description-Content-Type: text/markdown\n" in metadata


@each_member
def test_no_heavy_engine_is_forced_on_anyone(member: Member) -> None:
    plain = member.project.get("dependencies", ())
    assert not {"torch", "transformers", "ray", "vllm", "megatron-core", "datasets", "pandas"} & {*closure(plain)}


@few_members
@each_member
def test_a_wheel_and_a_source_archive_carry_the_text_of_the_licence(
    member: Member, unpacked: dict[str, Path], tmp_path: Path
) -> None:
    text = (ROOT / "LICENSE").read_bytes()
    (licence,) = unpacked[member.name].glob("*.dist-info/licenses/LICENSE")
    assert licence.read_bytes() == text
    (archive,) = SdistBuilder(str(member.folder)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(archive) as opened:
        (name,) = (name for name in opened.getnames() if name.endswith("/LICENSE"))
        packed = opened.extractfile(name)
        assert packed is not None
        assert packed.read() == text
