"""What a manifest may say, and what is said of one that is wrong."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinkle_registry import ComponentSpec, Manifest, ManifestError, read_manifest
from twinkle_registry.manifest import manifest_from_rows, manifest_to_rows
from twinkle_registry.reading import parse_manifest

FULL = """
schema = 1
core = ">=0.1,<1"
name = "acme-losses"
hooks = { module = "acme_losses.hooks", implements = ["twinkle_step_end"] }

[[component]]
kind = "loss"
name = "GRPOLoss"
ref = "acme_losses.grpo:GRPOLoss"
summary = "Clipped policy gradient"
requires = ["torch>=2.6", "numpy; python_version < '3'"]
runtimes = ["local", "served"]
tenant_safe = true
inputs = { advantages = "float32[T]" }
config = ".grpo:GRPOConfig"

[[command]]
name = "losses-bench"
ref = "acme_losses.bench:main"
summary = "Time every loss"
"""
MINIMAL: dict[str, Any] = {"schema": 1, "core": ">=0.1", "name": "acme"}
COMPONENT: dict[str, Any] = {"kind": "loss", "name": "L", "ref": "acme.m:L"}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Manifest]:
    def write_and_read(text: str, **more: str) -> Manifest:
        file = tmp_path / "twinkle-plugin.toml"
        file.write_text(text, "utf-8")
        return read_manifest(file, "acme-losses", "1.2", **more)

    return write_and_read


def test_every_key_is_read(read: Callable[..., Manifest]) -> None:
    manifest = read(FULL, package="acme_losses")
    assert (manifest.schema, manifest.core, manifest.name) == (1, ">=0.1,<1", "acme-losses")
    assert manifest.components == (
        ComponentSpec(
            kind="loss",
            name="GRPOLoss",
            ref="acme_losses.grpo:GRPOLoss",
            summary="Clipped policy gradient",
            requires=("torch>=2.6", "numpy; python_version < '3'"),
            runtimes=("local", "served"),
            tenant_safe=True,
            inputs={"advantages": "float32[T]"},
            config="acme_losses.grpo:GRPOConfig",
            dist="acme-losses",
            version="1.2",
            root="acme_losses",
        ),
    )
    assert manifest.hooks is not None
    assert (manifest.hooks.module, manifest.hooks.implements) == ("acme_losses.hooks", ("twinkle_step_end",))
    (command,) = manifest.commands
    assert (command.name, command.ref, command.summary, command.dist) == (
        "losses-bench",
        "acme_losses.bench:main",
        "Time every loss",
        "acme-losses",
    )


def test_a_manifest_survives_the_cache_format(read: Callable[..., Manifest]) -> None:
    import json

    for text in (FULL, 'schema = 1\ncore = ">=0.1"\nname = "acme"'):
        manifest = read(text)
        assert manifest_from_rows(json.loads(json.dumps(manifest_to_rows(manifest)))) == manifest


def test_specs_are_hashable_and_can_be_pickled(read: Callable[..., Manifest]) -> None:
    import pickle

    (spec,) = read(FULL).components
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert len({spec, spec}) == 1
    assert str(spec) == "loss 'GRPOLoss' of acme-losses"


def test_code_from_elsewhere_is_imported_under_its_own_root(read: Callable[..., Manifest]) -> None:
    manifest = read(FULL, package="acme_losses", root="twinkle_registry.code.acme_ab12")
    (spec,) = manifest.components
    assert spec.ref == "twinkle_registry.code.acme_ab12.grpo:GRPOLoss"
    assert spec.config == "twinkle_registry.code.acme_ab12.grpo:GRPOConfig"
    assert manifest.hooks is not None
    assert manifest.hooks.module == "twinkle_registry.code.acme_ab12.hooks"
    assert manifest.commands[0].ref == "twinkle_registry.code.acme_ab12.bench:main"


def test_a_ref_into_the_package_itself_keeps_its_root(read: Callable[..., Manifest]) -> None:
    text = 'schema = 1\ncore = ">=0.1"\nname = "acme"\n[[component]]\nkind = "loss"\nname = "L"\nref = "{}:L"'
    assert read(text.format("acme"), package="acme", root="other.acme_1").components[0].ref == "other.acme_1:L"
    assert read(text.format("."), package="acme").components[0].ref == "acme:L"
    assert read(text.format("acmelib"), package="acme", root="other.acme_1").components[0].ref == "acmelib:L"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema": "1"}, "schema must be the number 1, got '1' (str)"),
        ({"schema": True}, "schema must be the number 1, got True (bool)"),
        ({"schema": 0}, "schema must be the number 1, got 0 (int)"),
        ({"core": 1}, "core must be versions of twinkle-core such as '>=0.1,<1', got 1 (int)"),
        ({"core": "new"}, "core must be versions of twinkle-core such as '>=0.1,<1', got 'new' (str)"),
        ({"core": ""}, "core must be versions of twinkle-core such as '>=0.1,<1', got '' (str)"),
        ({"name": "acme/x"}, "name must be the name of the plugin, such as 'acme-losses', got 'acme/x' (str)"),
        ({"name": 3}, "name must be the name of the plugin, such as 'acme-losses', got 3 (int)"),
        ({"components": []}, "components: unknown key, nearest: 'component'"),
        ({"component": {}}, "component must be a list of tables [[component]], got {} (dict)"),
        ({"component": [1]}, "component must be a list of tables [[component]], got [1] (list)"),
        ({"command": "x"}, "command must be a list of tables [[command]], got 'x' (str)"),
        ({"hooks": "acme.hooks"}, "hooks must be a table with 'module', 'implements', got 'acme.hooks' (str)"),
        (
            {"hooks": {"module": "a b", "implements": ["x"]}},
            "hooks.module must be a module such as 'acme.hooks', got",
        ),
        ({"hooks": {"module": "a"}}, "hooks.implements: missing"),
        ({"hooks": {"module": "a", "implements": []}}, "hooks.implements must be a list of distinct hook names"),
        ({"hooks": {"module": "a", "implements": "x"}}, "hooks.implements must be a list of distinct hook names"),
        ({"hooks": {"module": "a", "implements": ["x"], "modul": "b"}}, "hooks.modul: unknown key, nearest: 'module'"),
        (
            {"command": [{"name": "x", "ref": "a"}]},
            "command #1 'x'.ref must be 'package.module:Attr', got 'a' (str)",
        ),
        ({"command": [{"name": "x y", "ref": "a:b"}]}, "command #1 'x y'.name must be a command name"),
        ({"command": [{"name": "x", "ref": "a:b", "help": ""}]}, "command #1 'x'.help: unknown key"),
        ({"command": [{"name": "x", "ref": "a:b"}] * 2}, "command: x is listed twice"),
        ({"component": [COMPONENT] * 2}, "component: loss L is listed twice"),
    ],
)
def test_a_wrong_key_of_the_file_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ManifestError) as error:
        parse_manifest({**MINIMAL, **change}, "acme.toml", "acme", "1")
    assert text in str(error.value)
    assert str(error.value).startswith("acme.toml (of acme): 1 problem\n  ")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "Loss"}, "kind must be a kind such as 'loss', got 'Loss' (str)"),
        ({"kind": 1}, "kind must be a kind such as 'loss', got 1 (int)"),
        ({"name": "a/b"}, "name must be a name without spaces, '/', ':' and '#', got 'a/b' (str)"),
        ({"name": ""}, "name must be a name without spaces"),
        ({"ref": "acme.loss"}, "ref must be 'package.module:Attr', got 'acme.loss' (str)"),
        ({"ref": "acme:a:b"}, "ref must be 'package.module:Attr'"),
        ({"ref": ["a:b"]}, "ref must be 'package.module:Attr', got ['a:b'] (list)"),
        ({"summary": 1}, "summary must be a string, got 1 (int)"),
        ({"requires": "torch"}, "requires must be a list of requirements such as 'torch>=2.6', got 'torch' (str)"),
        ({"requires": ["torch >> 2"]}, "such as 'torch>=2.6', but 'torch >> 2' is not one, got"),
        ({"requires": [1]}, "requires must be a list of requirements"),
        ({"runtimes": "ray"}, "runtimes must be a list of distinct runtime names, got 'ray' (str)"),
        ({"runtimes": []}, "runtimes must be a list of distinct runtime names"),
        ({"runtimes": ["ray", "ray"]}, "runtimes must be a list of distinct runtime names"),
        ({"tenant_safe": "yes"}, "tenant_safe must be true or false, got 'yes' (str)"),
        ({"tenant_safe": 1}, "tenant_safe must be true or false, got 1 (int)"),
        ({"inputs": ["advantages"]}, "inputs must be a table of argument to type"),
        ({"inputs": {"advantages": 1}}, "inputs must be a table of argument to type"),
        ({"inputs": {"old logps": "float32"}}, "inputs must be a table of argument to type"),
        ({"config": "acme"}, "config must be 'package.module:Attr', got 'acme' (str)"),
        ({"requieres": []}, "requieres: unknown key, nearest: 'requires'"),
        ({"dist": "x"}, "dist: unknown key"),
    ],
)
def test_a_wrong_key_of_a_component_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ManifestError) as error:
        parse_manifest({**MINIMAL, "component": [{**COMPONENT, **change}]}, "acme.toml", "acme", "1")
    assert text in str(error.value)
    assert "component #1" in str(error.value)


def test_all_problems_of_a_file_are_reported_at_once(read: Callable[..., Manifest]) -> None:
    with pytest.raises(ManifestError) as error:
        read('schema = 1\nnmae = "acme"\n[[component]]\nkind = "loss"\ntenant_safe = "no"\n')
    lines = str(error.value).splitlines()
    assert lines[0].endswith("twinkle-plugin.toml (of acme-losses): 6 problems")
    assert [line.strip() for line in lines[1:]] == [
        "nmae: unknown key, nearest: 'name'",
        "name: missing",
        "core: missing",
        "component #1.name: missing",
        "component #1.ref: missing",
        "component #1.tenant_safe must be true or false, got 'no' (str)",
    ]


def test_a_newer_schema_says_how_to_read_it(read: Callable[..., Manifest]) -> None:
    with pytest.raises(
        ManifestError, match=r"schema = 2, but this version reads 1; run: pip install -U twinkle-registry"
    ):
        read('schema = 2\nwhatever = "x"')


@pytest.mark.parametrize("text", ["schema = ", "a = " + "[" * 20_000])
def test_what_is_not_toml_is_a_manifest_error_with_its_cause(read: Callable[..., Manifest], text: str) -> None:
    with pytest.raises(
        ManifestError, match=r"twinkle-plugin.toml: (not a TOML file in UTF-8|nested too deeply)"
    ) as error:
        read(text)
    assert error.value.__cause__ is not None


def test_a_file_that_cannot_be_read_is_a_manifest_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="cannot be read"):
        read_manifest(tmp_path / "absent.toml", "acme", "1")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(ManifestError, match="not a TOML file in UTF-8"):
        read_manifest(str(tmp_path / "latin.toml"), "acme", "1")
    (tmp_path / "huge.toml").write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(ManifestError, match="a manifest must have at most 1048576 bytes, got 1048577"):
        read_manifest(tmp_path / "huge.toml", "acme", "1")


plain = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)
keys = st.sampled_from(
    [*MINIMAL, *COMPONENT, "component", "command", "hooks", "module", "implements", "requires", "inputs", "runtimes"]
)
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
tables = st.dictionaries(keys, plain, max_size=8)


@patient
@given(
    raw=st.dictionaries(keys, plain | tables | st.lists(tables, max_size=3), max_size=8),
    good=st.booleans(),
)
def test_no_table_raises_anything_but_a_manifest_error(raw: dict[str, Any], good: bool) -> None:
    with contextlib.suppress(ManifestError):
        assert isinstance(parse_manifest({**raw, **MINIMAL} if good else raw, "fuzz.toml", "acme", "1"), Manifest)


@patient
@given(data=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_bytes_raise_anything_but_a_manifest_error(data: bytes) -> None:
    class Member:
        def read_bytes(self) -> bytes:
            return data

    with pytest.raises(ManifestError):
        read_manifest(Member(), "acme", "1")  # type: ignore[arg-type]
