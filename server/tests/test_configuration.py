"""The configuration file, its flags and its variables: every setting has one place, and the wrong is refused."""

import dataclasses
import json
from dataclasses import asdict, dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from click.testing import CliRunner
from ledger_engine import ENGINE, MODEL

from twinkle.errors import ArgumentError, ConfigError, ModelLoadError, TwinkleError
from twinkle_server import configuration
from twinkle_server.cli.serve import FLAGS, bounds, variable
from twinkle_server.cli.serve import main as serve
from twinkle_server.cli.server import main as server
from twinkle_server.configuration import HIDDEN, describe, entries, load, render
from twinkle_server.serve import check, resolve
from twinkle_server.settings import SECRET, Limits, Settings, Times


def write(folder: Path, **values: Any) -> Path:
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump({"model": "tiny", "data": str(folder / "data"), **values}))
    return file


def leaves(kind: type, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Return the fields of `Settings` and of its nested dataclasses, found another way: by an instance."""
    made = Settings("m", Path("d")) if kind is Settings else kind()
    found: set[tuple[str, ...]] = set()
    for item in dataclasses.fields(kind):
        value = getattr(made, item.name)
        found |= leaves(type(value), (*path, item.name)) if dataclasses.is_dataclass(value) else {(*path, item.name)}
    return found


def test_every_setting_has_exactly_one_place_in_the_file() -> None:
    keys, paths = [entry.key for entry in entries()], [entry.path for entry in entries()]
    assert len(keys) == len(set(keys))
    assert len(paths) == len(set(paths))
    assert set(paths) == leaves(Settings)
    assert all(entry.meaning for entry in entries()), "the docstring explains each of them"


def test_every_flag_and_every_variable_sets_one_of_them() -> None:
    keys = {entry.key for entry in entries()}
    assert {flag.key for flag in FLAGS} < keys
    assert len({variable(flag) for flag in FLAGS}) == len(FLAGS)
    options = {option.name for option in serve.params} - {"config", "model"}
    assert options == {flag.key.replace(".", "__") for flag in FLAGS}


def test_an_empty_file_is_the_default_settings(tmp_path: Path) -> None:
    assert load(write(tmp_path)).settings == Settings("tiny", tmp_path / "data")


def test_every_value_arrives_in_its_field(tmp_path: Path) -> None:
    """Each number is set to a value of its own; the settings must then hold exactly those."""
    values: dict[str, Any] = {}
    expected: dict[tuple[str, ...], Any] = {}
    for number, entry in enumerate(entries(), 1):
        if isinstance(entry.default, int | float) and not isinstance(entry.default, bool):
            place = values
            for part in entry.parts[:-1]:
                place = place.setdefault(part, {})
            low, high = bounds(entry.annotation)
            value = number if high is None or number <= high else high
            place[entry.parts[-1]] = expected[entry.path] = value if low is None or low < 2 else low + number
    settings = load(write(tmp_path, **values)).settings
    assert len(expected) > 30
    for path, number in expected.items():
        found: Any = settings
        for name in path:
            found = getattr(found, name)
        assert found == number, path


def test_what_is_wrong_is_told_at_once_with_the_nearest_name(tmp_path: Path) -> None:
    file = write(tmp_path, network={"prot": 1, "port": 70000}, tims={}, times={"poll": "soon", "drain": 0})
    with pytest.raises(ConfigError) as refused:
        load(file, {"limits.datums": 0}, {"limits.datums": "--datums"})
    text = str(refused.value)
    assert "6 problems" in text
    for part in ("network.prot: unknown key", "nearest: network.port", "70000", "tims: unknown key", "times.poll",
                 "times.drain", "limits.datums: given 0 (int) by --datums"):  # fmt: skip
        assert part in text, text


@pytest.mark.parametrize("missing", ["model", "data"])
def test_what_must_be_set_is_asked_for_with_the_other_problems(missing: str, tmp_path: Path) -> None:
    values = {"model": "tiny", "data": "runs", "network": {"prot": 1}}
    values[missing[:-1]] = values.pop(missing)
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=rf"3 problems(?s:.*)\n  {missing} must be set: ") as refused:
        load(file)
    for part in (f"{missing[:-1]}: unknown key", f"nearest: {missing}", "network.prot: unknown key"):
        assert part in str(refused.value)


@pytest.mark.parametrize("key", ["engine.pass_tokens", "network.port", "times.poll", "limits.adapters"])
def test_true_is_not_a_number(key: str, tmp_path: Path) -> None:
    group, name = key.split(".")
    with pytest.raises(ConfigError, match=rf"{key}: given True \(bool\) .*: must be a number"):
        load(write(tmp_path, **{group: {name: True}}))


@pytest.mark.parametrize("text", ["- a list\n", "model: [\n", "model: a\nmodel: b\n"])
def test_a_file_that_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"serve\.yaml"):
        load(file)


def printed(*arguments: str, **variables: str) -> dict[str, tuple[Any, str]]:
    result = CliRunner().invoke(server, ["print", *arguments, "--json"], env=variables, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return {row["key"]: (row["value"], row["origin"]) for row in json.loads(result.output)}


def test_flags_override_variables_and_those_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, network={"port": 1, "host": "::1"}, times={"loss": 3}, losses={"workers": True})
    found = printed("-c", str(file), "--port", "3", TWINKLE_SERVE_PORT="2", TWINKLE_SERVE_LOSS_SECONDS="4")
    assert found["network.port"] == (3, "--port")
    assert found["times.loss"] == (4.0, "TWINKLE_SERVE_LOSS_SECONDS")
    assert found["network.host"] == ("::1", str(file))
    assert found["access.auth"] == (True, "default")


def test_flags_have_the_units_of_their_names(tmp_path: Path) -> None:
    words = ["--max-pass-ms", "250", "--loss-memory-mb", "64", "--trash-hours", "0.5", "--no-auth", "--no-loss-workers"]
    found = printed(*words, "--loss", "A", "--loss", "B", "--trusted-proxy", "10.0.0.0/8", "--tls-cert", "c.pem")
    expected = {
        "engine.max_pass_seconds": 0.25,
        "limits.loss_bytes": 64 * 2**20,
        "times.trash": 1800.0,
        "access.auth": False,
        "losses.workers": False,
        "losses.allowed": ["A", "B"],
        "network.trusted_proxies": ["10.0.0.0/8"],
        "network.tls_cert": "c.pem",
    }
    assert {key: found[key][0] for key in expected} == expected
    assert found["access.auth"][1] == "--no-auth"


def test_a_variable_that_means_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"TWINKLE_SERVE_PRT: unknown environment variable; nearest: .*SERVE_PORT"):
        printed(TWINKLE_SERVE_PRT="1")


def test_what_is_printed_is_a_file_with_the_same_settings(tmp_path: Path) -> None:
    given = write(
        tmp_path, network={"port": 0}, losses={"allowed": ["A"]}, engine={"options": {"marks": "x y", "deep": {"n": 1}}}
    )
    again = tmp_path / "again.yaml"
    again.write_text(render(load(given)))
    assert load(again).settings == load(given).settings
    assert f"port: 0  # {given}" in again.read_text()


def test_secrets_are_never_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Dashboard:
        """A group, as others add them.

        Attributes:
            title: shown.
            cookie: signs sessions.
        """

        title: str = "Twinkle"
        cookie: Annotated[str | None, SECRET] = None

    group = ("dashboard", Dashboard, field(default_factory=Dashboard))
    grown = make_dataclass("Grown", [group], bases=(Settings,), frozen=True)
    grown.__doc__ = Settings.__doc__
    monkeypatch.setattr(configuration, "Settings", grown)
    options = {
        "api_key": "abc-1",
        "url": "https://user:abc-2@host/x",
        "nested": {"password": "abc-3"},
        "pass_tokens": 9,
    }
    file = write(tmp_path, dashboard={"cookie": "abc-4", "title": "Ours"}, engine={"options": options})
    found = load(file)
    settings: Any = found.settings
    assert settings.dashboard == Dashboard("Ours", "abc-4"), "one field of Settings adds a group"
    text = render(found) + json.dumps(describe(found))
    assert "abc-" not in text
    assert text.count(HIDDEN) == 2 * 4
    assert "pass_tokens: 9" in text
    assert "abc-4" not in settings.dump(), "the engine's command line, which others can read"
    with pytest.raises(ConfigError) as refused:
        load(write(tmp_path, dashboard={"cookie": 44556677}))
    assert "dashboard.cookie" in str(refused.value)
    assert "44556677" not in str(refused.value)


def test_settings_survive_the_way_to_the_engine(tmp_path: Path) -> None:
    settings = Settings(
        "m", tmp_path, losses=("a",), tls_cert=tmp_path / "c", trusted_proxies=("::1",), extra={"a": [1, {"b": None}]},
        limits=Limits(datums=3), times=Times(poll=0.5), in_process_losses=("x", "y"),
    )  # fmt: skip
    assert Settings.parse(settings.dump()) == settings
    assert asdict(Settings.parse(settings.dump())) == asdict(settings)


def checked(*arguments: str) -> str:
    result = CliRunner().invoke(server, ["check", *arguments])
    if isinstance(result.exception, Exception) and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_settings_are_checked_without_serving(tmp_path: Path) -> None:
    whole = {"model": str(MODEL), "engine": {"backend": ENGINE}, "network": {"port": 0}}
    file = write(tmp_path, **whole)
    assert checked("-c", str(file)).endswith("the settings are valid\n")
    assert not (tmp_path / "data").exists()
    with pytest.raises(ConfigError, match="--no-auth would accept"):
        checked("-c", str(file), "--no-auth", "--host", "0.0.0.0")
    with pytest.raises(ConfigError, match="cannot use the certificate"):
        checked("-c", str(file), "--tls-cert", str(file))
    with pytest.raises(ConfigError, match="needs --tls-cert"):
        checked("-c", str(file), "--tls-key", str(file))
    with pytest.raises(ConfigError, match="--root-path must be a path"):
        checked("-c", str(file), "--root-path", "twinkle/")
    with pytest.raises(ConfigError, match="--trusted-proxy must be an address"):
        checked("-c", str(file), "--trusted-proxy", "proxy.local")
    with pytest.raises(ModelLoadError):
        checked("-c", str(file), str(tmp_path / "none"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "secret").write_bytes(b"x" * 32)
    with pytest.raises(ConfigError, match=r"twinkle\.db is missing"):
        checked("-c", str(file))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "template": ({"template": "Templat"}, r"template 'Templat'(?s:.*)Template"),
    "template reference": ({"template": "json:JSONDecoder"}, r"template 'json:JSONDecoder'"),
    "data set": (
        {"datasets": {"sets": {"ms://a/b": "/nope.jsonl"}}},
        r"datasets.sets: 'ms://a/b': /nope.jsonl does not exist",
    ),
    "data set's hub": ({"datasets": {"sets": {"a/b": "hff://a/b"}}}, r"hub 'hff'"),
    "the same data set": (
        {"datasets": {"sets": {"a/b": "ms://c/d", "ms://a/b": "ms://c/e"}}},
        r"'a/b' and 'ms://a/b' are the same id",
    ),
    "collector": (
        {"traces": {"otlp_endpoint": "notaurl"}},
        r"--otlp-endpoint must be a URL such as http://127.0.0.1:4318, got 'notaurl'",
    ),
    "collector's port": ({"traces": {"otlp_endpoint": "http://a:99999"}}, r"--otlp-endpoint must be a URL"),
    "option that is a setting": (
        {"engine": {"backend": ENGINE, "options": {"pass_tokens": 3}}},
        r"engine.options must not contain pass_tokens",
    ),
    "data in /proc": ({"data": "/proc/x"}, r"--data /proc/x: cannot create it: /proc: "),
    "data is a file": ({"data": __file__}, r"cannot write it: .*Not a directory"),
    "plugin": ({"losses": {"in_process": ["twinkle-loses"]}}, r"--loss-in-process twinkle-loses: .*twinkle-losses"),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_would_fail_later_are_refused(name: str, tmp_path: Path) -> None:
    values, message = WRONG[name]
    whole: dict[str, Any] = {"model": str(MODEL), "engine": {"backend": ENGINE}, "network": {"port": 0}}
    with pytest.raises((TwinkleError, ConfigError), match=message) as refused:
        checked("-c", str(write(tmp_path, **{**whole, **values})))
    assert "problems" not in str(refused.value)
    assert not (tmp_path / "data").exists()


def test_an_option_that_the_engine_does_not_take_is_refused(tmp_path: Path) -> None:
    engine = tmp_path / "strict.py"
    engine.write_text(
        "from ledger_engine import LedgerEngine\n"
        "class Strict(LedgerEngine):\n"
        "    def __init__(self, model_id, pass_tokens=None, depth=1):\n"
        "        raise RuntimeError('a check does not build the engine')\n"
    )
    options = {"backend": f"{engine}:Strict", "options": {"dept": 3}}
    file = write(tmp_path, model=str(MODEL), engine=options, network={"port": 0})
    with pytest.raises(ArgumentError, match=r"unknown argument 'dept', nearest: 'depth'"):
        checked("-c", str(file))
    file = write(tmp_path, model=str(MODEL), engine={**options, "options": {"depth": 3}}, network={"port": 0})
    assert "the settings are valid" in checked("-c", str(file))


def test_a_collector_of_the_environment_is_checked_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318")
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT must be a URL .*got 'collector:4318'"):
        check(Settings("m", tmp_path))
    check(Settings("m", tmp_path, otlp_endpoint="http://collector:4318"))


def test_all_problems_of_valid_keys_are_told_at_once(tmp_path: Path) -> None:
    """Model, engine, losses, certificate and proxies are found by different means, and reported in one message."""
    values: dict[str, Any] = {
        "model": str(tmp_path / "none"),
        "data": "/proc/x",
        "template": "Nope",
        "network": {
            "host": "0.0.0.0",
            "port": 0,
            "tls_cert": str(tmp_path / "no.pem"),
            "trusted_proxies": ["abc", "10.0.0.0/33"],
        },
        "access": {"auth": False},
        "engine": {"backend": "NoEngine", "options": {"foo": 1}},
        "losses": {"allowed": ["NoLoss", "cross_entropi"]},
        "traces": {"otlp_endpoint": "notaurl"},
        "datasets": {"sets": {"a/b": "/nope.jsonl"}},
    }
    with pytest.raises(ConfigError, match=r"^12 problems in the settings\n") as refused:
        checked("-c", str(write(tmp_path, **values)))
    parts = ("--no-auth", "no.pem", "'abc'", "10.0.0.0/33", "NoEngine", "NoLoss", "cross_entropi", "notaurl", "'Nope'",
             str(tmp_path / "none"), "/proc", "/nope.jsonl")  # fmt: skip
    assert [part for part in parts if part not in str(refused.value)] == []


def test_the_same_problems_end_a_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 problems(?s:.*)NoLoss(?s:.*)Nope"):
        resolve(Settings(str(MODEL), tmp_path, backend=ENGINE, losses=("NoLoss",), template="Nope"))
