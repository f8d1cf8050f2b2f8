"""Script arguments: names, sources and their order, types, and errors that say everything at once."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.cli import CLI, Args
from twinkle.errors import ArgumentError, ConfigError
from twinkle_cli.arguments.names import GROUPS, arguments, options, short_name
from twinkle_cli.arguments.variables import is_other


@pytest.fixture(autouse=True)
def empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a folder of its own and an environment without arguments."""
    import os

    for name in [name for name in os.environ if name.startswith("TWINKLE_") and not is_other(name)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*argv: str, **sources: Any) -> Args:
    return CLI.from_args(list(argv), **sources)


def problem(*argv: str, **sources: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*argv, **sources)
    return str(caught.value)


def write(name: str, text: str) -> str:
    Path(name).write_text(text, "utf-8")
    return name


# Names


def test_nobody_says_anything_and_the_published_defaults_hold() -> None:
    args = read()
    assert args == Args()
    assert (args.training.max_steps, args.training.batch_size, args.training.micro_batch_size) == (200, 8, 2)
    assert (args.optimizer.learning_rate, args.lora.lora_r, args.lora.lora_alpha) == (1e-5, 8, 32)
    assert (args.model.mixed_precision, args.model.strategy, args.infra.mode) == ("auto", "accelerate", "local")
    assert (args.scheduler.scheduler_cls, args.sampler.sampler_type) == ("CosineAnnealingLR", "vLLMSampler")
    assert (args.rl.num_generations, args.checkpoint.save_optimizer, args.extra) == (8, True, {})


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        (["--max_steps", "3"], ("training", "max_steps"), 3),
        (["--max-steps=3"], ("training", "max_steps"), 3),
        (["--training.max_steps", "3"], ("training", "max_steps"), 3),
        (["--Training.Max-Steps", "3"], ("training", "max_steps"), 3),
        (["--lr", "3e-4"], ("optimizer", "learning_rate"), 3e-4),
        (["--optimizer.lr", "1"], ("optimizer", "learning_rate"), 1.0),
        (["--max_new_tokens", "7"], ("sampling", "max_tokens"), 7),
        (["--num_gpus", "2"], ("infra", "nproc_per_node"), 2),
        (["--model_id", "a"], ("model", "model_id"), "a"),
        (["--template.model_id", "a"], ("template", "model_id"), "a"),
        (["--seed", "1"], ("training", "seed"), 1),
        (["--sampling.seed", "1"], ("sampling", "seed"), 1),
        (["--top_k", "-1"], ("sampling", "top_k"), -1),
        (["--ignore_index", "-7"], ("loss", "ignore_index"), -7),
        (["--padding_free"], ("training", "padding_free"), True),
        (["--padding_free", "true"], ("training", "padding_free"), True),
        (["--padding_free", "0"], ("training", "padding_free"), False),
        (["--no-enable_thinking"], ("template", "enable_thinking"), False),
        (["--no-template.enable_thinking"], ("template", "enable_thinking"), False),
        (["--gradient_checkpointing"], ("model", "gradient_checkpointing"), True),
        (["--gradient_checkpointing", "auto"], ("model", "gradient_checkpointing"), "auto"),
        (["--gradient_checkpointing=0"], ("model", "gradient_checkpointing"), False),
        (["--reward_fns", "A", "--reward_fns", "B"], ("rl", "reward_fns"), ["A", "B"]),
        (["--reward_fns", "[A, B]"], ("rl", "reward_fns"), ["A", "B"]),
        (["--lora_target_modules", "[q, v]"], ("lora", "lora_target_modules"), ["q", "v"]),
        (["--lora_target_modules", "q|v"], ("lora", "lora_target_modules"), "q|v"),
        (["--stop", "User:"], ("sampling", "stop"), "User:"),
        (["--stop", "#"], ("sampling", "stop"), "#"),
        (["--stop", "[1, 2]"], ("sampling", "stop"), [1, 2]),
        (["--revision", "1.0"], ("dataset", "revision"), "1.0"),
        (["--data_slice", "2:8"], ("dataset", "data_slice"), "2:8"),
        (["--max_length", "null"], ("template", "max_length"), None),
        (["--ddp_config", '{"bucket_cap_mb": 25}'], ("model", "ddp_config"), {"bucket_cap_mb": 25}),
        (["--ddp_config.bucket_cap_mb", "25"], ("model", "ddp_config"), {"bucket_cap_mb": 25}),
    ],
)
def test_flags(flags: list[str], path: tuple[str, str], value: Any) -> None:
    found = getattr(getattr(read(*flags), path[0]), path[1])
    assert found == value
    assert type(found) is type(value)


def test_a_name_that_several_groups_have_means_the_primary_one_and_every_name_is_clear() -> None:
    bare: dict[str, list[tuple[str, bool]]] = {}
    for option, field in arguments():
        for name in {field.name, field.metadata["alias"]} - {""}:
            bare.setdefault(name, []).append((option.path[0], field.metadata["primary"]))
    several = {name: found for name, found in bare.items() if len(found) > 1}
    assert sorted(several) == ["model_id", "seed"]
    assert all(sum(primary for _, primary in found) == 1 for found in several.values())
    assert not set(bare) & {*GROUPS, "extra", "help"}
    assert "config" not in options()  # --config is the YAML file


def test_use_megatron_means_megatron() -> None:
    assert read("--use_megatron").model.strategy == "megatron"
    assert read("--use_megatron").model.use_megatron
    assert not read().model.use_megatron
    assert not read("--strategy", "native_fsdp").model.use_megatron
    file = write("a.yaml", "use_megatron: true")
    assert read(config_file=file).model.use_megatron
    assert read("--no-use_megatron", config_file=file).model.strategy == "accelerate"
    assert read("--strategy", "native_fsdp", config_file=file).model.strategy == "native_fsdp"
    fsdp = write("b.yaml", "strategy: native_fsdp")
    assert read("--no-use_megatron", config_file=fsdp).model.strategy == "native_fsdp"
    assert read("--use_megatron", config_file=fsdp).model.strategy == "megatron"
    assert "give one of the two" in problem("--use_megatron", "--strategy", "accelerate")
    assert "give one of the two" in problem("--no-use_megatron", "--strategy", "megatron")


# Sources


def test_a_later_source_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["batch_size", "micro_batch_size", "save_steps", "log_interval", "max_steps"]
    file = write("conf.yaml", "\n".join(f"{name}: 4" for name in names[:2]))
    write(".env", "".join(f"TWINKLE_{name.upper()}=2\n" for name in names[:4]))
    for name in names[:3]:
        monkeypatch.setenv(f"TWINKLE_{name.upper()}", "3")
    training = read("--batch_size", "5", "--config", file).training
    assert [getattr(training, name) for name in names] == [5, 4, 3, 2, 200]


@pytest.mark.parametrize("line", ["TRUST_REMOTE_CODE=1", "LOSS__LOSS_CLS=./theirs.py:Loss"])
def test_a_file_of_variables_that_nobody_named_lets_no_code_run(
    empty_place: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setenv("TWINKLE_STATE_DIR", str(empty_place / "state"))
    monkeypatch.delenv("TWINKLE_TRUST_FOLDER", raising=False)
    write(".env", f"TWINKLE_{line}\n")
    assert "in .env would let code run, but this folder is not trusted; set it on the command line" in problem()
    assert read(env_file=".env") != Args(), "a file that is named is the user's own word"
    monkeypatch.setenv("TWINKLE_TRUST_FOLDER", str(empty_place))
    assert read() == read(env_file=".env")


def test_only_twinkles_variables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "PORT", "MODE", "SEED", "SPLIT", "STOP", "MODEL_ID", "LR"):
        monkeypatch.setenv(name, "7")
    write(".env", "SEED=7\nMODE=ray\nHF_TOKEN=x\n")
    assert read() == Args()


def test_variables_with_and_without_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_LR", "0.5")
    monkeypatch.setenv("TWINKLE_SAMPLING__SEED", "3")
    monkeypatch.setenv("TWINKLE_SERVER__LOG_LEVEL", "DEBUG")
    monkeypatch.setenv("TWINKLE_SERVER__CONFIG", "a.yaml")
    monkeypatch.setenv("TWINKLE_FULL_DETERMINISM", "1")
    monkeypatch.setenv("TWINKLE_EXTRA__WORD", "yes")
    monkeypatch.setenv("TWINKLE_FSDP_CONFIG", "{reshard: true}")
    args = read()
    assert (args.optimizer.lr, args.sampling.seed, args.training.seed) == (0.5, 3, 42)
    assert (args.server.log_level, args.server.config, args.training.full_determinism) == ("DEBUG", "a.yaml", True)
    assert args.extra == {"word": "yes"}
    assert args.model.fsdp_config == {"reshard": True}


def test_variables_of_other_parts_of_twinkle_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "LOG_LEVEL", "CACHE_DIR", "PLUGINS_ONLY", "SERVER_URL", "VLLM_IPC_TIMEOUT_S"):
        monkeypatch.setenv(f"TWINKLE_{name}", "x")
    assert read() == Args()


def test_the_variables_that_the_house_reads_are_arguments_or_known_as_others() -> None:
    import re

    root = Path(__file__).parents[2]
    read_there = set()
    for folder in ("registry/src", "twinkle_core/src", "plugins"):
        for path in (root / folder).rglob("*.py"):
            if "tests" not in path.parts:
                read_there |= set(re.findall(r"[\"'](TWINKLE_[A-Z_]+[A-Z])[\"']", path.read_text("utf-8")))
    arguments_too = {"TWINKLE_TRUST_REMOTE_CODE", "TWINKLE_SEED", "TWINKLE_MODE", "TWINKLE_FULL_DETERMINISM"}
    assert {name for name in read_there - arguments_too if not is_other(name)} == set()


def test_an_empty_variable_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_LR", "")
    monkeypatch.setenv("TWINKLE_SPLIT", " ")
    assert read() == Args()


def test_a_misspelt_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_MAX_STEP", "3")
    assert "unknown argument 'max_step' in TWINKLE_MAX_STEP (an environment variable); nearest: " in problem()
    monkeypatch.delenv("TWINKLE_MAX_STEP")
    monkeypatch.setenv("TWINKLE_TRAINING__MAX_STEP", "3")
    assert "nearest: training.max_steps" in problem()


def test_env_files(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    # arguments
    export TWINKLE_MODEL_ID="my model"   # in quotes
    TWINKLE_DATASET_ID='rows #1.jsonl'
    TWINKLE_SPLIT=test # a comment
    TWINKLE_OUTPUT_DIR=a=b
    """
    args = read(env_file=write("my.env", text))
    assert (args.model.model_id, args.dataset.dataset_id) == ("my model", "rows #1.jsonl")
    assert (args.dataset.split, args.training.output_dir) == ("test", "a=b")
    assert "cannot be read: No such file" in problem(env_file="none.env")
    assert "my.env, line 2: 'TWINKLE_LR' is not NAME=value" in problem(env_file=write("my.env", "\nTWINKLE_LR\n"))
    assert 'line 1: the quote " of "a is not closed' in problem(env_file=write("my.env", 'A="a\n'))
    assert "unknown argument 'lrr' in TWINKLE_LRR in my.env" in problem(env_file=write("my.env", "TWINKLE_LRR=1"))
    other = write("my.env", "TWINKLE_CACHE_DIR=cache\n")
    assert "TWINKLE_CACHE_DIR in my.env is not an argument" in problem(env_file=other)
    monkeypatch.setenv("TWINKLE_CACHE_DIR", "cache")
    assert read(env_file=other) == Args()


def test_yaml_is_flat_or_nested_or_both() -> None:
    text = """
    max-steps: 3
    lr: 1e-3
    template.max_length: 64
    model:
      model_id: a
      ddp_config: {bucket_cap_mb: 25, nested: {deep: [1, 2]}}
    Sampling: {max_new_tokens: 5, stop: [a, b]}
    lora:
    extra: {Word: 1}
    """
    args = read("--ddp_config.bucket_cap_mb", "50", "--extra.other", "{a: 1}", config_file=write("c.yaml", text))
    assert (args.training.max_steps, args.optimizer.lr, args.template.max_length) == (3, 1e-3, 64)
    assert args.model.ddp_config == {"bucket_cap_mb": 50, "nested": {"deep": [1, 2]}}
    assert (args.sampling.max_tokens, args.sampling.stop) == (5, ["a", "b"])
    assert args.extra == {"Word": 1, "other": {"a": 1}}


def test_the_command_lines_file_replaces_the_scripts() -> None:
    first, second = write("a.yaml", "lr: 1\nseed: 1"), write("b.yaml", "lr: 2")
    args = read("--config", second, config_file=first)
    assert (args.optimizer.lr, args.training.seed) == (2.0, 42)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_step: 3", "unknown argument 'max_step' in c.yaml; nearest: max_steps"),
        ("training: {lr: 3}", "unknown argument 'training.lr' in c.yaml; nearest: "),
        ("training: 3", "training in c.yaml: expected a mapping with the group's arguments, got 3"),
        ("config: x", "unknown argument 'config' in c.yaml; nearest: server.config"),
        ("lr: 1\nlearning_rate: 1", "is set twice, by lr in c.yaml and by learning_rate in c.yaml"),
        ("max_steps: 1\ntraining: {max_steps: 2}", "is set twice, by max_steps in c.yaml and by training.max_steps"),
        ("max_steps: '3'", "training.max_steps: '3' is of type str, set by max_steps in c.yaml; expected int"),
        ("max_steps: true", "True is of type bool"),
        ("max_steps: 1.5", "1.5 is of type float"),
        ("max_steps:", "None is null"),
        ("padding_free: 2", "2 is of type int"),
        ("revision: 1", "1 is of type int, set by revision in c.yaml; expected str | null"),
        ("ddp_config: [1]", "expected dict[str, Any] | null"),
        ("reward_fns: [1]", "expected list[str] | null"),
        ("mixed_precision: fp4", "expected 'auto' | 'no' | 'fp8' | 'fp16' | 'bf16'"),
        ("- 1", "expected keys and values"),
        ("a: [", "not YAML"),
        ("1: 2", "unknown argument '1' in c.yaml"),
    ],
)
def test_problems_of_a_file(text: str, expected: str) -> None:
    assert expected in problem("--config", write("c.yaml", text))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--max_step", "3"], "unknown flag --max_step; nearest: --max_steps"),
        (["--max_steps", "three"], "'three' is of type str, set by --max_steps; expected int"),
        (["--max_steps"], "--max_steps requires a value"),
        (["max_steps", "3"], "unexpected 'max_steps'"),
        (["--lr", "1", "--learning_rate", "1"], "--learning_rate is set twice"),
        (["--config", "a", "--config", "b"], "--config is set twice"),
        (["--config="], "cannot be read"),
        (["--config", "none.yaml"], "--config none.yaml: cannot be read"),
        (["--strategy", "ddp"], "expected 'accelerate' | 'native_fsdp' | 'megatron'"),
        (["--no-max_steps"], "unknown flag --no_max_steps"),
        (["--extra.a.b", "1"], "unknown flag --extra.a.b"),
        (["--ddp_config", "{"], "is not YAML"),
    ],
)
def test_problems_of_a_command_line(flags: list[str], expected: str) -> None:
    assert expected in problem(*flags)


def test_all_problems_are_told_at_once_and_the_way_out_for_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_SEED", "x")
    files = problem("--foo", "1", "--config", "none.yaml", env_file="none.env")
    assert [word for word in ("--foo", "none.yaml", "none.env", "TWINKLE_SEED") if word not in files] == []
    text = problem("--foo", "1", "--batch_size", "x", config_file=write("c.yaml", "bar: 1"))
    assert text.startswith("4 problems in the arguments of the script\n")
    assert [word for word in ("--foo", "batch_size", "'bar'", "TWINKLE_SEED") if word not in text] == []
    assert text.endswith("additional arguments of the script must be below extra: --extra.NAME VALUE")


# Args


def test_ways_to_ask() -> None:
    args = read("--max_steps", "3", "--extra.word", "hi", "--extra.lr", "own")
    assert args["max_steps"] == args["Max-Steps"] == args["training.max_steps"] == args.get("max_steps") == 3
    assert args["training"] is args.training
    assert args["extra"] is args.extra
    assert args["word"] == args["extra.word"] == args.get("word") == "hi"
    assert args["lr"] == args.optimizer.lr == 1e-5
    assert args["extra.lr"] == "own"
    assert args["use_megatron"] is False
    assert args["max_new_tokens"] is None
    assert args.get("nothing") is None
    assert args.get("nothing", 4) == 4
    assert "max_steps" in args
    assert "nothing" not in args
    with pytest.raises(ArgumentError, match=r"unknown argument 'max_step'; nearest: 'max_steps'"):
        args["max_step"]
    with pytest.raises(KeyError):
        args["max_step"]


def test_a_misspelt_attribute_is_an_error_when_it_is_set_too() -> None:
    args = read()
    args.training.max_steps = 3
    assert args.is_set("training.max_steps")
    assert not args.is_set("training.seed")
    with pytest.raises(AttributeError):
        args.training.max_step = 3  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        args.trainnig = 3  # type: ignore[attr-defined]


def test_arguments_can_be_sent_to_other_processes() -> None:
    args = read("--max_steps", "3", "--load_weights", "--extra.a", "1")
    again = pickle.loads(pickle.dumps(args))
    assert again == copy.deepcopy(args) == args
    assert again.is_set("model.load_weights")


def test_what_is_read_does_not_depend_on_what_was_read_before() -> None:
    read("--extra.a", "1", "--ddp_config.b", "1")
    assert read() == Args()


def test_to_dict_is_a_configuration_file_that_says_the_same() -> None:
    args = read("--max_steps", "3", "--use_megatron", "--stop", "[a, b]", "--ddp_config.a", "1", "--extra.b", "[1]")
    again = read(config_file=write("all.yaml", yaml.safe_dump(args.to_dict())))
    assert again == args


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_value_of_the_right_type_is_kept_by_every_source(data: st.DataObject) -> None:
    simple = {int: st.integers(-(10**6), 10**6), float: st.floats(-1e6, 1e6), bool: st.booleans(),
              str: st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S")), min_size=1)}  # fmt: skip
    option = data.draw(st.sampled_from([option for option, _ in arguments() if option.annotation in simple]))
    value = data.draw(simple[option.annotation])

    def value_of(args: Args) -> Any:
        return getattr(getattr(args, option.path[0]), option.path[1])

    assert value_of(read(f"--{short_name(option)}={value}")) == value
    assert (
        value_of(read(config_file=write("h.yaml", yaml.safe_dump({option.path[0]: {option.path[1]: value}})))) == value
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(f"TWINKLE_{option.name.replace('.', '__').upper()}", str(value))
        assert value_of(read()) == value


# Help


def test_help_lists_every_argument_and_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "-h"):
        with pytest.raises(SystemExit) as ended:
            read(flag, "--nonsense")
        assert ended.value.code == 0
    text = capsys.readouterr().out
    for option, field in arguments():
        assert f"--{short_name(option)}" in text
        assert field.metadata["meaning"].split("`")[0][:40] in " ".join(text.split())
    for group, cls in GROUPS.items():
        assert f"\n{group}: {cls.__doc__}\n" in text
    for shown in (
        "--learning_rate, --lr  float",
        "--strategy, --use_megatron  'accelerate'",
        "--template.model_id  str",
    ):
        assert shown in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_groups_are_those_of_args() -> None:
    names = [field.name for field in dataclasses.fields(Args) if not field.name.startswith("_")]
    assert names == [*GROUPS, "extra"]
    assert all(hasattr(Args, f"get_{group}_args") for group in GROUPS)


def test_reading_arguments_loads_nothing_heavy(tmp_path: Path) -> None:
    write("c.yaml", "lr: 1")
    code = (
        "import sys; from twinkle.cli import CLI, Args; import contextlib, io\n"
        "CLI.from_args(['--config', 'c.yaml', '--extra.a', '1']).to_dict()\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): CLI.from_args(['--help'])\n"
        "print([m for m in ('torch', 'pydantic', 'numpy', 'transformers', 'datasets', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_does_not_load_the_arguments_of_scripts() -> None:
    code = "import sys, twinkle.cli; print('twinkle_cli.arguments' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_process_command_line_is_read_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", "--max_steps", "9"])
    assert CLI.from_args().training.max_steps == 9


def test_a_mistake_on_the_scripts_own_command_line_is_told_and_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--max_step", "9"])
    with pytest.raises(SystemExit) as ended:
        CLI.from_args()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("Error: 1 problem")
    assert "max_steps" in told


def test_a_flag_given_twice_shows_both_values() -> None:
    with pytest.raises(ConfigError, match=r"--batch_size is set twice \(4, then 2\); set it once"):
        CLI.from_args(["--batch_size", "4", "--batch_size", "2"])
    with pytest.raises(ConfigError, match=r"--learning_rate is set twice, first as --lr \(1.0, then 2.0\)"):
        CLI.from_args(["--lr", "1.0", "--learning_rate", "2.0"])


def test_a_broken_file_is_told_by_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("lr: 1\nmodel_id: [a\nmax_steps: 3\n")
    with pytest.raises(ConfigError, match=r"c.yaml: not YAML: line 3, column \d+: ") as error:
        CLI.from_args([], config_file=file)
    assert "unicode string" not in str(error.value)
