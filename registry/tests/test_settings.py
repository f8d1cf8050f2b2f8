"""Plugins are switched off and preferred by a file and by the environment, and never in silence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle_registry import ComponentConflict, ComponentNotFound, Registry, Settings, SettingsError

TEXT = """
[plugins]
disable = ["acme-broken"]
only = ["acme-losses", "acme-broken"]
prefer = { "loss:CrossEntropyLoss" = "acme-losses" }
"""


def test_without_any_there_is_nothing_to_do() -> None:
    assert Settings.load({}) == Settings()


def test_the_file_in_the_working_directory_is_read(tmp_path: Path) -> None:
    file = tmp_path / "work" / "twinkle.toml"
    file.write_text(TEXT)
    settings = Settings.load({})
    assert settings.disabled == {"acme-broken"}
    assert settings.enabled_only == {"acme-losses", "acme-broken"}
    assert settings.prefer == {"loss:CrossEntropyLoss": "acme-losses"}
    assert settings.source("disable") == f"[plugins] disable of {file}"


def test_the_file_of_the_user_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    file = tmp_path / "home" / ".config" / "twinkle" / "twinkle.toml"
    file.parent.mkdir(parents=True)
    file.write_text('[plugins]\ndisable = ["home"]')
    assert Settings.load({}).disabled == {"home"}
    (tmp_path / "work" / "twinkle.toml").write_text('[plugins]\ndisable = ["work"]')
    assert Settings.load({}).disabled == {"work"}
    (tmp_path / "named.toml").write_text('[plugins]\ndisable = ["named"]')
    assert Settings.load({"TWINKLE_CONFIG": str(tmp_path / "named.toml")}).disabled == {"named"}


def test_the_environment_wins_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "work" / "twinkle.toml").write_text(TEXT)
    settings = Settings.load(
        {"TWINKLE_PLUGINS_DISABLE": "a, b,", "TWINKLE_PLUGINS_PREFER": "loss:X=acme, metric:Y = z"}
    )
    assert settings.disabled == {"a", "b"}
    assert settings.enabled_only == {"acme-losses", "acme-broken"}
    assert settings.prefer == {"loss:X": "acme", "metric:Y": "z"}
    assert settings.source("disable") == "TWINKLE_PLUGINS_DISABLE"
    assert Settings.load({"TWINKLE_PLUGINS_ONLY": "a"}).enabled_only == {"a"}


def test_an_empty_variable_unsets_what_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "work" / "twinkle.toml").write_text(TEXT)
    settings = Settings.load({"TWINKLE_PLUGINS_DISABLE": "", "TWINKLE_PLUGINS_ONLY": "", "TWINKLE_PLUGINS_PREFER": ""})
    assert settings == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[plugins]\ndisabled = []", "[plugins] disabled: unknown key, nearest: 'disable'"),
        ("[trsut]\ndeny = ['**']", "unknown table [trsut], nearest: [trust]"),
        ("[server]\nport = 1", "unknown table [server], known: [plugins], [trust]"),
        ("deny = ['**']\n[trust]", "deny: unknown key; every key must be in [plugins] or [trust]"),
        ("plugins = 1", "plugins must be a table, got 1"),
        ("[plugins]\ndisable = 'a'", "[plugins] disable must be a list of plugin names, got 'a'"),
        ("[plugins]\nonly = [1]", "[plugins] only must be a list of plugin names, got [1]"),
        ("[plugins]\nprefer = ['a']", '[plugins] prefer must be a table { "kind:Name" = "plugin" }, got'),
        (
            "[plugins]\nprefer = { X = 'a' }",
            "[plugins] prefer must have keys such as 'loss:GRPOLoss', got 'X'",
        ),
        ("[plugins", "cannot be read as TOML"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "work" / "twinkle.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as error:
        Settings.load({})
    assert str(error.value).startswith(str(file))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TWINKLE_PLUGINS_DISABEL": "a"}, "unknown environment variable, nearest: 'TWINKLE_PLUGINS_DISABLE'"),
        ({"TWINKLE_PLUGINS_PREFER": "loss:X"}, "TWINKLE_PLUGINS_PREFER must be kind:Name=plugin, got 'loss:X'"),
        ({"TWINKLE_PLUGINS_PREFER": "X=acme"}, "TWINKLE_PLUGINS_PREFER must have keys such as"),
        ({"TWINKLE_CONFIG": "absent.toml"}, "TWINKLE_CONFIG must be the path of a file, got 'absent.toml'"),
    ],
)
def test_a_wrong_variable_is_an_error_that_names_it(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        Settings.load(environ)
    assert message in str(error.value)


@pytest.fixture
def two(site: Any, table: Any, loss_source: str) -> None:
    for dist in ("acme-losses", "other-losses"):
        package = dist.replace("-", "_")
        site.plugin(dist, table("PlainLoss", f"{package}.loss:PlainLoss"), loss=loss_source.format(dist))


def test_a_disabled_plugin_offers_nothing_and_says_why(
    two: None, house: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINKLE_PLUGINS_DISABLE", "Acme_Losses,other-losses")
    registry = house()
    assert registry.names("loss") == []
    assert [(r.status, r.reason) for r in registry.records] == [("disabled", "disabled by TWINKLE_PLUGINS_DISABLE")] * 2
    with pytest.raises(ComponentNotFound) as error:
        registry.find("PlainLoss", "loss")
    assert str(error.value) == (
        "loss 'PlainLoss': plugin acme-losses offers it but is disabled: disabled by TWINKLE_PLUGINS_DISABLE"
    )


def test_disabling_one_of_two_providers_ends_the_conflict(two: None, house: Callable[..., Registry]) -> None:
    registry = house(settings=Settings(disabled=frozenset({"acme-losses"})))
    assert registry.find("PlainLoss", "loss").dist == "other-losses"


def test_only_the_enabled_ones_are_used_and_core(two: None, site: Any, house: Callable[..., Registry]) -> None:
    site.plugin("twinkle-core")
    registry = house(settings=Settings(enabled_only=frozenset({"acme-losses"}), sources={"only": "the test"}))
    assert {r.name: r.status for r in registry.records} == {
        "acme-losses": "ok",
        "other-losses": "disabled",
        "twinkle-core": "ok",
    }
    assert registry.records[1].reason == "not among the only plugins enabled by the test"


def test_a_preference_decides(two: None, house: Callable[..., Registry], tmp_path: Path) -> None:
    (tmp_path / "work" / "twinkle.toml").write_text('[plugins]\nprefer = { "loss:PlainLoss" = "other_losses" }')
    registry = house()
    assert registry.build("PlainLoss", "loss")({}) == "other-losses"
    assert registry.find("acme-losses/PlainLoss", "loss").dist == "acme-losses"


def test_a_preference_for_nobody_is_reported_and_decides_nothing(two: None, house: Callable[..., Registry]) -> None:
    settings = Settings(prefer={"loss:PlainLoss": "acme"}, sources={"prefer": "the test"})
    with pytest.warns(UserWarning, match="the test prefers 'acme' for 'loss:PlainLoss', but it is offered by"):
        registry = house(settings=settings)
    with pytest.raises(ComponentConflict, match=r"\(the test prefers 'acme', which does not offer it\)"):
        registry.find("PlainLoss", "loss")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            Settings(disabled=frozenset({"acme-loses"})),
            "names 'acme-loses', which is not an installed plugin; nearest: 'acme-losses'",
        ),
        (
            Settings(enabled_only=frozenset({"acme-losses", "nobody"})),
            "names 'nobody', which is not an installed plugin",
        ),
        (
            Settings(prefer={"loss:Absent": "acme-losses"}),
            "prefers 'acme-losses' for 'loss:Absent', but no plugin offers it",
        ),
        (Settings(prefer={"lost:PlainLoss": "acme-losses"}), "for 'lost:PlainLoss', but no plugin offers it"),
    ],
)
def test_settings_that_name_nobody_are_reported(
    two: None, house: Callable[..., Registry], settings: Settings, message: str
) -> None:
    with pytest.warns(UserWarning, match=message.replace("(", r"\(")):
        registry = house(settings=settings)
    assert any(message in notice for notice in registry.notices())
