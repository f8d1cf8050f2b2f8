"""Plugins add commands to `twinkle plugins` by a manifest's name of two words."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from twinkle.cli import main

Make = Callable[..., Path]
ENTRY = '[[command]]\nname = "{}"\nref = "{}.cmd:main"\nsummary = "Says it loudly"\n'
SOURCE = "import click\ndef main(args):\n    click.echo(repr(args))\n    return 7\n"


def twinkle(*args: str) -> Result:
    return CliRunner().invoke(main, args, prog_name="twinkle")


def test_the_command_is_in_the_group_and_not_at_the_top(make_plugin: Make) -> None:
    make_plugin("acme_group", ENTRY.format("plugins shout", "acme_group"), cmd=SOURCE)
    assert "Says it loudly" in twinkle("plugins", "--help").output
    assert "shout" not in twinkle("--help").output
    result = twinkle("plugins", "shout", "--loud")
    assert (result.output, result.exit_code) == ("['--loud']\n", 7)


def test_an_own_command_wins_and_the_plugins_has_its_full_name(make_plugin: Make) -> None:
    make_plugin("acme_list2", ENTRY.format("plugins list", "acme_list2"), cmd=SOURCE)
    assert "acme_list2" in twinkle("plugins", "list").output
    assert twinkle("plugins", "acme_list2/list", "x").output == "['x']\n"


@pytest.mark.filterwarnings("always")  # the command shows it as one line
def test_two_providers_are_both_reached_by_their_full_names(make_plugin: Make) -> None:
    for name in ("acme_one", "acme_two"):
        make_plugin(name, ENTRY.format("plugins shout", name), cmd=SOURCE)
    help_text = twinkle("plugins", "--help").output
    results = {name: twinkle("plugins", f"{name}/shout", "x") for name in ("acme_one", "acme_two")}
    for name, result in results.items():
        assert f"{name}/shout" in help_text
        assert result.stdout == "['x']\n"
    assert "use one of 'plugins acme_one/shout', 'plugins acme_two/shout'" in results["acme_one"].stderr
    assert twinkle("plugins", "shout").exit_code == 2


def test_an_unknown_command_names_the_nearest() -> None:
    result = twinkle("plugins", "lst")
    assert result.exit_code == 2
    assert "no such command 'lst'; nearest: 'list'" in result.stderr


def test_a_command_that_is_not_installed_says_which_package_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_PLUGINS_DISABLE", "twinkle-scaffolds")
    result = twinkle("plugins", "new", "loss", "acme-focal")
    assert result.exit_code == 2
    assert "`twinkle plugins new` is part of twinkle-scaffolds; run: pip install twinkle-scaffolds" in result.stderr


@pytest.mark.parametrize("name", ["run shout", "plugins  shout", "plugins a b"])
def test_other_groups_take_no_commands(name: str, make_plugin: Make) -> None:
    make_plugin("acme_other", ENTRY.format(name, "acme_other"), cmd=SOURCE)
    assert "such as 'report' or 'plugins report'" in twinkle("plugins", "list").output
