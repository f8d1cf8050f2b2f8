"""Exports: functions and classes that plugins add to the public modules of core, and components that moved plugins."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from twinkle_registry import (
    ComponentConflict,
    ComponentNotFound,
    PluginBroken,
    Registry,
    RequirementMissing,
    Settings,
    index,
    installed_plugins,
)
from twinkle_registry.index import IndexExport, read_index

House = Callable[..., Registry]


def export(name: str, ref: str, module: str = "twinkle.loss") -> str:
    return f'\n[[export]]\nmodule = "{module}"\nname = "{name}"\nref = "{ref}"\n'


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the index know that twinkle-acme exports `twinkle.loss.smooth`."""
    monkeypatch.setattr(index, "index_exports", lambda: (IndexExport("twinkle.loss", "smooth", "twinkle-acme"),))


def test_an_export_is_imported_when_it_is_used(site: Any, house: House) -> None:
    site.plugin("acme", export("smooth", "acme.a:smooth"), a="def smooth(): return 1")
    registry = house()
    assert {name: [spec.dist for spec in specs] for name, specs in registry.exports("twinkle.loss").items()} == {
        "smooth": ["acme"]
    }
    assert registry.exports("twinkle.metric") == {}
    assert registry.export("twinkle.loss", "smooth")() == 1


def test_an_attribute_is_an_export_before_it_is_a_component(
    site: Any, table: Any, house: House, loss_source: str
) -> None:
    body = export("PlainLoss", "acme.a:smooth") + table("PlainLoss", "acme.b:PlainLoss")
    site.plugin("acme", body, a="def smooth(): return 1", b=loss_source)
    registry = house()
    assert registry.attribute("twinkle.loss", "PlainLoss", "loss")() == 1
    assert registry.resolve("PlainLoss", "loss").__name__ == "PlainLoss"


def test_two_plugins_that_export_one_name_are_a_conflict(site: Any, house: House) -> None:
    for name in ("acme", "other"):
        site.plugin(name, export("smooth", f"{name}.a:smooth"), a="def smooth(): return 1")
    with pytest.raises(ComponentConflict, match=r"twinkle\.loss\.smooth is exported by 'acme', 'other'"):
        house().export("twinkle.loss", "smooth")


def test_an_export_that_is_not_installed_names_the_package(site: Any, house: House, published: None) -> None:
    registry = house()
    with pytest.raises(RequirementMissing, match="run: pip install twinkle-acme"):
        registry.attribute("twinkle.loss", "smooth", "loss")
    with pytest.raises(ComponentNotFound):
        registry.attribute("twinkle.loss", "rough", "loss")


def test_a_contract_that_nobody_exports_is_not_looked_up_as_a_component(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports = (IndexExport("house_patches", "Patch", "twinkle-acme"),)
    monkeypatch.setattr(index, "index_exports", lambda: exports)
    registry = house(kinds={"loss": "house_patches:Patch"})
    module = types.ModuleType("house_patches")

    def attribute(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return registry.attribute("house_patches", name, "loss")

    vars(module)["__getattr__"] = attribute
    monkeypatch.setitem(sys.modules, "house_patches", module)
    with pytest.raises(RequirementMissing, match=r"house_patches\.Patch is not installed.* twinkle-acme"):
        registry.attribute("house_patches", "Patch", "loss")
    with pytest.raises(RequirementMissing, match=r"house_patches\.Patch is not installed.* twinkle-acme"):
        registry.attribute("house_patches", "SomePatch", "loss")


@pytest.mark.parametrize("kind", ["loss", ""])
def test_an_attribute_that_a_disabled_plugin_exports_says_so(
    site: Any, house: House, published: None, kind: str
) -> None:
    site.plugin("twinkle-acme", export("smooth", "twinkle_acme.a:smooth"), a="def smooth(): return 1")
    registry = house(settings=Settings(disabled=frozenset({"twinkle-acme"})))
    with pytest.raises(ComponentNotFound, match="plugin twinkle-acme offers it but is disabled"):
        registry.attribute("twinkle.loss", "smooth", kind)


def test_a_component_is_found_beside_an_unusable_plugin_that_exports_its_name(
    site: Any, table: Any, house: House, loss_source: str
) -> None:
    site.plugin("acme", export("PlainLoss", "acme.a:smooth"), core=">=9")
    site.plugin("other", table("PlainLoss", "other.a:PlainLoss"), a=loss_source)
    assert house().attribute("twinkle.loss", "PlainLoss", "loss").__name__ == "PlainLoss"


def test_an_export_of_an_unusable_plugin_raises_its_reason(site: Any, house: House) -> None:
    site.plugin("acme", export("smooth", "acme.a:smooth"), core=">=9")
    with pytest.raises(Exception, match="plugin acme offers it but is incompatible"):
        house().export("twinkle.loss", "smooth")
    site.plugin("acme", export("smooth", "acme.a:rough"), a="")
    with pytest.raises(PluginBroken, match="no 'rough'"):
        house().export("twinkle.loss", "smooth")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('module = "twinkle.loss"\nname = "smooth"', "export #1 'smooth'.ref: missing"),
        ('module = "torch.nn"\nname = "smooth"\nref = "acme.a:smooth"', "module must be a module of core"),
        ('module = "twinkle.loss"\nname = "_smooth"\nref = "acme.a:smooth"', "name must be a public identifier"),
        ('module = "twinkle.loss"\nname = "smooth"\nref = "acme.a:smooth"\nkind = "loss"', "kind: unknown key"),
    ],
)
def test_a_wrong_export_is_told(site: Any, line: str, complaint: str) -> None:
    site.plugin("acme", f"\n[[export]]\n{line}\n")
    (record,) = installed_plugins()
    assert record.status == "broken"
    assert complaint in record.reason


def test_an_export_that_is_listed_twice_is_told(site: Any) -> None:
    site.plugin("acme", export("smooth", "acme.a:smooth") * 2)
    assert "export: twinkle.loss smooth is listed twice" in installed_plugins()[0].reason


def test_what_was_read_is_remembered_with_its_exports(site: Any, house: House) -> None:
    site.plugin("acme", 'formerly = ["old"]\n' + export("smooth", "acme.a:smooth"), a="def smooth(): return 1")
    site.settle()
    first, second = installed_plugins(), installed_plugins()
    assert first == second
    assert second[0].manifest is not None
    assert second[0].manifest.formerly == ("old",)
    assert [spec.name for spec in second[0].manifest.exports] == ["smooth"]


def test_a_component_answers_to_the_plugin_that_offered_it_before(
    site: Any, table: Any, house: House, loss_source: str
) -> None:
    site.plugin("acme", 'formerly = ["old-acme"]\n' + table("PlainLoss", "acme.a:PlainLoss"), a=loss_source)
    site.plugin("other", table("PlainLoss", "other.a:PlainLoss"), a=loss_source)
    assert house().find("old-acme/PlainLoss", "loss").dist == "acme"
    preferred = Settings(prefer={"loss:PlainLoss": "old_acme"})
    registry = house(settings=preferred)
    assert registry.find("PlainLoss", "loss").dist == "acme"
    assert registry.notices() == []


def test_a_part_that_moved_out_of_core_stays_on_under_only(
    site: Any, table: Any, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_successors", lambda: (("acme", "twinkle-core"),))
    site.plugin("acme", table("L", "acme.a:L"))
    site.plugin("other", table("K", "other.a:K"))
    site.plugin("third", table("J", "third.a:J"))
    registry = house(settings=Settings(enabled_only=frozenset({"other"})))
    assert registry.names("loss") == ["K", "L"]


def test_a_manifest_cannot_exempt_its_plugin_from_only(
    site: Any, table: Any, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_successors", lambda: (("acme", "twinkle-core"),))
    site.plugin("first", 'formerly = ["twinkle-core"]\n' + table("L", "first.a:L"))
    manifest = site.plugin("second", table("J", "second.a:J"))
    manifest.write_text(manifest.read_text().replace('name = "second"', 'name = "acme"', 1))
    site.plugin("other", table("K", "other.a:K"))
    registry = house(settings=Settings(enabled_only=frozenset({"other"})))
    assert registry.names("loss") == ["K"]
    reasons = {record.dist: record.reason for record in registry.records}
    assert (
        reasons["first"] == reasons["second"] == "not among the only plugins enabled by the settings of this registry"
    )


def test_our_own_index_lists_what_moved_out_of_core() -> None:
    assert {"twinkle-chat", "twinkle-cli", "twinkle-data"} <= index.successors_of(["Twinkle_Core"])
    assert not index.successors_of(["twinkle-losses"])


def test_the_index_reads_exports(tmp_path: Any) -> None:
    path = tmp_path / "acme.toml"
    path.write_text('schema = 1\n\n[[export]]\nmodule = "twinkle.loss"\nname = "smooth"\npackage = "twinkle-acme"\n')
    assert read_index(path) == []
