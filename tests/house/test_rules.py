"""`scripts/rules.py`: the rules hold for this repository, and each finds what violates it."""

import subprocess
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from dangers import dangers
from house import MEMBERS, ROOT


@pytest.fixture(scope="module")
def rules() -> Any:
    spec = spec_from_file_location("rules", ROOT / "scripts" / "rules.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_all_rules_hold() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "rules.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_says_what_must_hold(rules: Any) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "rules.py", "--list"], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(rules.RULES)
    assert all(line.endswith(".") for line in lines)


def test_a_path_of_one_machine_is_found(rules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("good\nsee " + "/".join(("", "home", "ana", "notes")), "utf-8")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "log.txt").write_text("/".join(("", "home", "ana", "notes")), "utf-8")
    monkeypatch.setattr(rules, "ROOT", tmp_path)
    (violation,) = rules.no_path_of_one_machine()
    assert violation.startswith("docs/page.md:2: ")


@pytest.mark.full
def test_a_danger_that_nobody_named_and_a_name_without_danger_are_found(
    rules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = dict(rules.DANGEROUS)
    file, what = named.popitem()
    monkeypatch.setattr(rules, "DANGEROUS", named | {"server/src/none.py": ["eval"]})
    assert sorted(rules.no_data_becomes_code()) == sorted(
        [
            f"{file}: contains {what}, DANGEROUS names None",
            "server/src/none.py: contains None, DANGEROUS names ['eval']",
        ]
    )


def test_a_distribution_of_another_shape_is_found(rules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "numbers" / "src" / "twinkle_numbers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "numbers" / "README.md").write_text("# numbers\n")
    (tmp_path / "numbers" / "pyproject.toml").write_text('[project]\nname = "twinkle-letters"\ndependencies = []\n')
    monkeypatch.setattr(rules, "MEMBERS", [type(MEMBERS[0])(tmp_path / "numbers")])
    assert [violation.partition("must hold: ")[2] for violation in rules.members_have_the_same_shape()] == [
        "README.md starts with its name",
        "py.typed is there",
        "tests are there",
        "the folder is called letters",
    ]


def test_a_component_that_is_described_badly_is_found(rules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = rules.own_specs()
    monkeypatch.setattr(rules, "_specs", lambda: [replace(spec, requires=()) for spec in specs])
    assert list(rules.later_imports_are_required())
    (good,) = (spec for spec in specs if spec.name == "CrossEntropyLoss")
    bad = [replace(good, summary="A sentence."), replace(good, ref="twinkle_losses:NoSuchLoss")]
    monkeypatch.setattr(rules, "_specs", lambda: bad)
    assert len(list(rules.summaries_are_one_line())) == 1
    assert any("NoSuchLoss" in violation for violation in rules.references_resolve())


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle as p\np.loads(data)", "import pickle"),
        ("def read(data):\n    from joblib.numpy_pickle import load", "import joblib.numpy_pickle"),
        ("importlib.import_module('dill')", "import of a pickle by its name"),
        ("import torch as t\nt.load(path, weights_only=True)", "torch.load"),
        ("from torch import load as read\nread(path)", "torch.load"),
        ("model.load(path, weights_only=False)", "weights_only=False"),
        ("np.load(path, allow_pickle=flag)", "allow_pickle=flag"),
        ("import yaml\nyaml.load(text, yaml.SafeLoader)", "yaml.load"),
        ("tarfile.open(path).extractall(folder)", "extractall without filter"),
        ("import shutil\nshutil.unpack_archive(path)", "unpack_archive without filter"),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", "trust_remote_code=True"),
        ("eval(text)", "eval"),
        ("subprocess.run(text, shell=True)", "shell=True"),
    ],
)
def test_a_danger_is_found(source: str, what: str) -> None:
    assert [danger.partition(": ")[2] for danger in dangers(source)] == [what]


def test_what_is_like_a_danger_and_is_none_is_not_found() -> None:
    good = [
        "model.eval()",
        "re.compile(text)",
        "import yaml\nyaml.safe_load(text)",
        "np.load(path, allow_pickle=False)",
        "archive.extractall(folder, filter='data')",
        "AutoModel.from_pretrained(name, trust_remote_code=False)",
        "from safetensors.torch import load_file\nload_file(path)",
        "from . import pickle",
    ]
    assert [source for source in good if dangers(source)] == []


def test_an_import_of_a_name_that_is_gone_is_found(rules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "speed.py").write_text(
        "from twinkle.errors import DataError\nfrom twinkle.errors import Gone2\nfrom twinkle.nowhere import x\n"
    )
    monkeypatch.setattr(rules, "ROOT", tmp_path)
    assert list(rules.scripts_import_what_exists()) == [
        "benchmarks/speed.py:2: twinkle.errors has no Gone2",
        "benchmarks/speed.py:3: twinkle.nowhere has no x",
    ]
