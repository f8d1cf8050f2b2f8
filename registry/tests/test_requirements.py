"""What a component needs is checked before anything of it is imported."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from twinkle_registry import (
    ComponentSpec,
    ManifestError,
    MissingRequirement,
    Registry,
    RequirementMissing,
    check_requirements,
    missing_requirements,
)


def spec(*requires: str) -> ComponentSpec:
    return ComponentSpec("loss", "L", "acme.loss:L", requires=requires, dist="acme")


def test_what_is_installed_is_not_missing(site: Any) -> None:
    site.metadata("lib", "2.5")
    assert missing_requirements(spec("lib", "lib>=2", "Lib<3", "lib!=2.4")) == []
    check_requirements(spec("lib>=2"))


def test_what_is_absent_or_too_old_is_missing(site: Any) -> None:
    site.metadata("lib", "2.5")
    wanted = spec("lib>=3", "absent>=1", "absent>=1")
    assert missing_requirements(wanted) == [MissingRequirement("lib>=3", "2.5"), MissingRequirement("absent>=1", None)]
    with pytest.raises(RequirementMissing) as error:
        check_requirements(wanted)
    assert str(error.value) == (
        "loss 'L' of acme needs lib>=3 (installed: 2.5), absent>=1 (not installed); "
        "run: pip install 'lib>=3' 'absent>=1'"
    )
    assert isinstance(error.value, ImportError)


def test_a_pre_release_that_is_installed_counts(site: Any) -> None:
    site.metadata("lib", "3.0rc1")
    assert missing_requirements(spec("lib>=2")) == []
    assert missing_requirements(spec("lib>=3")) == [MissingRequirement("lib>=3", "3.0rc1")]


def test_markers_of_another_platform_ask_for_nothing() -> None:
    assert missing_requirements(spec("absent; python_version < '3'", "absent; sys_platform == 'amiga'")) == []
    assert [m.requirement for m in missing_requirements(spec("absent; python_version >= '3'"))] == ["absent"]


def test_extras_ask_for_what_they_name(site: Any) -> None:
    site.write(
        "lib-1.0.dist-info/METADATA",
        "Metadata-Version: 2.1\nName: lib\nVersion: 1.0\nRequires-Dist: base\nRequires-Dist: fast>=2 ; extra == 'gpu'\n"
        "Requires-Dist: lib[gpu] ; extra == 'all'\nRequires-Dist: old ; extra == 'gpu' and python_version < '3'\n\n",
    )
    assert missing_requirements(spec("lib")) == []
    assert missing_requirements(spec("lib[gpu]")) == [MissingRequirement("fast>=2", None)]
    assert missing_requirements(spec("lib[all]")) == [MissingRequirement("fast>=2", None)]


def test_the_command_names_the_extra_of_the_plugin_that_brings_what_is_missing(site: Any) -> None:
    site.write(
        "acme-1.0.dist-info/METADATA",
        "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\nRequires-Dist: base\nProvides-Extra: web\n"
        "Requires-Dist: absent>=1 ; extra == 'web'\nRequires-Dist: absent-too>=1 ; extra == 'web'\n\n",
    )
    with pytest.raises(RequirementMissing, match=r"run: pip install 'acme\[web\]' 'absent-three'$"):
        check_requirements(spec("absent>=1", "absent_too", "absent-three"))


def test_a_text_that_is_no_requirement_is_a_manifest_error() -> None:
    with pytest.raises(ManifestError, match=r"loss 'L' of acme: requires 'a >> 1', which is not a requirement"):
        missing_requirements(spec("a >> 1"))


def test_nothing_is_imported_where_something_is_missing(site: Any, table: Any, house: Callable[..., Registry]) -> None:
    site.plugin("acme", table("L", "acme.loss:L", requires='["absent>=1"]'), loss="raise RuntimeError('imported')")
    registry = house()
    with pytest.raises(RequirementMissing, match=r"run: pip install 'absent>=1'"):
        registry.resolve("L", "loss")
    assert "acme.loss" not in sys.modules
    assert registry.names("loss") == ["L"]


def test_what_is_installed_meanwhile_is_seen(
    site: Any, table: Any, house: Callable[..., Registry], loss_source: str
) -> None:
    site.plugin("acme", table("PlainLoss", "acme.loss:PlainLoss", requires='["lib>=2"]'), loss=loss_source)
    registry = house()
    with pytest.raises(RequirementMissing):
        registry.resolve("PlainLoss", "loss")
    site.metadata("lib", "2.0")
    assert registry.resolve("PlainLoss", "loss").__name__ == "PlainLoss"
