"""What a component requires is enough to import it."""

from pathlib import Path

import pytest
from environments import closure, import_all, installed, link
from house import MEMBERS, members_below
from packaging.utils import canonicalize_name

import twinkle
from twinkle_registry import ComponentSpec

SOURCES = {member.name: member for member in MEMBERS}
SPECS = [
    spec
    for record in twinkle.registry().records
    if record.name in SOURCES and record.manifest
    for spec in record.manifest.components
    if spec.ref.partition(".")[0] in {member.source.name for member in MEMBERS}
]


@pytest.mark.full
@pytest.mark.parametrize("needs", sorted({(spec.dist, spec.requires) for spec in SPECS}), ids=str)
def test_what_it_requires_is_enough_to_import_it(needs: tuple[str, tuple[str, ...]], tmp_path: Path) -> None:
    specs: list[ComponentSpec] = [spec for spec in SPECS if (spec.dist, spec.requires) == needs]
    members = [SOURCES[needs[0]], *members_below(SOURCES[needs[0]])]
    declared = [*(text for member in members for text in member.project["dependencies"]), *needs[1]]
    # With the metadata of its members, since what they export is found by it.
    view = link(closure(declared).values(), tmp_path / "view")
    link((installed()[canonicalize_name(member.name)] for member in members), view)
    modules = sorted({spec.ref.partition(":")[0] for spec in specs})
    assert import_all(modules, [*(member.source.parent for member in members), view], tmp_path) == {}
