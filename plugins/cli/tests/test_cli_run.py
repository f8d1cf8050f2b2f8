"""`twinkle run`: options out of a pydantic model, errors all at once, and the life of a run."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from twinkle._registry import registry
from twinkle.cli import main

MANIFEST = """
schema = 1
core = ">=0.1,<1"
name = "acme-recipes"

[[component]]
kind = "recipe"
name = "toy"
ref = "acme_recipes.toy:toy"
config = "acme_recipes.config:ToyConfig"
summary = "A toy"

[[component]]
kind = "recipe"
name = "bare"
ref = "acme_recipes.toy:bare"

[[component]]
kind = "recipe"
name = "selfish"
ref = "acme_recipes.toy:toy"
config = "acme_recipes.config:Selfish"

[[component]]
kind = "recipe"
name = "odd"
ref = "acme_recipes.toy:toy"
config = "acme_recipes.toy:toy"

[[component]]
kind = "tracker"
name = "ToyTracker"
ref = "acme_recipes.toy:ToyTracker"
"""
CONFIG = '''
from pathlib import Path
from typing import Annotated, Any, Literal
from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]

class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

class Model(Strict):
    id: str = Field(description="Which model")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Precision")
    args: dict[str, Any] = Field(default={}, description="More")

class Lora(Strict):
    rank: Positive = Field(default=8, description="Rank of the update")
    targets: str | list[str] = "all-linear"

class ToyConfig(Strict):
    """A toy."""
    model: Model
    lora: Lora | None = Field(default_factory=Lora, description="Adapter")
    lr: float = Field(default=1e-4, gt=0, description="Learning rate")
    steps: int = 3
    shuffle: bool = True
    slice: str | Positive | None = None
    folder: Path | None = None
    batch_size: Positive = 4
    questions: list[str] = []
    numbers: list[int] = []
    trackers: list[str] = ["ToyTracker"]
    resume_from: str | None = None
    fail: str = ""

    @model_validator(mode="after")
    def check(self):
        if self.steps > 100:
            raise ValueError("more than 100 steps are no toy")
        return self

class Selfish(Strict):
    name: str = ""
'''
TOY = """
import json
from twinkle.errors import DataError
from twinkle.tracker import Tracker
from twinkle_registry import hookimpl
from acme_recipes.config import ToyConfig

class ToyTracker(Tracker):
    @hookimpl
    def twinkle_step_end(self, run, step, metrics):
        with (run.folder / "steps.txt").open("a") as file:
            file.write(f"{step} {metrics['loss']}\\n")
    @hookimpl
    def twinkle_run_error(self, run, error):
        (run.folder / "error.txt").write_text(type(error).__name__)

def toy(config: ToyConfig, run):
    (run.folder / "config.json").write_text(config.model_dump_json())
    if config.fail == "ours":
        raise DataError("the rows are gone; fetch them again")
    if config.fail == "bug":
        raise ZeroDivisionError("a bug")
    if config.fail == "sleep":
        import time
        print("sleeping", flush=True)
        time.sleep(60)
    for step in range(1, config.steps + 1):
        run.log({"loss": 1.0 / step}, step)
    return {"loss": 1.0 / 3, "path": str(run.folder)}

def bare(config, run):
    assert config is None and run.config == {}
"""


@pytest.fixture(autouse=True)
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the toy recipes for one test and work in an empty folder."""
    site = tmp_path / "site"
    package, info, work = site / "acme_recipes", site / "acme_recipes-1.0.dist-info", tmp_path / "work"
    for folder in (package, info, work):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "twinkle-plugin.toml").write_text(MANIFEST)
    (package / "config.py").write_text(CONFIG)
    (package / "toy.py").write_text(TOY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-recipes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[twinkle]\nrecipes = acme_recipes\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(work)
    registry.cache_clear()
    yield site
    registry.cache_clear()
    for name in [name for name in sys.modules if name.startswith("acme_recipes")]:
        del sys.modules[name]


def run(*args: str) -> Result:
    result = CliRunner().invoke(main, ["run", *args], prog_name="twinkle")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def config_of(*args: str) -> dict[str, Any]:
    """Return the configuration that the toy got."""
    result = run("toy", *args)
    assert result.exit_code == 0, result.output
    (folder,) = sorted(Path("runs").iterdir())[-1:]
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def problems_of(*args: str) -> list[str]:
    """Return the lines of the error that a command line gives; nothing may have been made."""
    result = run("toy", *args)
    assert result.exit_code == 2
    assert not Path("runs").exists()
    first, *lines = result.stderr.splitlines()
    assert first.startswith("Error: recipe 'toy': ")
    return [line.strip() for line in lines]


def test_the_recipes_are_listed() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "toy" in result.output
    assert "A toy" in result.output
    assert run().exit_code == 2


def test_help_lists_every_field_with_type_default_and_description() -> None:
    text = " ".join(run("toy", "--help").output.split())
    for expected in (
        "--model.id str Which model [required]",
        "--model.dtype 'float32' | 'bfloat16' Precision [default: float32]",
        "--lora.* | null Adapter",
        "--lora.rank int Rank of the update [default: 8]",
        "--lr float Learning rate [default: 0.0001]",
        "--slice str | int | null [default: null]",
        "--trackers list[str]",
        '[default: ["ToyTracker"]]',
        "--config FILE",
        "--runs DIR",
    ):
        assert expected in text


def test_a_run_has_a_folder_trackers_and_a_summary() -> None:
    result = run("toy", "--model.id", "tiny", "--steps", "2", "--runs", "out", "--name", "trial")
    (folder,) = Path("out").iterdir()
    assert folder.name.startswith("trial-")
    assert (folder / "steps.txt").read_text() == "1 1.0\n2 0.5\n"
    summary = dict(line.split(maxsplit=1) for line in result.output.splitlines())
    assert summary == {"loss": "0.333333", "path": str(folder), "run": str(folder)}


def test_defaults_give_way_to_the_file_and_the_file_to_flags() -> None:
    Path("toy.yaml").write_text("model: {id: tiny, args: {a: 1, b: 2}}\nlr: 1e-3\nbatch_size: 2\nlora:\n  rank: 4\n")
    found = config_of("--config", "toy.yaml", "--lora.rank=16", "--model.args.b", "3")
    assert found["model"] == {"id": "tiny", "dtype": "float32", "args": {"a": 1, "b": 3}}
    assert (found["lr"], found["batch_size"], found["lora"]["rank"], found["steps"]) == (1e-3, 2, 16, 3)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("flags", "path", "expected"),
    [
        (["--lr", "1e-5"], "lr", 1e-5),
        (["--lr=3"], "lr", 3.0),
        (["--shuffle", "false"], "shuffle", False),
        (["--no-shuffle"], "shuffle", False),
        (["--shuffle", "--steps", "1"], "shuffle", True),
        (["--batch-size", "8"], "batch_size", 8),
        (["--lora", "null"], "lora", None),
        (["--lora", "{rank: 2}"], "lora.rank", 2),
        (["--lora.targets", "[q, v]"], "lora.targets", ["q", "v"]),
        (["--lora.targets", "12"], "lora.targets", "12"),
        (["--model.id", "0012"], "model.id", "0012"),
        (["--model.id=no"], "model.id", "no"),
        (["--model.args", "{lr: 1e-3, on: off}"], "model.args", {"lr": 1e-3, "on": "off"}),
        (["--slice", "100"], "slice", 100),
        (["--slice", "100:20"], "slice", "100:20"),
        (["--slice", "null"], "slice", None),
        (["--folder", "12"], "folder", "12"),
        (["--questions", "Who, are you: x?", "--questions", "And 2?"], "questions", ["Who, are you: x?", "And 2?"]),
        (["--questions", "[a, b]"], "questions", ["a", "b"]),
        (["--numbers", "1", "--numbers", "-2"], "numbers", [1, -2]),
        (["--trackers", "[]"], "trackers", []),
        (["--trackers", ""], "trackers", []),
    ],
)
def test_values_mean_what_people_mean(flags: list[str], path: str, expected: Any) -> None:
    model = [] if any(flag.startswith("--model.id") for flag in flags) else ["--model.id", "tiny"]
    value: Any = config_of(*model, *flags)
    for key in path.split("."):
        value = value[key]
    assert value == expected
    assert type(value) is type(expected)


def test_all_problems_are_told_at_once() -> None:
    Path("toy.yaml").write_text("model: {id: tiny, dtpye: float32}\nstpes: 3\nbatch_size: many\n")
    lines = problems_of(
        "--config", "toy.yaml", "--rank", "4", "--lr", "-1", "--optimiser", "x", "loose", "--lora.rank", "x"
    )
    expected = [
        "unknown flag --rank; nearest: --lora.rank",
        "unknown flag --optimiser",
        "unexpected 'loose': every value must follow a flag, as in --name value",
        "model.dtpye: unknown key in --config toy.yaml; nearest: model.dtype",
        "stpes: unknown key in --config toy.yaml; nearest: steps",
        "lora.rank: given 'x' (str) by --lora.rank, expected int: ",
        "lr: given -1 (int) by --lr, expected float: should be greater than 0",
        "batch_size: given 'many' (str) by --config toy.yaml, expected int: ",
    ]
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)


def test_a_required_field_that_is_absent_says_how_to_give_it() -> None:
    assert problems_of("--model.dtype", "float32") == [
        "model.id: required, expected str; pass --model.id or set it in the file of --config"
    ]


def test_a_union_is_one_problem() -> None:
    (line,) = problems_of("--model.id", "tiny", "--slice", "{a: 1}")
    assert line.startswith("slice: given {'a': 1} (dict) by --slice, expected str | int | null")


def test_a_check_of_the_whole_model_is_told_in_its_own_words() -> None:
    assert problems_of("--model.id", "tiny", "--steps", "101") == ["more than 100 steps are no toy"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--steps", "1", "--steps", "2"], "--steps is set twice"),
        (["--lora", "null", "--lora.rank", "2"], "--lora already sets all of it"),
        (["--lora.rank", "2", "--lora", "null"], "sets all of a value that another flag sets a part of"),
        (["--steps"], "--steps requires a value: int"),
        (["--runs"], "--runs requires a value"),
        (["--name", "a", "--name", "b"], "--name is set twice"),
        (["--numbers", "[1, 2"], "is not YAML"),
        (["--debug=yes"], "--debug takes no value"),
    ],
)
def test_flags_that_contradict_or_lack_a_value_are_refused(flags: list[str], text: str) -> None:
    (line,) = problems_of("--model.id", "tiny", *flags)
    assert text in line


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read: No such file"),
        ("a: [", "not YAML"),
        ("- 1", "expected keys and values, got list"),
        ("a: 1\na: 2", "duplicate key 'a'"),
    ],
)
def test_a_configuration_file_that_cannot_be_used_is_named(content: str | None, text: str) -> None:
    if content is not None:
        Path("toy.yaml").write_text(content)
    result = run("toy", "--config", "toy.yaml")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --config toy.yaml: ")
    assert text in result.stderr


def test_a_recipe_without_configuration_takes_no_flags() -> None:
    assert run("bare").exit_code == 0
    result = run("bare", "--steps", "3")
    assert result.exit_code == 2
    assert "unknown flag --steps" in result.stderr


def test_an_unknown_recipe_names_the_nearest() -> None:
    result = run("tyo")
    assert result.exit_code == 2
    assert "nearest: 'toy'" in result.stderr
    assert "the first argument must be the name of a recipe" in run("--steps", "3", "toy").stderr


@pytest.mark.parametrize(
    ("recipe", "text"), [("selfish", "its author must rename"), ("odd", "must be a pydantic model")]
)
def test_a_recipe_whose_configuration_cannot_work_is_broken(recipe: str, text: str) -> None:
    result = run(recipe)
    assert result.exit_code == 2
    assert text in result.stderr


def test_a_recipe_of_ones_own_takes_its_options_from_its_first_parameter(recipes: Path) -> None:
    Path("mine.py").write_text("from acme_recipes.toy import toy as train\n")
    assert "--lora.rank" in run("./mine.py:train", "--help").output
    assert run("./mine.py:train", "--model.id", "x").exit_code == 0
    assert next(Path("runs").iterdir()).name.startswith("train-")


def test_an_error_of_ours_is_one_message_and_a_traceback_only_with_debug() -> None:
    result = run("toy", "--model.id", "x", "--fail", "ours")
    assert (result.exit_code, result.stderr) == (2, "Error: the rows are gone; fetch them again\n")
    assert "Traceback" in run("toy", "--model.id", "x", "--fail", "ours", "--debug").stderr
    assert {path.read_text() for path in Path("runs").glob("*/error.txt")} == {"DataError"}


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run("toy", "--model.id", "x", "--fail", "bug")


def test_a_run_name_or_folder_that_cannot_be_is_a_clean_error() -> None:
    assert "run name 'a/b'" in run("toy", "--model.id", "x", "--name", "a/b").stderr
    Path("file").write_text("")
    assert "choose another with --runs DIR" in run("toy", "--model.id", "x", "--runs", "file").stderr


@pytest.mark.full
def test_ctrl_c_ends_with_130_and_the_tracker_knows() -> None:
    command = [sys.executable, "-m", "twinkle.cli", "run", "toy", "--model.id", "x", "--fail", "sleep"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "sleeping\n"
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert errors == "Interrupted\n"
    assert next(Path("runs").glob("*/error.txt")).read_text() == "KeyboardInterrupt"


@pytest.mark.full
@pytest.mark.parametrize("then", ["pass", "raise ImportError('C code was interrupted') from None"])
def test_ctrl_c_while_a_recipe_is_imported_ends_with_130_even_if_the_import_swallows_it(then: str) -> None:
    Path("mine.py").write_text(
        "import os, signal\nfrom acme_recipes.toy import toy as train\n"
        f"try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    {then}\n"
    )
    command = [sys.executable, "-m", "twinkle.cli", "run", "./mine.py:train", "--model.id", "x"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False, timeout=60)
    assert (result.returncode, result.stderr) == (130, "Interrupted\n")
    assert not Path("runs").exists()


def test_help_of_a_recipe_does_not_import_it() -> None:
    code = textwrap.dedent(
        """
        import sys
        from click.testing import CliRunner
        from twinkle.cli import main
        CliRunner().invoke(main, ["run", "toy", "--help"])
        print("acme_recipes.config" in sys.modules, "acme_recipes.toy" in sys.modules, "torch" in sys.modules)
        """
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "True False False\n"


def test_an_unknown_flag_of_a_group_names_the_nearest_of_that_group() -> None:
    problems = problems_of("--model.id", "tiny", "--lora.r", "4", "--model.dttype", "float32", "--learning_rate", "1")
    assert problems[0] == "unknown flag --lora.r; nearest: --lora.rank"
    assert problems[1] == "unknown flag --model.dttype; nearest: --model.dtype"
    assert problems[2] == "unknown flag --learning_rate; nearest: --lr"


def test_a_pattern_that_fits_several_files_is_told_apart_from_a_slip() -> None:
    for name in ("one", "two"):
        (Path("mine") / name).mkdir(parents=True)
    problems = problems_of("--model.id", "tiny", "--resume_from", "mine/one", "mine/two", "other")
    assert problems[0].endswith("a pattern with * may have matched several: pass one of them")
    assert problems[1] == "unexpected 'other': every value must follow a flag, as in --name value"


def test_a_run_that_goes_on_reads_its_own_configuration() -> None:
    folder = Path("earlier")
    (folder / "checkpoints" / "step-2").mkdir(parents=True)
    (folder / "config.yaml").write_text("model: {id: tiny}\nsteps: 2\n")
    for place in (folder, folder / "checkpoints" / "step-2", (folder / "checkpoints" / "step-2").absolute()):
        config = config_of("--resume_from", str(place), "--lr", "0.5")
        assert (config["model"]["id"], config["steps"], config["lr"]) == ("tiny", 2, 0.5)
    Path("other.yaml").write_text("model: {id: other}\n")
    assert config_of("--resume_from", str(folder), "--config", "other.yaml")["steps"] == 3
    for asked, steps in (("toy", 2), ("another", 3)):  # of another recipe nothing is read: it may have other keys
        (folder / "plugins.json").write_text(json.dumps({"parts": [{"kind": "recipe", "asked": asked, "ref": ""}]}))
        assert config_of("--resume_from", str(folder), "--model.id", "tiny")["steps"] == steps


def test_debug_may_stand_before_the_recipe() -> None:
    result = run("--debug", "toy", "--model.id", "tiny", "--fail", "ours")
    assert (result.exit_code, "Traceback" in result.stderr) == (2, True)


def test_an_empty_run_name_is_refused() -> None:
    result = run("toy", "--model.id", "tiny", "--name", "")
    assert result.exit_code == 2
    assert "run name ''" in result.stderr
