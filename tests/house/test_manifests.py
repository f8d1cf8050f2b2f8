"""The manifests of the house keep their word: every reference resolves, and `requires` is the truth."""

import ast
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from sys import stdlib_module_names

import pytest
from environments import closure, import_all, installed, link
from house import MEMBERS, Member, imported, members_below, providers_of_packages
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import twinkle
from twinkle_registry import ComponentSpec

PLUGINS = {member.name: member for member in MEMBERS if member.name not in ("twinkle-registry", "twinkle-torch")}
SPECS = [
    spec
    for record in twinkle.registry().records
    if record.name in PLUGINS and record.manifest
    for spec in record.manifest.components
]
each_component = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.dist}/{spec.name}")


def test_every_plugin_of_the_house_is_found_and_whole() -> None:
    records = {record.name: record for record in twinkle.registry().records}
    assert {name: (records[name].status, records[name].reason) for name in PLUGINS} == dict.fromkeys(
        PLUGINS, ("ok", "")
    )


@each_component
def test_its_reference_resolves_and_honours_its_contract(spec: ComponentSpec) -> None:
    assert twinkle.registry().find(f"{spec.dist}/{spec.name}", spec.kind) == spec
    # Not every library is here; a module may be imported without those that it imports later.
    found = twinkle.registry().resolve(replace(spec, requires=()), spec.kind)
    assert found.__doc__, f"{spec.ref} has no docstring"


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.config], ids=str)
def test_its_configuration_is_a_model_that_refuses_what_it_does_not_know(spec: ComponentSpec) -> None:
    from pydantic import BaseModel

    model = twinkle.registry().load(replace(spec, ref=spec.config))
    assert issubclass(model, BaseModel)
    assert model.model_config["extra"] == "forbid"


@each_component
def test_it_says_what_it_is_in_one_line(spec: ComponentSpec) -> None:
    assert spec.summary
    assert len(spec.summary) <= 90
    assert not spec.summary.endswith(".")


def declared(spec: ComponentSpec) -> list[str]:
    """Return what is there when `spec` is imported: its own requirements and what nobody can be without."""
    return [*(text for member in members_of(spec) for text in member.project["dependencies"]), *spec.requires]


def members_of(spec: ComponentSpec) -> list[Member]:
    """Return the member that offers `spec` and those that it depends on."""
    (own,) = (member for member in MEMBERS if member.name == spec.dist)
    return [own, *members_below(own)]


AT_WILL = {"local": {"torch"}}  # several processes need torch, one does not
OWN = [spec for spec in SPECS if spec.ref.partition(".")[0] in {member.source.name for member in MEMBERS}]


@pytest.mark.parametrize("needs", sorted({(spec.dist, spec.requires) for spec in OWN}), ids=str)
def test_what_it_requires_is_enough_to_import_it(needs: tuple[str, tuple[str, ...]], tmp_path: Path) -> None:
    specs = [spec for spec in OWN if (spec.dist, spec.requires) == needs]
    members = members_of(specs[0])
    # With the metadata of its members, since what they export is found by it.
    view = link(closure(declared(specs[0])).values(), tmp_path / "view")
    link((installed()[canonicalize_name(member.name)] for member in members), view)
    modules = sorted({spec.ref.partition(":")[0] for spec in specs})
    assert import_all(modules, [*(member.source.parent for member in members), view], tmp_path) == {}


@pytest.mark.parametrize("spec", OWN, ids=lambda spec: f"{spec.dist}/{spec.name}")
def test_what_its_module_imports_later_is_required_too(spec: ComponentSpec) -> None:
    module = find_spec(spec.ref.partition(":")[0])
    assert module is not None
    tree = ast.parse(Path(str(module.origin)).read_text("utf-8"))
    theirs = {name for _, name in imported(tree)} - {*stdlib_module_names} - {member.source.name for member in MEMBERS}
    names = {canonicalize_name(Requirement(text).name) for text in declared(spec)} | AT_WILL.get(spec.name, set())
    providers = providers_of_packages()
    assert {top for top in theirs if not names & {*map(canonicalize_name, providers.get(top, [top]))}} == set()


@pytest.mark.parametrize("member", PLUGINS.values(), ids=str)
def test_a_manifest_requires_no_more_than_its_distribution_offers(member: Member) -> None:
    """A requirement of a component is an extra of its distribution or of core, with the same bounds."""
    core = PLUGINS["twinkle-core"]
    manifest = tomllib.loads((member.source / "twinkle-plugin.toml").read_text("utf-8"))
    wanted = {text for component in manifest.get("component", ()) for text in component.get("requires", ())}
    offered = {canonicalize_name(Requirement(t).name) for m in (member, core) for t in m.requirements}
    assert {text for text in wanted if canonicalize_name(Requirement(text).name) not in offered} == set()
