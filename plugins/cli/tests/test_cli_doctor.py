"""The doctor: stale installations, clashes, extras, the lock, and the line of a manifest that is wrong."""

import json
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from twinkle._registry import registry
from twinkle.cli import main
from twinkle_cli.doctor import examine
from twinkle_cli.manifest_lines import with_lines
from twinkle_registry import ManifestError, read_manifest

Make = Callable[..., Path]


def found(kind: str) -> list[str]:
    return [f"{problem.what} -> {problem.remedy}" for problem in examine() if problem.kind == kind]


def info_of(folder: Path, package: str) -> Path:
    return folder.parent / f"{package}-1.0.dist-info"


@pytest.mark.full
def test_an_editable_install_whose_folder_is_gone_is_one_problem(make_plugin: Make, tmp_path: Path) -> None:
    folder = make_plugin("acme_moved", None)
    gone = tmp_path / "gone away"
    said = {"url": gone.as_uri(), "dir_info": {"editable": True}}
    direct = tmp_path / "site" / "acme_moved-1.0.dist-info" / "direct_url.json"
    direct.write_text(json.dumps(said))
    (problem,) = found("stale editable install")
    assert problem.startswith(
        f"acme_moved 1.0 was installed as editable from {gone}, which no longer exists -> run pip install -e"
    )
    assert [text for text in found("stale entry point") if "acme" in text] == []
    gone.mkdir()
    assert found("stale editable install") == []
    assert len(found("stale entry point")) == 1
    direct.write_text("not json")
    assert found("stale editable install") == []
    assert folder.name == "acme_moved"


def test_a_path_file_that_leads_nowhere_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    lines = ["# a comment", "import sys", "there", "", str(tmp_path / "nowhere"), "sub/../there"]
    (tmp_path / "acme.pth").write_text("\n".join(lines))
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    assert found("stale path file") == [
        f"{tmp_path / 'acme.pth'} adds {tmp_path / 'nowhere'} to sys.path, which does not exist -> "
        f"reinstall the package that it belongs to, or remove {tmp_path / 'acme.pth'}"
    ]


@pytest.mark.full
def test_packages_that_clash_with_ours_or_a_plugins_are_told(make_plugin: Make) -> None:
    folder = make_plugin("acme_first", "")
    kit = make_plugin("other_kit", "", record="twinkle/__init__.py,,\ntwinkle/loss.py,,\nacme_first/__init__.py,,\n")
    (info_of(kit, "other_kit") / "entry_points.txt").write_text("[console_scripts]\ntwinkle = twinkle.cli:main\n")
    assert len(found("second owner of twinkle/")) == 1
    (clash,) = found("second owner of acme_first/")
    assert clash.startswith(
        "other_kit 1.0 installs files into the package 'acme_first', which belongs to acme_first -> "
    )
    (command,) = found("second command twinkle")
    assert (
        "other_kit 1.0 installs a command 'twinkle', which belongs to twinkle-cli -> pip uninstall other_kit" in command
    )
    assert folder.is_dir()


NEEDY = """
[[component]]
kind = "loss"
name = "{name}"
ref = "{package}.parts:X"
requires = ["{requires}"]
"""


def test_a_missing_requirement_names_the_smallest_extra_that_brings_it(make_plugin: Make) -> None:
    wanted = [("A", "surely-not-there>=3"), ("B", "nor-this"), ("C", "twinkle-data[gguf]>=9")]
    parts = "".join(NEEDY.replace("{name}", name).replace("{requires}", text) for name, text in wanted)
    folder = make_plugin("acme_extra", parts, parts="X = 1")
    with (info_of(folder, "acme_extra") / "METADATA").open("a") as file:
        file.write("Provides-Extra: all\nRequires-Dist: Surely_Not.There>=3; extra == 'all'\n")
        file.write("Requires-Dist: click; extra == 'all'\nProvides-Extra: dev\n")
        file.write("Requires-Dist: Surely_Not.There>=3; extra == 'far'\nProvides-Extra: far\n")
    assert [text.partition(" -> ")[2] for text in found("missing requirement") if "acme_extra" in text] == [
        "pip install 'nor-this'",
        "pip install 'twinkle-data[gguf]>=9'",
    ]
    assert [text for text in found("missing extra") if "acme_extra" in text] == [
        "A of acme_extra needs surely-not-there>=3 (not installed) -> pip install 'acme_extra[far]'"
    ]


@pytest.mark.full
def test_an_extra_that_is_not_installed_is_no_problem_and_a_wrong_version_is(make_plugin: Make) -> None:
    folder = make_plugin("acme_choice", NEEDY.replace("{name}", "A").replace("{requires}", "click>=99"))
    with (info_of(folder, "acme_choice") / "METADATA").open("a") as file:
        file.write("Provides-Extra: cli\nRequires-Dist: click>=99; extra == 'cli'\n")
    (folder / "parts.py").write_text("")
    (wrong,) = [text for text in found("missing requirement") if "acme_choice" in text]
    assert wrong.endswith(") -> pip install 'acme_choice[cli]'")
    manifest = folder / "twinkle-plugin.toml"
    manifest.write_text(manifest.read_text().replace("click>=99", "acme-telescope>=99"))
    with (info_of(folder, "acme_choice") / "METADATA").open("a") as file:
        file.write("Requires-Dist: acme-telescope; extra == 'cli'\n")
    registry.cache_clear()
    assert [text for text in found("missing requirement") if "acme_choice" in text] == []
    done = CliRunner().invoke(main, ["plugins", "doctor"])
    assert "missing extra: A of acme_choice needs acme-telescope>=99 (not installed)" in done.stdout
    others = [problem for problem in examine() if not problem.optional]
    assert done.exit_code == (1 if others else 0)
    assert done.stdout.endswith(f"{len(others)} problem{'' if len(others) == 1 else 's'} found\n")


@pytest.mark.full
def test_the_lock_is_verified_where_there_is_one(
    make_plugin: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plugin("acme_locked", "")
    monkeypatch.setenv("TWINKLE_LOCK", str(tmp_path / "twinkle.lock"))
    assert found("lock") == []
    mine = tmp_path / "mine.py"
    mine.write_text("x = 1\n")
    added = CliRunner().invoke(main, ["plugins", "add", str(mine), "--yes"])
    assert added.exit_code == 0, added.output
    assert found("lock") == []
    mine.write_text("x = 2\n")
    (problem,) = found("lock")
    assert problem.startswith("file mine.py: it was changed since it was locked")
    (tmp_path / "twinkle.lock").write_text("schema = 3")
    (problem,) = found("lock")
    assert "schema = 3, but this version reads" in problem


@pytest.mark.full
def test_a_wrong_policy_is_a_problem_before_any_code_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text, message in (
        ('[trust]\nalow = ["hf://a/*"]', "[trust] alow: unknown key, nearest: 'allow'"),
        ('[trust]\ndeny = ["hf//x"]', "[trust] deny must be a pattern such as 'hf://org/*'"),
        ('[trsut]\ndeny = ["**"]', "unknown table [trsut], nearest: [trust]"),
    ):
        Path("twinkle.toml").write_text(text)
        registry.cache_clear()
        (problem,) = found("settings")
        assert f"twinkle.toml: {message}" in problem
        assert CliRunner().invoke(main, ["plugins", "doctor"]).exit_code == 1
    Path("twinkle.toml").unlink()
    registry.cache_clear()
    assert found("settings") == []


def test_a_frozen_run_says_what_it_leaves_out(
    make_plugin: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plugin("acme_cold", "")
    monkeypatch.setenv("TWINKLE_LOCK", str(tmp_path / "twinkle.lock"))
    monkeypatch.setenv("TWINKLE_FROZEN", "1")
    assert any("acme_cold" in text and "twinkle plugins lock" in text for text in found("disabled plugin"))


MANIFEST = '''schema = "1"
core = ">=0.1,<1"
name = "acme"
hooks = { module = "acme hooks", implements = ["twinkle_run_end"] }
colour = [
  "kind = 1",  # ] no end
  "]",
]

# [[component]] is not one here
[[component]]
kind = "loss"
name = "A"
ref = "acme.a:A"
summary = """
kind = 7
name = "not me"
"""
requires = ["torch>=2.6", 3]

[[ component ]]  # the second
kind = "metric"
name = "B \\" ["
"runtimes" = "local"

[[command]]
name = "c"
ref = "a b"
'''


def test_every_problem_of_a_manifest_gets_its_line(tmp_path: Path) -> None:
    file = tmp_path / "twinkle-plugin.toml"
    file.write_text(MANIFEST)
    with pytest.raises(ManifestError) as error:
        read_manifest(file, "acme", "1.0")
    told = with_lines(str(error.value), str(file)).splitlines()[1:]
    keys = [line.split(": ")[1].partition(" must be ")[0].rpartition(".")[2] for line in told]
    numbers = {key: int(line.split()[1].rstrip(":")) for key, line in zip(keys, told, strict=True)}
    lines = MANIFEST.splitlines()
    expected = {
        "schema": lines.index('schema = "1"') + 1,
        "colour": lines.index("colour = [") + 1,
        "module": 4,
        "requires": lines.index('requires = ["torch>=2.6", 3]') + 1,
        "runtimes": lines.index('"runtimes" = "local"') + 1,
    }
    assert {key: numbers[key] for key in expected} == expected
    missing = next(line for line in told if "component #2" in line and "ref: missing" in line)
    assert missing.split()[1] == f"{lines.index('[[ component ]]  # the second') + 1}:"
    command = next(line for line in told if "command #1" in line)
    assert command.split()[1] == f"{len(lines)}:"


@pytest.mark.parametrize("text", ["", "]]]", '"""', "a = '''", "[[component", "x = [[[", "= = =\n\x00", "[a]\n" * 3])
def test_a_torn_manifest_stops_nobody(text: str, tmp_path: Path) -> None:
    file = tmp_path / "twinkle-plugin.toml"
    file.write_text(text)
    reason = f"{file}: 2 problems\n  name: missing\n  component #4 'X'.kind: missing\n  hooks.module: missing"
    assert with_lines(reason, str(file)).count("\n") == 3
    assert with_lines(reason, str(tmp_path / "absent")) == reason


def test_the_doctor_names_the_line_to_edit(make_plugin: Make) -> None:
    folder = make_plugin("acme_typo", '[[component]]\nkind = "los"\nname = "X"\nref = "a.b:C"\nsumary = "?"\n')
    (problem,) = found("broken plugin")
    assert "line 8: component #1 'X'.sumary: unknown key, nearest: 'summary'" in problem
    assert "line 5: component 'X' is of the unknown kind 'los', nearest: 'loss'" in problem
    assert f"-> edit {folder / 'twinkle-plugin.toml'}:8, or report it to its author" in problem


def test_a_hook_that_does_not_exist_has_a_line_too(make_plugin: Make) -> None:
    make_plugin("acme_hooks", 'hooks = { module = "acme_hooks", implements = ["twinkle_step_ended"] }\n')
    (problem,) = found("broken plugin")
    assert "line 4: hooks: there is no hook 'twinkle_step_ended', nearest: 'twinkle_step_end'" in problem


@pytest.mark.full
def test_nothing_is_imported_for_an_examination(make_plugin: Make, tmp_path: Path) -> None:
    make_plugin("acme_loud", NEEDY.replace("{name}", "A").replace("{requires}", "numpy"), parts="raise SystemExit(9)")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "from twinkle_cli.doctor import examine; examine()\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'transformers', 'acme_loud'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_problems_in_one_line_get_theirs_each(make_plugin: Make) -> None:
    parts = "".join(f'[[component]]\nkind = "los{n}"\nname = "X{n}"\nref = "a.b:C"\n' for n in (7, 8))
    make_plugin("acme_kinds", parts)
    (problem,) = found("broken plugin")
    assert "line 5: component 'X7' is of the unknown kind" in problem
    assert "; line 9: component 'X8' is of the unknown kind" in problem
    assert "twinkle-plugin.toml:5, or report" in problem
