"""The command `twinkle`: help, lists, explanations and the doctor, over plugins made on the spot."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from twinkle.cli import main

Make = Callable[..., Path]

LOSSES = """
[[component]]
kind = "loss"
name = "AcmeLoss"
ref = "{package}.parts:AcmeLoss"
summary = "A loss for tests"
requires = ["numpy>=1", "surely-not-installed>=3"]
runtimes = ["local", "served"]
tenant_safe = true
inputs = {{ advantages = "float32[T]" }}

[[component]]
kind = "metric"
name = "AcmeMetric"
ref = "{package}.parts:AcmeMetric"
"""
PARTS = '''
"""Parts for tests."""
from twinkle.loss import Loss
from twinkle.metric import Metric


class AcmeLoss(Loss):
    def __init__(self, beta: float = 0.1, *rest: int) -> None: ...


class AcmeMetric(Metric):
    def __init__(self, width: int, name: str = "acme", **kwargs: object) -> None: ...
'''


def twinkle(*args: str) -> Result:
    result = CliRunner().invoke(main, args, prog_name="twinkle")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_help_lists_own_commands_and_those_of_plugins_without_importing_them(make_plugin: Make) -> None:
    make_plugin("acme_help", '[[command]]\nname = "shout"\nref = "acme_help.gone:main"\nsummary = "Says it loudly"\n')
    result = twinkle("--help")
    assert result.exit_code == 0
    for text in ("plugins", "run", "version", "shout", "Says it loudly"):
        assert text in result.output
    assert "acme_help.gone" not in sys.modules


def test_help_leaves_out_the_commands_of_disabled_plugins(make_plugin: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plugin("acme_off", '[[command]]\nname = "whisper"\nref = "acme_off.gone:main"\n')
    monkeypatch.setenv("TWINKLE_PLUGINS_DISABLE", "acme_off")
    assert "whisper" not in twinkle("--help").output


def test_a_plugins_command_gets_its_arguments_and_gives_the_exit_code(make_plugin: Make) -> None:
    source = "import click\ndef main(args):\n    click.echo(repr(args))\n    return 7\n"
    make_plugin("acme_plain", '[[command]]\nname = "plain"\nref = "acme_plain.cmd:main"\n', cmd=source)
    result = twinkle("plain", "--loud", "a", "--help")
    assert (result.output, result.exit_code) == ("['--loud', 'a', '--help']\n", 7)


def test_a_plugins_click_command_is_used_as_it_is(make_plugin: Make) -> None:
    source = """
        import click

        @click.command()
        @click.option("--times", default=1)
        def main(times):
            click.echo("hey " * times)
    """
    make_plugin("acme_click", '[[command]]\nname = "clicked"\nref = "acme_click.cmd:main"\n', cmd=source)
    assert twinkle("clicked", "--times", "2").output == "hey hey \n"


def test_a_plugins_command_that_cannot_be_imported_is_a_clean_error(make_plugin: Make) -> None:
    make_plugin("acme_gone", '[[command]]\nname = "gone"\nref = "acme_gone.gone:main"\n')
    result = twinkle("gone")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: command 'gone' of acme_gone: there is no module 'acme_gone.gone'")
    assert "Traceback" not in result.stderr


def test_own_commands_win_and_the_plugins_is_reached_by_its_full_name(make_plugin: Make) -> None:
    source = "import click\ndef main(args):\n    click.echo('mine')\n"
    make_plugin("acme_version", '[[command]]\nname = "version"\nref = "acme_version.cmd:main"\n', cmd=source)
    assert "acme_version/version" in twinkle("--help").output
    assert twinkle("acme_version/version").output == "mine\n"
    assert "python" in twinkle("version").output
    assert "twinkle-registry" in twinkle("version").output


def test_an_unknown_command_names_the_nearest() -> None:
    result = twinkle("plugin")
    assert result.exit_code == 2
    assert "no such command 'plugin'; nearest: 'plugins'" in result.stderr


def test_versions_are_told_for_people_and_programs() -> None:
    import twinkle as package

    assert package.__version__ in twinkle("--version").output
    found = json.loads(twinkle("version", "--json").output)
    assert found["twinkle"] == package.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["plugins"]["twinkle-core"] == package.__version__
    assert "plugin twinkle-core" in twinkle("version").output


def test_the_list_shows_what_each_plugin_offers_and_why_one_does_not_work(make_plugin: Make) -> None:
    make_plugin("acme_list", LOSSES, parts=PARTS)
    make_plugin("acme_bad", '[[component]]\nkind = "loss"\n')
    make_plugin("acme_old", "", core=">=9")
    plain = {found["name"]: found for found in json.loads(twinkle("plugins", "list", "--json").output)}
    assert plain["acme_list"]["kinds"] == {"loss": ["AcmeLoss"], "metric": ["AcmeMetric"]}
    assert plain["acme_list"]["status"] == "ok"
    assert plain["acme_bad"]["status"] == "broken"
    assert "name: missing" in plain["acme_bad"]["reason"]
    assert plain["acme_old"]["status"] == "incompatible"
    lines = twinkle("plugins", "list").output.splitlines()
    names = [line.split()[0] for line in lines]
    assert "loss 1, metric 1" in lines[names.index("acme_list")]
    assert "needs twinkle-core >=9" in lines[names.index("acme_old") + 1]


def test_the_list_of_a_kind_shows_each_name_with_its_plugin_and_summary(make_plugin: Make) -> None:
    make_plugin("acme_list", LOSSES, parts="raise SystemExit('nothing of a plugin is imported')")
    make_plugin("acme_old", LOSSES.replace("AcmeLoss", "AcmeOldLoss"), core=">=9")
    found = json.loads(twinkle("plugins", "list", "loss", "--json").output)
    assert {"AcmeLoss", "AcmeOldLoss", "CrossEntropyLoss"} <= {row["name"] for row in found}
    assert "AcmeMetric" not in {row["name"] for row in found}
    about = {"kind": "loss", "plugin": "acme_list", "status": "ok", "summary": "A loss for tests"}
    assert [row for row in found if row["plugin"] == "acme_list"] == [{"name": "AcmeLoss", **about}]
    lines = [line.split() for line in twinkle("plugins", "list", "loss").output.splitlines()]
    assert lines[0] == ["loss", "plugin", "summary"]
    assert ["AcmeLoss", "acme_list", "A", "loss", "for", "tests"] in lines
    assert ["AcmeOldLoss", "acme_old", "(incompatible)", "A", "loss", "for", "tests"] in lines


def test_the_list_of_a_kind_says_what_to_do_where_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no kind 'los'; nearest: 'loss'" in twinkle("plugins", "list", "los").stderr
    said = twinkle("plugins", "info", "loss").stderr
    assert "'loss' is a kind, not a name; all of that kind: twinkle plugins list loss" in said
    monkeypatch.setattr("twinkle._registry.registry", lambda: SimpleNamespace(records=[], kinds=("env",)))
    said = twinkle("plugins", "list", "env").output
    assert said == "no installed plugin offers any env; published ones: twinkle plugins search --kind env\n"


def test_info_tells_everything_of_a_component(make_plugin: Make) -> None:
    folder = make_plugin("acme_info", LOSSES, parts=PARTS)
    (found,) = json.loads(twinkle("plugins", "info", "AcmeMetric", "--json").output)
    assert (found["kind"], found["plugin"], found["version"]) == ("metric", "acme_info", "1.0")
    assert found["file"] == str(folder / "parts.py")
    assert found["line"] == PARTS.splitlines().index("class AcmeMetric(Metric):") + 1
    assert found["parameters"] == [
        {"name": "width", "type": "int", "default": None, "required": True, "meaning": ""},
        {"name": "name", "type": "str", "default": "'acme'", "required": False, "meaning": ""},
        {"name": "**kwargs", "type": "object", "default": None, "required": False, "meaning": ""},
    ]
    text = twinkle("plugins", "info", "acme_info/AcmeMetric").output
    assert "width: int" in text
    assert "name: str = 'acme'" in text


def test_info_explains_what_is_missing_and_still_finds_the_file(make_plugin: Make) -> None:
    folder = make_plugin("acme_needs", LOSSES, parts=PARTS)
    (found,) = json.loads(twinkle("plugins", "info", "loss:AcmeLoss", "--json").output)
    assert found["missing"] == ["surely-not-installed>=3 (not installed)"]
    assert found["parameters"] is None
    assert "pip install" in found["parameters_unknown_because"]
    assert found["file"] == str(folder / "parts.py")
    assert found["inputs"] == {"advantages": "float32[T]"}
    text = twinkle("plugins", "info", "AcmeLoss").output
    for expected in ("numpy>=1 (met)", "surely-not-installed>=3 (not installed)", "local, served", "safe to share"):
        assert expected in text


def test_info_tells_of_a_plugin_by_any_spelling(make_plugin: Make) -> None:
    make_plugin("acme_whole", LOSSES, parts=PARTS)
    text = twinkle("plugins", "info", "Acme-Whole").output
    assert "loss: AcmeLoss" in text
    assert "acme_whole 1.0" in text


def test_info_of_a_name_that_two_plugins_have_shows_both(make_plugin: Make) -> None:
    make_plugin("acme_one", LOSSES, parts=PARTS)
    make_plugin("acme_two", LOSSES, parts=PARTS)
    found = json.loads(twinkle("plugins", "info", "AcmeLoss", "--json").output)
    assert {plain["plugin"] for plain in found} == {"acme_one", "acme_two"}


def test_info_of_an_unknown_name_names_the_nearest(make_plugin: Make) -> None:
    make_plugin("acme_near", LOSSES, parts=PARTS)
    result = twinkle("plugins", "info", "AcmeLos")
    assert result.exit_code == 2
    assert "no plugin or component is called 'AcmeLos'; nearest: AcmeLoss" in result.stderr


def test_info_of_an_unknown_name_says_which_plugins_cannot_be_read(make_plugin: Make) -> None:
    make_plugin("acme_torn", '[[component]]\nkind = "loss"\n')
    result = twinkle("plugins", "info", "TornLoss")
    assert "acme_torn may offer it but cannot be read, see: twinkle plugins doctor" in result.stderr


def problems() -> dict[str, str]:
    """Return what the doctor says by kind; of what this installation lacks anyway, nothing."""
    result = twinkle("plugins", "doctor", "--json")
    found: dict[str, str] = {}
    for problem in json.loads(result.output):
        text = f"{problem['what']} -> {problem['remedy']}\n"
        if "acme" in text:
            found[problem["kind"]] = found.get(problem["kind"], "") + text
    assert result.exit_code == (1 if any(not problem["optional"] for problem in json.loads(result.output)) else 0)
    return found


@pytest.mark.full
def test_the_doctor_finds_everything_that_is_wrong(make_plugin: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plugin("acme_a", LOSSES, parts=PARTS)
    make_plugin("acme_b", LOSSES)
    make_plugin("acme_bad", '[[component]]\nkind = "los"\nname = "X"\nref = "a.b:C"\n')
    make_plugin("acme_old", "", core=">=9")
    make_plugin("acme_stale", None)
    make_plugin("acme_owner", "", record="twinkle/__init__.py,,\nacme_owner/__init__.py,,\n")
    monkeypatch.setenv("TWINKLE_PLUGINS_DISABLE", "acme_absent")
    found = problems()
    assert "nearest: 'loss'" in found["broken plugin"]
    assert "needs twinkle-core >=9" in found["incompatible plugin"]
    assert "pip uninstall acme_stale" in found["stale entry point"]
    assert "AcmeMetric" in found["duplicate provider"]
    assert "pip install 'surely-not-installed>=3'" in found["missing requirement"]
    assert "acme_b" in found["broken component"]
    assert "names 'acme_absent'" in found["settings"]
    assert "acme_owner 1.0 installs files into the package 'twinkle'" in found["second owner of twinkle/"]
    text = twinkle("plugins", "doctor").output
    assert text.endswith(" problems found\n")


@pytest.mark.full
def test_the_doctor_tells_an_author_all_of_a_manifest_at_once_and_where_it_is(make_plugin: Make) -> None:
    wrong = '[[component]]\nkind = "los"\nname = "X"\nref = "a.b:C"\nsumary = "?"\n'
    folder = make_plugin("acme_typo", wrong)
    found = problems()["broken plugin"]
    assert "unknown key, nearest: 'summary'" in found
    assert "unknown kind 'los', nearest: 'loss'" in found
    assert f"-> edit {folder / 'twinkle-plugin.toml'}" in found


@pytest.mark.full
def test_the_doctor_finds_hooks_that_are_not_there(make_plugin: Make) -> None:
    make_plugin("acme_hookless", "", core=">=0.1,<1")
    folder = make_plugin("acme_hooks", 'hooks = { module = "acme_hooks.gone", implements = ["twinkle_run_end"] }\n')
    assert "acme_hooks: its manifest has hooks.module = 'acme_hooks.gone'" in problems()["broken hooks"]
    (folder / "gone.py").write_text("")
    assert "broken hooks" not in problems()


def test_the_doctor_looks_for_modules_without_importing_their_parents(make_plugin: Make) -> None:
    refs = ("acme_deep.sub.there:A", "acme_deep.sub.absent:B", "acme_deep.space.there:C", "acme_deep.none.at.all:D")
    parts = [f'[[component]]\nkind = "optimizer"\nname = "{ref[-1]}"\nref = "{ref}"\n' for ref in refs]
    folder = make_plugin("acme_deep", "".join(parts))
    for file in ("sub/__init__.py", "sub/there.py", "space/there.py"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("A = C = 1\nraise RuntimeError('imported')\n")
    result = twinkle("plugins", "doctor", "--json")
    broken = [problem["what"] for problem in json.loads(result.output) if problem["kind"] == "broken component"]
    assert [text.split("'")[1] for text in broken] == ["B", "D"]
    assert "there is no module 'acme_deep.sub.absent'" in broken[0]
    assert "acme_deep" not in sys.modules


def test_a_preference_settles_a_duplicate(make_plugin: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plugin("acme_a", LOSSES, parts=PARTS)
    make_plugin("acme_b", LOSSES, parts=PARTS)
    monkeypatch.setenv("TWINKLE_PLUGINS_PREFER", "loss:AcmeLoss=acme_a,metric:AcmeMetric=acme_a")
    assert "duplicate provider" not in problems()


def test_wrong_settings_are_a_problem_to_the_doctor_and_an_error_to_others(
    make_plugin: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plugin("acme_settings", "")
    monkeypatch.setenv("TWINKLE_PLUGINS_DISABEL", "x")
    problem = json.loads(twinkle("plugins", "doctor", "--json").output)[0]
    assert "TWINKLE_PLUGINS_DISABEL: unknown environment variable" in problem["what"]
    result = twinkle("plugins", "list")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: TWINKLE_PLUGINS_DISABEL")


def test_a_setting_in_vain_is_one_plain_line(make_plugin: Make, tmp_path: Path) -> None:
    environ = {**os.environ, "TWINKLE_PLUGINS_DISABLE": "acme_absent", "TWINKLE_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "twinkle.cli", "plugins", "list"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr.startswith("Warning: ")
    assert result.stderr.count("\n") == 1
