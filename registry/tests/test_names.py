"""From a name to one component: the nearest name, two providers, and plugins that cannot be used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle_registry import (
    CommandSpec,
    ComponentConflict,
    ComponentNotFound,
    ComponentSpec,
    ComponentTypeError,
    Manifest,
    PluginBroken,
    PluginIncompatible,
    PluginRecord,
    Registry,
    installed_plugins,
    nearest,
)

House = Callable[..., Registry]


def test_nearest_ignores_case_and_knows_parts() -> None:
    names = ["GRPOLoss", "PPOLoss", "CrossEntropyLoss", "Accuracy"]
    assert nearest("grpoloss", names)[0] == "GRPOLoss"
    assert nearest("grpoloss", ["GRPOLoss", "GRPOLoss"]) == ["GRPOLoss"]
    assert nearest("CrossEntropy", names)[0] == "CrossEntropyLoss"
    assert nearest("Entropy", names) == ["CrossEntropyLoss"]
    assert nearest("zzz", names) == []
    assert nearest("a", ["A", "a"]) == ["A", "a"]


def test_components_are_listed_by_kind_with_their_providers(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("L", "acme.a:L") + table("M", "acme.a:M", kind="metric"))
    site.plugin("other", table("L", "other.a:L") + table("K", "other.a:K"))
    registry = house()
    assert {name: [s.dist for s in specs] for name, specs in registry.specs("loss").items()} == {
        "L": ["acme", "other"],
        "K": ["other"],
    }
    assert registry.names("loss") == ["K", "L"]
    assert registry.names("hub") == []
    assert registry.kinds == ["loss", "metric", "optimizer", "hub"]
    registry.specs("loss").clear()
    assert registry.names("loss") == ["K", "L"]


def test_an_unknown_kind_names_the_nearest(house: House) -> None:
    registry = house()
    for call in (registry.specs, registry.names, lambda k: registry.find("x", k), lambda k: registry.resolve("x", k)):
        with pytest.raises(ComponentNotFound, match=r"there is no kind 'los'; nearest: 'loss'"):
            call("los")


def test_an_unknown_name_names_the_nearest(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("GRPOLoss", "acme.a:L") + table("PPOLoss", "acme.a:P"))
    with pytest.raises(ComponentNotFound) as error:
        house().find("GPROLoss", "loss")
    assert str(error.value) == "loss 'GPROLoss': no installed plugin offers it; nearest: 'GRPOLoss', 'PPOLoss'"
    assert isinstance(error.value, LookupError)


def test_an_unknown_name_lists_what_there_is_where_nothing_is_near(site: Any, table: Any, house: House) -> None:
    with pytest.raises(ComponentNotFound, match=r"; there are none$"):
        house().find("X", "loss")
    site.plugin("acme", "".join(table(f"Loss{i:02}", "acme.a:L") for i in range(15)))
    with pytest.raises(ComponentNotFound, match=r"known: 'Loss00', 'Loss01', .*'Loss11' and 3 more$"):
        house().find("X", "loss")


def test_a_name_of_another_kind_says_so(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("Accuracy", "acme.a:A", kind="metric"))
    with pytest.raises(ComponentNotFound, match="but 'Accuracy' is of kind metric"):
        house().find("Accuracy", "loss")


def test_a_plugin_can_be_named(site: Any, table: Any, house: House) -> None:
    site.plugin("acme-losses", table("L", "acme_losses.a:L"))
    site.plugin("other", table("K", "other.a:K"))
    registry = house()
    assert registry.find("acme-losses/L", "loss").dist == "acme-losses"
    assert registry.find("Acme_Losses/L", "loss").dist == "acme-losses"
    with pytest.raises(ComponentNotFound) as error:
        registry.find("acme-loses/L", "loss")
    assert str(error.value) == (
        "loss 'acme-loses/L': no plugin 'acme-loses' is installed; nearest: 'acme-losses'; "
        "if it is a package that you trust, install it first"
    )
    with pytest.raises(ComponentNotFound, match=r"plugin 'other' offers no such loss; known: 'K'"):
        registry.find("other/L", "loss")


def test_two_providers_are_a_conflict_with_three_ways_out(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("L", "acme.a:L"))
    site.plugin("other", table("L", "other.a:L"))
    with pytest.raises(ComponentConflict) as error:
        house().resolve("L", "loss")
    assert str(error.value) == (
        "loss 'L' is offered by acme and other; write 'acme/L', "
        'or set [plugins] prefer = { "loss:L" = "acme" } in twinkle.toml, '
        "or disable one: TWINKLE_PLUGINS_DISABLE=other"
    )


def test_a_broken_plugin_raises_its_reason_and_breaks_nobody_else(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("L", "acme.a:L", kind="lost"))
    site.plugin("other", table("K", "other.a:K"))
    registry = house()
    assert {r.name: r.status for r in registry.records} == {"acme": "broken", "other": "ok"}
    reason = "component 'L' is of the unknown kind 'lost', nearest: 'loss'"
    assert reason in registry.records[0].reason
    assert registry.names("loss") == ["K"]


def test_a_component_of_a_broken_plugin_raises_the_reason(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("L", "acme.a:L") + table("M", "acme.a:M", kind="lost"))
    registry = house()
    for name in ("L", "acme/L"):
        with pytest.raises(PluginBroken) as error:
            registry.find(name, "loss")
        assert str(error.value).startswith(f"loss {name!r}: plugin acme offers it but is broken: ")
        assert "component 'M' is of the unknown kind 'lost', nearest: 'loss'" in str(error.value)
        assert isinstance(error.value.__cause__, PluginBroken)


def test_a_plugin_without_a_manifest_is_named_among_those_that_may_offer_it(site: Any, house: House) -> None:
    for i in range(4):
        site.metadata(f"acme-{i}", entry=f"acme_gone_{i}")
    registry = house()
    with pytest.raises(ComponentNotFound) as error:
        registry.find("L", "loss")
    short = "acme-0, acme-1, acme-2 and 1 more may offer it but cannot be read, see: twinkle plugins doctor"
    assert str(error.value).endswith(short)
    with pytest.raises(PluginBroken, match=r"loss 'acme-1/L': plugin acme-1 is broken: package 'acme_gone_1' cannot"):
        registry.find("acme-1/L", "loss")


def test_a_plugin_for_another_core_raises_what_to_do(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("L", "acme.a:L") + table("N", "acme.a:N", kind="new_kind"), core=">=2")
    registry = house()
    assert [r.status for r in registry.records] == ["incompatible"]
    with pytest.raises(PluginIncompatible) as error:
        registry.find("L", "loss")
    assert "plugin acme 1.0 needs twinkle-core >=2, but 0.1.0 is installed" in str(error.value)
    assert "run: pip install -U 'acme'" in str(error.value)
    assert house(core_version="2.1").records[0].status == "broken"


def test_a_usable_provider_wins_over_one_that_is_not(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("L", "acme.a:L"), core=">=2")
    site.plugin("other", table("L", "other.a:L"))
    assert house().find("L", "loss").dist == "other"


def test_two_plugins_of_one_name_are_told_apart(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("L", "acme.a:L"))
    manifest = site.plugin("zeta", table("Z", "zeta.a:Z"))
    manifest.write_text(manifest.read_text().replace('name = "zeta"', 'name = "Acme"'))
    registry = house()
    assert [r.status for r in registry.records] == ["ok", "broken"]
    reason = registry.records[1].reason
    assert reason.startswith(f"{manifest}: the name 'Acme' of this plugin (distribution zeta 1.0) is taken by acme 1.0")
    assert f"at {registry.records[0].location}" in reason


def claim(manifest: Path, name: str) -> None:
    head, _, rest = manifest.read_text().partition('name = "')
    manifest.write_text(f'{head}name = "{name}"{rest.partition(chr(34))[2]}')


@pytest.mark.parametrize("pretender", ["psame", "zsame"])
def test_a_name_belongs_to_the_distribution_that_bears_it(
    pretender: str, site: Any, table: Any, house: House, loss_source: str
) -> None:
    site.plugin("puni", table("Real", "puni.a:PlainLoss"), a=loss_source)
    manifest = site.plugin(pretender, table("False", f"{pretender}.a:PlainLoss"), a=loss_source)
    claim(manifest, "puni")
    registry = house()
    assert {r.dist: r.status for r in registry.records} == {"puni": "ok", pretender: "broken"}
    assert registry.names("loss") == ["Real"]
    assert registry.resolve("puni/Real", "loss").__module__ == "puni.a"
    with pytest.raises(PluginBroken, match=rf"distribution {pretender} 1.0\) is taken by puni 1.0 at "):
        registry.find("False", "loss")


def test_a_pretender_that_was_used_already_loses_its_components_and_hooks(
    site: Any, table: Any, house: House, loss_source: str
) -> None:
    hooks = "import twinkle_registry\n@twinkle_registry.hookimpl\ndef twinkle_run_end(run): return '{}'\n"
    registry = house()
    declared = 'hooks = {{ module = "{0}.hooks", implements = ["twinkle_run_end"] }}\n'
    for name in ("psame", "puni"):
        body = declared.format(name) + table(name.title(), f"{name}.a:PlainLoss")
        claim(site.plugin(name, body, a=loss_source, hooks=hooks.format(name)), "puni")
    early, real = installed_plugins()
    registry.add(early)
    assert registry.names("loss") == ["Psame"]
    assert registry.hook("twinkle_run_end")(run=None).results == {"puni": "psame"}
    registry.add(real)
    assert registry.names("loss") == ["Puni"]
    assert registry.hook("twinkle_run_end")(run=None).results == {"puni": "puni"}


def test_where_the_owner_of_a_name_cannot_be_used_another_may_have_it(site: Any, table: Any, house: House) -> None:
    site.plugin("puni", table("L", "puni.a:L"), core=">=2")
    claim(site.plugin("psame", table("L", "psame.a:L")), "puni")
    assert {r.dist: r.status for r in house().records} == {"psame": "ok", "puni": "incompatible"}


def test_an_unknown_hook_in_a_manifest_breaks_the_plugin(site: Any, house: House) -> None:
    site.plugin("acme", 'hooks = { module = "acme.hooks", implements = ["twinkle_step_ended"] }')
    assert "there is no hook 'twinkle_step_ended', nearest: 'twinkle_step_end'" in house().records[0].reason


def test_a_record_from_elsewhere_goes_through_the_same_door(house: House) -> None:
    registry = house()
    component = ComponentSpec("loss", "L", "house_hookspecs:twinkle_loss", dist="folder")
    record = PluginRecord("./folder", "", "folder", "", Manifest(1, ">=0.1", "folder", (component,)))
    assert registry.add(record) is registry.add(record)
    assert registry.find("folder/L", "loss") is component
    assert registry.find("L", "loss") is component
    newer = PluginRecord("./new", "", "new", "", Manifest(1, ">=9", "new"))
    assert registry.add(newer).status == "incompatible"


def test_loading_twice_changes_nothing(site: Any, table: Any, house: House) -> None:
    site.plugin("acme", table("L", "acme.a:L"))
    site.metadata("gone", entry="gone_package")
    registry = house()
    registry.load_installed()
    assert [r.dist for r in registry.records] == ["acme", "gone"]
    assert registry.find("L", "loss").dist == "acme"


def test_a_plugin_added_later_is_seen(site: Any, table: Any, house: House) -> None:
    registry = house()
    assert registry.names("loss") == []
    site.plugin("acme", table("L", "acme.a:L"))
    registry.load_installed()
    assert registry.names("loss") == ["L"]


def test_commands_are_listed_without_imports(site: Any, house: House) -> None:
    bench = '[[command]]\nname = "bench"\nref = "acme.cmd:bench"\nsummary = "Time it"\n'
    site.plugin("acme", bench)
    registry = house()
    assert registry.commands() == {"bench": CommandSpec("bench", "acme.cmd:bench", "Time it", "acme")}
    site.plugin("other", bench)
    with pytest.warns(UserWarning, match="use one of 'acme/bench', 'other/bench'"):
        registry = house()
    assert list(registry.commands()) == ["acme/bench", "other/bench"]


def test_a_kind_without_a_hook_spec_is_a_mistake_of_core(hookspecs: Any) -> None:
    registry = Registry(hookspecs, kinds={"loss": None, "reward": None}, core_version="0.1")
    with pytest.raises(
        ComponentTypeError, match=r"house_hookspecs has no hook spec twinkle_<kind> for the kinds 'reward'"
    ):
        registry.names("loss")


@pytest.mark.parametrize(
    ("asked", "known", "found"),
    [
        ("learning_rate", ["name", "lr", "args"], "lr"),
        ("rank", ["rank_pattern", "r", "target_modules"], "r"),
        ("lr", ["learning_rate", "l"], "learning_rate"),
    ],
)
def test_initials_are_the_nearest_name(asked: str, known: list[str], found: str) -> None:
    assert nearest(asked, known, 1) == [found]
