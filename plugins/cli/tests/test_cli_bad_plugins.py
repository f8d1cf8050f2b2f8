"""What people get wrong in a plugin: each is told wherever it is looked for, and costs nobody else."""

import json
import os
import py_compile
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from twinkle._registry import registry
from twinkle.cli import main
from twinkle.errors import ComponentConflict, PluginBroken, PluginIncompatible, TwinkleError

Make = Callable[..., Path]
LOSS = '\n[[component]]\nkind = "loss"\nname = "AcmeLoss"\nref = "{package}.parts:AcmeLoss"\n'
WHOLE = "from twinkle.loss import Loss\n\n\nclass AcmeLoss(Loss):\n    def __call__(self, inputs, outputs): ...\n"


@pytest.fixture(autouse=True)
def neighbour(make_plugin: Make) -> None:
    """A whole plugin, which must work in any case."""
    make_plugin("acme_neighbour", LOSS.replace('"AcmeLoss"', '"NeighbourLoss"'), parts=WHOLE)


def told(*args: str) -> str:
    return CliRunner().invoke(main, ["plugins", *args]).output


def used(error: type[TwinkleError]) -> str:
    with pytest.raises(error) as raised:
        registry().resolve("AcmeLoss", "loss")
    assert registry().resolve("NeighbourLoss", "loss").__name__ == "AcmeLoss"
    return str(raised.value)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("old", "new", "line", "text"),
    [
        ("ref = ", "reff = ", 8, "component #1 'AcmeLoss'.reff: unknown key, nearest: 'ref'"),
        ('kind = "loss"', "kind = 3", 6, "component #1 'AcmeLoss'.kind must be a kind such as 'loss', got 3 (int)"),
        ('kind = "loss"', 'kind = "lsos"', 6, "component 'AcmeLoss' is of the unknown kind 'lsos', nearest: 'loss'"),
        ("schema = 1", 'schema = "1"', 1, "schema must be the number 1, got '1' (str)"),
        ('ref = "acme_bad.parts:AcmeLoss"', 'ref = "bad plugin"', 8, "component #1 'AcmeLoss'.ref must be"),
    ],
)
def test_a_wrong_manifest(old: str, new: str, line: int, text: str, make_plugin: Make) -> None:
    folder = make_plugin("acme_bad", LOSS, parts=WHOLE)
    manifest = folder / "twinkle-plugin.toml"
    manifest.write_text(manifest.read_text().replace(old, new))
    registry.cache_clear()
    (row,) = [row for row in json.loads(told("list", "--json")) if row["dist"] == "acme_bad"]
    assert (row["status"], text in row["reason"]) == ("broken", True)
    doctor = told("doctor")
    assert f"line {line}: {text}" in doctor
    assert f"edit {manifest}:" in doctor
    with pytest.raises(TwinkleError, match=r"acme_bad") as raised:
        registry().resolve("acme_bad/AcmeLoss", "loss")
    assert text in str(raised.value)


def test_several_problems_are_told_apart_with_their_lines(make_plugin: Make) -> None:
    folder = make_plugin("acme_bad", LOSS.replace("loss", "lsos"), parts=WHOLE)
    manifest = folder / "twinkle-plugin.toml"
    manifest.write_text(manifest.read_text().replace("ref = ", "reff = "))
    registry.cache_clear()
    problems = [
        "line 8: component #1 'AcmeLoss'.reff: unknown key, nearest: 'ref'",
        "line 5: component #1 'AcmeLoss'.ref: missing",
        "line 6: component 'AcmeLoss' is of the unknown kind 'lsos', nearest: 'loss'",
    ]
    assert f"{manifest} (of acme_bad): 3 problems: {'; '.join(problems)}\n" in told("list")
    assert all(problem in told("info", "acme_bad") for problem in problems)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("core", "update"),
    [(">=9", "'twinkle-core>=9'"), ("<0.1", "'twinkle-core<0.1'"), (">=0.1,<0.1.0", "'twinkle-core>=0.1,<0.1.0'")],
)
def test_a_plugin_for_a_newer_or_an_older_core(core: str, update: str, make_plugin: Make) -> None:
    make_plugin("acme_bad", LOSS, core=core, parts=WHOLE)
    way = f"needs twinkle-core {core}, but 0.1.0 is installed; run: pip install -U 'acme_bad' or pip install {update}"
    assert way in told("list")
    assert f"incompatible plugin: acme_bad: plugin acme_bad 1.0 {way}" in told("doctor")
    assert way in used(PluginIncompatible)


@pytest.mark.full
def test_two_providers_of_a_name(make_plugin: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plugin("acme_bad", LOSS, parts=WHOLE)
    make_plugin("acme_worse", LOSS, parts=WHOLE)
    text = (
        "loss 'AcmeLoss' is offered by acme_bad and acme_worse; write 'acme_bad/AcmeLoss', "
        'or set [plugins] prefer = { "loss:AcmeLoss" = "acme_bad" } in twinkle.toml, '
        "or disable one: TWINKLE_PLUGINS_DISABLE=acme_worse"
    )
    assert f"duplicate provider: {text}" in told("doctor")
    assert used(ComponentConflict) == text
    assert registry().resolve("acme_bad/AcmeLoss", "loss").__module__ == "acme_bad.parts"
    for name, value in (("PREFER", "loss:AcmeLoss=acme_worse"), ("DISABLE", "acme_bad")):
        monkeypatch.setenv(f"TWINKLE_PLUGINS_{name}", value)
        registry.cache_clear()
        assert registry().resolve("AcmeLoss", "loss").__module__ == "acme_worse.parts"
        monkeypatch.delenv(f"TWINKLE_PLUGINS_{name}")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("source", "text"),
    [
        (None, "there is no module 'acme_bad.parts', but its manifest names 'acme_bad.parts:AcmeLoss'"),
        ("class AcmeLos: ...", "acme_bad.parts has no 'AcmeLoss'; nearest: 'AcmeLos'"),
        ("raise ValueError('no licence key')", "importing acme_bad.parts failed: ValueError: no licence key"),
        ("raise SystemExit(3)", "importing acme_bad.parts failed: SystemExit: 3"),
        ("def f(:", "importing acme_bad.parts failed: SyntaxError: "),
        ("import acme_telescope.lens", "it needs the module 'acme_telescope', which is not installed"),
        ("from .lens import x", "it needs the module 'acme_bad.lens', which is not part of it"),
    ],
)
def test_a_ref_that_cannot_be_imported(source: str | None, text: str, make_plugin: Make) -> None:
    make_plugin("acme_bad", LOSS, **({} if source is None else {"parts": source}))
    assert text in used(PluginBroken)
    assert text in told("info", "AcmeLoss")
    assert {row["status"] for row in json.loads(told("list", "--json")) if row["dist"] == "acme_bad"} == {"ok"}
    promised = "broken component: loss 'AcmeLoss' of acme_bad: its manifest has ref = 'acme_bad.parts:AcmeLoss'"
    assert (promised in told("doctor")) == (source != "def f(:")  # nobody can tell what that would bind


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("source", "is_told"),
    [
        ("class AcmeLos: ...", True),
        ("", True),
        ("'AcmeLoss'", True),
        ("from .other import AcmeLoss", False),
        ("from .other import *", False),
        ("if 1 > 2:\n    from x import y as AcmeLoss", False),
        ("for AcmeLoss in (): ...", False),
        ("def __getattr__(name): return int", False),
        ("globals()['Acme' + 'Loss'] = int", False),
    ],
)
def test_the_doctor_finds_a_name_that_a_module_never_binds(source: str, is_told: bool, make_plugin: Make) -> None:
    make_plugin("acme_bad", LOSS, parts=source)
    assert ("but acme_bad.parts has no 'AcmeLoss'" in told("doctor")) == is_told
    assert "acme_bad.parts" not in sys.modules


def test_a_plugin_that_lacks_what_it_needs_is_listed_with_what_that_is(make_plugin: Make) -> None:
    needs = [["numpy", "acme-telescope>=3"], ["acme.telescope>=3", "other; python_version < '3'"], ["click[x]>=1"]]
    parts = [LOSS.replace('"AcmeLoss"', f'"Loss{i}"') + f"requires = {json.dumps(needs[i])}\n" for i in range(3)]
    make_plugin("acme_bad", "".join(parts), parts=WHOLE)
    (row,) = [row for row in json.loads(told("list", "--json")) if row["name"] == "acme_bad"]
    assert (row["status"], row["lacks"]) == ("ok", ["acme-telescope>=3", "acme.telescope>=3"])
    lines = told("list").splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("acme_bad "))
    assert lines[place + 1].startswith(
        "  not installed, but required by some components: acme-telescope>=3, acme.telescope>=3; see"
    )
    assert "lacks" in told("info", "acme_bad")


@pytest.mark.sample(2)
@pytest.mark.parametrize("source", ["class AcmeLoss\n    pass\n", "return 1\n", "x = '\0'\n"])
def test_a_module_that_is_not_python(source: str, make_plugin: Make) -> None:
    folder = make_plugin("acme_bad", LOSS, parts=WHOLE)
    (folder / "parts.py").write_text(source)
    registry.cache_clear()
    result = CliRunner().invoke(main, ["plugins", "doctor"])
    assert result.exit_code == 1
    assert f"broken module: acme_bad: {folder / 'parts.py'}" in result.output
    assert "; AcmeLoss cannot be imported" in result.output
    (component,) = json.loads(told("info", "AcmeLoss", "--json"))
    assert component["status"] == "broken"
    assert "importing acme_bad.parts failed: " in component["reason"]
    (plugin,) = json.loads(told("info", "acme_bad", "--json"))
    assert [line.partition(":")[0] for line in plugin["broken"]] == ["AcmeLoss"]
    assert "but parts of it are broken" in told("info", "acme_bad")


@pytest.mark.full
def test_bytecode_speaks_for_its_own_source_alone(make_plugin: Make) -> None:
    folder = make_plugin("acme_bad", LOSS, parts=WHOLE)
    part, first = folder / "parts.py", f"broken module: acme_bad: {folder / 'parts.py'}"
    py_compile.compile(str(part), invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    assert first not in told("doctor")
    part.write_text(f"{WHOLE}def f(:\n")  # of another size than the bytecode is for
    assert first in told("doctor")
    part.write_text(WHOLE)
    os.utime(part, (1.0, 1.0))  # of another time
    damaged = part.read_text().replace("class", "klass")  # of the same size
    part.write_text(damaged)
    os.utime(part, (1.0, 1.0))
    assert first in told("doctor")


@pytest.mark.full
def test_a_part_that_no_manifest_names_is_found_too(make_plugin: Make) -> None:
    folder = make_plugin("acme_bad", LOSS, parts=f"from . import inner\n{WHOLE}")
    (folder / "inner.py").write_text("def f(:\n")
    registry.cache_clear()
    assert f"broken module: acme_bad: {folder / 'inner.py'}:1: SyntaxError: " in told("doctor")
    assert "importing acme_bad.parts failed: SyntaxError" in told("info", "AcmeLoss")


@pytest.mark.timeout(60)  # a reader that waits for the pipe would wait for ever
def test_a_pipe_among_the_files_of_a_plugin_is_told_and_not_opened(make_plugin: Make) -> None:
    folder = make_plugin("acme_bad", LOSS, parts=WHOLE)
    os.mkfifo(folder / "odd.py")
    registry.cache_clear()
    assert f"{folder / 'odd.py'}: cannot be read: it is a pipe, not a regular file" in told("doctor")


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock that frozen commands use; it lists all that is installed now but what a test adds."""
    lock = tmp_path / "lock" / "twinkle.lock"
    lock.parent.mkdir()
    monkeypatch.setenv("TWINKLE_LOCK", str(lock))
    return lock


def frozen_told(*args: str) -> str:
    registry.cache_clear()
    result = CliRunner().invoke(main, ["--frozen", *args])
    registry.cache_clear()
    return result.output + result.stderr


@pytest.mark.full
def test_what_the_lock_does_not_list_is_told_by_every_frozen_command(frozen: Path, make_plugin: Make) -> None:
    command = '\n[[command]]\nname = "acme-run"\nref = "acme_bad.parts:AcmeLoss"\nsummary = "Runs."\n'
    patch = LOSS.replace('"AcmeLoss"', '"AcmePatch"').replace('"loss"', '"patch"')
    for plugin in ("twinkle-cli", "twinkle-patches", "twinkle-testing"):  # they run the commands below
        assert CliRunner().invoke(main, ["plugins", "add", plugin, "--yes"]).exit_code == 0
    make_plugin("acme_bad", command + LOSS + patch, parts=WHOLE)
    why = f"this run is frozen, and {frozen} does not list acme_bad"
    for args in (
        ("plugins", "info", "AcmeLoss"),
        ("plugins", "info", "acme_bad"),
        ("plugins", "doctor"),
        ("plugins", "list"),
        ("plugins", "patches"),
        ("plugins", "test", "AcmeLoss"),
        ("acme-run",),
    ):
        assert why in " ".join(frozen_told(*args).split()), args
    assert "AcmeLoss" in frozen_told("plugins", "list", "loss")
    assert "acme_bad (disabled)" in frozen_told("plugins", "list", "loss")
    assert "pypi acme_bad" in frozen_told("plugins", "verify")
    assert "acme-run" not in frozen_told("--help")
    assert "acme-run" in CliRunner().invoke(main, ["--help"]).output


def test_what_was_edited_since_it_was_locked_is_no_longer_ok(frozen: Path, make_plugin: Make) -> None:
    folder = make_plugin("acme_bad", LOSS, parts=WHOLE)
    assert CliRunner().invoke(main, ["plugins", "add", "acme_bad", "--yes"]).exit_code == 0
    assert "AcmeLoss(" in frozen_told("plugins", "info", "AcmeLoss")
    (folder / "parts.py").write_text(WHOLE + "# edited\n")
    for args in (("info", "AcmeLoss"), ("info", "acme_bad"), ("list",), ("doctor",)):
        text = frozen_told("plugins", *args)
        assert "its files differ from the lock ('acme_bad/parts.py' changed)" in text, args
    (plain,) = json.loads(frozen_told("plugins", "info", "acme_bad", "--json"))
    assert plain["status"] == "disabled"


def test_a_file_that_is_not_locked_is_not_run_for_its_test(frozen: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    for args in ((f"{file}:Mine",), ("NeighbourLoss", "--example", f"{file}:EXAMPLE")):
        assert "this run is frozen" in frozen_told("plugins", "test", *args)
    assert not (tmp_path / "ran").exists()


def test_a_lock_that_could_not_take_something_in_says_what(
    frozen: Path, make_plugin: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinkle_registry.trust import editor

    def refuse(name: str) -> None:
        raise PluginBroken(f"{name} was edited")

    monkeypatch.setattr(editor, "check_record_file", refuse)
    result = CliRunner().invoke(main, ["plugins", "lock"])
    assert result.exit_code == 1
    assert "not trusted: acme_neighbour: acme_neighbour was edited" in result.output
