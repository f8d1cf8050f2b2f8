"""Rules of the house that no linter knows: small files, explained names, nothing of one machine."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
from dangers import dangers
from house import MEMBERS, ROOT, Member, modules_below

FOLDERS = [
    "tests",
    "scripts",
    "examples",
    "benchmarks",
    "docs",
    ".ci",
    *(str(m.folder.relative_to(ROOT)) for m in MEMBERS),
]
TEXTS = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".sh", ".jsonl", ""}
MACHINE = re.compile(r"/(?:" + "|".join(("work", "root", "home")) + r")/\w|[A-Z]:\\\\?Users")
ELSEWHERE = {"init_tinker_client", "init_twinkle_client"}  # of twinkle-client, which core names and does not need
DANGEROUS = {
    "plugins/cli/src/twinkle_cli/configuration.py": ["yaml.load"],  # with a safe loader of its own
    "plugins/kernels/src/twinkle_kernels/loading.py": ["trust_remote_code=True"],  # kernels that were judged before
    "plugins/testing/src/twinkle_testing/contracts/common.py": ["import pickle"],  # to and fro, of a component's own
    "plugins/testing/src/twinkle_testing/contracts/optimizer.py": ["torch.load"],  # as the next, of what it just saved
    "plugins/testing/src/twinkle_testing/contracts/scheduler.py": ["torch.load", "weights_only=False"],
    "plugins/rewards/src/twinkle_rewards/worker.py": ["import pickle"],  # to its own process and back, of a call
    "plugins/transformers/src/twinkle_transformers/loading.py": ["trust_remote_code=trust_remote_code"],  # asked for
}
"""What data may do, file by file; nothing of the service is here, for strangers send it theirs."""
HOUSE = [name for member in MEMBERS for name in modules_below(member.source.parent)]


def files() -> list[Path]:
    made = {"__pycache__", ".venv", "site", "runs", "dist", "build"}
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    found = [
        path for path in [*ROOT.iterdir(), *below] if path.is_file() and path.suffix in TEXTS and path.name != ".git"
    ]
    return sorted(path for path in found if not made & {*path.relative_to(ROOT).parts})


def test_nothing_names_a_place_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in files()
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        if MACHINE.search(line)
    ]
    assert found == []


def test_no_data_becomes_code_or_leaves_its_folder() -> None:
    below = (path for member in MEMBERS for path in sorted(member.source.rglob("*.py")))
    found = {str(path.relative_to(ROOT)): dangers(path.read_text("utf-8")) for path in below}
    shown = {path: [danger.partition(": ")[2] for danger in each] for path, each in found.items() if each}
    assert shown == DANGEROUS
    assert not [path for path in DANGEROUS if path.startswith("server/")]


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


@pytest.mark.parametrize("name", HOUSE)
def test_a_module_explains_itself_and_its_public_names(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, "a module starts with what it is for"
    public = [getattr(module, name) for name in getattr(module, "__all__", ()) if name not in ELSEWHERE]
    explained = [value for value in public if inspect.isclass(value) or inspect.isroutine(value)]
    assert [value for value in explained if value.__module__.startswith("twinkle") and not value.__doc__] == []


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_every_distribution_has_the_same_shape(member: Member) -> None:
    folder = member.folder
    assert (folder / "README.md").read_text("utf-8").startswith(f"# {member.name}\n")
    assert (member.source / "py.typed").is_file()
    assert list((folder / "tests").glob("test_*.py"))
    named = {"twinkle-core": "twinkle_core", "twinkle-scaffolds": "templates"}
    expected = named.get(member.name, member.name.removeprefix("twinkle-"))
    assert folder.name == expected
    assert not list((folder / "tests").rglob("__init__.py"))
