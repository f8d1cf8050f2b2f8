"""Loading code from a hub: it is refused until it is added, and then imported under a unique module name."""

import hashlib
import importlib
import importlib.resources
import inspect
import os
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle_registry import (
    ComponentConflict,
    ComponentNotFound,
    ManifestError,
    NotTrusted,
    PluginBroken,
    PluginIncompatible,
    Registry,
    RequirementMissing,
    Settings,
)
from twinkle_registry.trust import lock, store
from twinkle_registry.trust.lock import Lock

House = Callable[..., Registry]
PATCH = """
from house_contracts import Loss
from .inner.words import WORD

class Focal(Loss):
    word = WORD
    def __call__(self, inputs): ...
"""
BARE = {"__init__.py": "from .focal import Focal", "focal.py": PATCH, "inner/words.py": "WORD = 'one'"}
MANIFEST = 'schema = 1\ncore = ">=0.1,<1"\nname = "acme-focal"\n'


@pytest.fixture
def registry(hub: Any, house: House) -> Registry:
    return house()


def with_manifest(*components: str, **files: str) -> dict[str, str]:
    return {"twinkle-plugin.toml": MANIFEST + "".join(components), **{f"{k}.py": v for k, v in files.items()}}


def test_code_is_refused_with_the_command_that_would_trust_this_very_commit(hub: Any, registry: Registry) -> None:
    commit = hub.push("acme/focal", BARE)
    with pytest.raises(NotTrusted) as error:
        registry.resolve("hf://acme/focal", "loss")
    assert str(error.value).endswith(
        f"to review and trust this commit, run: twinkle plugins add hf://acme/focal@{commit}"
    )
    assert hub.asked == ["commit_of acme/focal"], "nothing is downloaded before the policy was asked"


def test_the_command_of_the_refusal_trusts_the_reference_that_was_refused(
    hub: Any, registry: Registry, add: Any
) -> None:
    commit = hub.push("acme/focal", BARE)
    add(registry, f"hf://acme/focal@{commit}")
    for reference in ("hf://acme/focal", "hf://acme/focal@main", f"hf://acme/focal@{commit}#Focal"):
        assert registry.resolve(reference, "loss").word == "one"


def test_a_subclass_of_the_contract_is_found_without_a_name(hub: Any, registry: Registry, add: Any) -> None:
    hub.push("acme/focal", BARE)
    add(registry, "ms://acme/focal")
    found = registry.resolve("ms://acme/focal", "loss")
    assert found is registry.resolve("ms://acme/focal#Focal", "loss")
    assert found.__module__.startswith("twinkle_registry.code.focal_")
    assert not [entry for entry in sys.path if "code" in Path(entry).parts]
    assert "def __call__" in inspect.getsource(found)


def test_of_several_subclasses_one_must_be_named(hub: Any, registry: Registry, add: Any) -> None:
    text = "from house_contracts import Loss\n" + "\n".join(
        f"class {name}(Loss):\n    def __call__(self, inputs): ...\n" for name in ("One", "Two")
    )
    hub.push("acme/two", {"__init__.py": text})
    add(registry, "hf://acme/two")
    with pytest.raises(ComponentNotFound, match="several classes of that kind; add '#Name', one of 'One', 'Two'"):
        registry.resolve("hf://acme/two", "loss")
    assert registry.resolve("hf://acme/two#Two", "loss").__name__ == "Two"
    with pytest.raises(ComponentNotFound, match="has no 'Tow'; nearest: 'Two'"):
        registry.resolve("hf://acme/two#Tow", "loss")
    with pytest.raises(ComponentNotFound, match="the kind optimizer has no contract, so name the component"):
        registry.resolve("hf://acme/two", "optimizer")


def test_what_was_only_imported_and_what_is_abstract_is_no_component(hub: Any, registry: Registry, add: Any) -> None:
    text = (
        "from house_contracts import Loss\nclass Half(Loss): ...\nclass Whole(Half):\n    def __call__(self, x): ...\n"
    )
    hub.push("acme/half", {"__init__.py": text})
    hub.push("acme/none", {"__init__.py": "from house_contracts import Loss\n"})
    for repo in ("half", "none"):
        add(registry, f"hf://acme/{repo}")
    assert registry.resolve("hf://acme/half", "loss").__name__ == "Whole"
    with pytest.raises(ComponentNotFound, match=r"neither a twinkle-plugin\.toml nor, in its __init__\.py, a subclass"):
        registry.resolve("hf://acme/none", "loss")


def test_what_fits_without_being_a_subclass_is_named_and_never_guessed(hub: Any, registry: Registry, add: Any) -> None:
    call = "    def __call__(self, inputs): ...\n"
    functions = "def one(inputs): ...\ndef two(inputs): ...\ndef _inner(): ...\n"
    half = "from house_contracts import Loss\nclass Half(Loss):\n    def forward(self, inputs): ...\n"
    likes = "".join(
        f"class {name}:\n    def accumulate(self, value): ...\n    def calculate(self): ...\n" for name in "AB"
    )
    hub.push("acme/two", {"__init__.py": functions + half + likes + "class C:\n" + call})
    add(registry, "hf://acme/two")
    with pytest.raises(ComponentNotFound) as error:
        registry.resolve("hf://acme/two", "loss")
    assert str(error.value).endswith(
        "a subclass of house_contracts.Loss; Half does not implement '__call__'; "
        "if you mean one of 'one', 'two', write 'hf://acme/two#one'"
    )
    with pytest.raises(ComponentNotFound, match="if you mean one of 'A', 'B', write 'hf://acme/two#A'"):
        registry.resolve("hf://acme/two", "metric")
    assert registry.resolve("hf://acme/two#two", "loss").__name__ == "two"
    assert registry.resolve("hf://acme/two#B", "metric").__name__ == "B"


def test_all_problems_of_a_manifest_are_told_at_once(hub: Any, registry: Registry, add: Any, table: Any) -> None:
    wrong = table("A", "a:A", kind="los", sumary='"x"') + table("B", "b:B")
    hub.push("acme/focal", with_manifest(wrong, loss=""))
    with pytest.raises(ManifestError) as error:
        add(registry, "hf://acme/focal")
    text = str(error.value)
    assert text.splitlines()[0].endswith(": 3 problems")
    assert "component #1 'A'.sumary: unknown key, nearest: 'summary'" in text
    assert "'a:A', 'b:B' are outside of the repository; use refs that start with a dot" in text
    assert "component 'A' is of the unknown kind 'los', nearest: 'loss'" in text
    hub.push("acme/focal", with_manifest(table("A", "a:A", kind="los"), loss=""))
    with pytest.raises(ManifestError, match=r"(?s)'a:A' is outside of the repository.*unknown kind 'los'"):
        add(registry, "hf://acme/focal")


def test_a_manifest_names_the_components(hub: Any, registry: Registry, add: Any, table: Any, loss_source: str) -> None:
    refs = table("Focal", ".loss:PlainLoss") + table("Whole", "acme_focal.loss:PlainLoss", kind="optimizer")
    hub.push("acme/focal", with_manifest(refs, loss=loss_source))
    proposal = add(registry, "hf://acme/focal")
    assert proposal.offers == ("loss Focal", "optimizer Whole")
    found = registry.resolve("hf://acme/focal", "loss")
    assert (
        found is registry.resolve("hf://acme/focal#Focal", "loss") is registry.resolve("hf://acme/focal", "optimizer")
    )
    with pytest.raises(ComponentNotFound, match="lists no loss 'Fokal'; nearest: 'Focal'"):
        registry.resolve("hf://acme/focal#Fokal", "loss")
    with pytest.raises(ComponentNotFound, match="lists no metric; it offers loss 'Focal', optimizer 'Whole'"):
        registry.resolve("hf://acme/focal", "metric")


def test_a_locked_plugin_is_named_in_any_run(
    hub: Any, registry: Registry, house: House, add: Any, table: Any, loss_source: str
) -> None:
    hooks = 'hooks = { module = "acme_focal.hooks", implements = ["twinkle_step_end"] }\n'
    hook = "from twinkle_registry import hookimpl\n@hookimpl\ndef twinkle_step_end(metrics): metrics.append('hub')\n"
    files = with_manifest(hooks, table("Focal", ".loss:PlainLoss"), loss=loss_source, hooks=hook)
    commit = hub.push("acme/focal", files)
    assert add(registry, "hf://acme/focal").offers == ("loss Focal", "hook twinkle_step_end")
    hub.offline = True
    later = house()
    record = next(r for r in later.records if r.name == "acme-focal")
    assert (record.dist, record.version, record.status) == ("hf://acme/focal", commit, "ok")
    assert later.build("Focal", "loss", 0.5).epsilon == 0.5
    assert later.build("acme-focal/Focal", "loss") is not None
    metrics: list[str] = []
    later.hook("twinkle_step_end")(metrics=metrics)
    assert metrics == ["hub"]


def test_what_is_locked_and_gone_or_forbidden_is_listed_with_its_reason(
    hub: Any, registry: Registry, house: House, add: Any, table: Any, loss_source: str, tmp_path: Path
) -> None:
    hub.push("acme/focal", with_manifest(table("Focal", ".loss:PlainLoss"), loss=loss_source))
    add(registry, "hf://acme/focal")
    (tmp_path / "cache" / "code" / "trees").rename(tmp_path / "elsewhere")
    record = next(r for r in house().records if "://" in r.dist)
    assert record.status == "broken"
    assert "twinkle plugins verify --fetch" in record.reason
    (tmp_path / "elsewhere").rename(tmp_path / "cache" / "code" / "trees")
    Path("twinkle.toml").write_text('[trust]\ndeny = ["hf://acme/*"]\n')
    with pytest.raises(NotTrusted, match=r"\[trust\] deny has 'hf://acme/\*'"):
        house().resolve("Focal", "loss")


def test_two_plugins_and_two_versions_of_one_live_side_by_side(hub: Any, registry: Registry, add: Any) -> None:
    first = hub.push("acme/focal", BARE)
    second = hub.push("acme/focal", {**BARE, "inner/words.py": "WORD = 'two'"})
    hub.push("other/focal", {**BARE, "inner/words.py": "WORD = 'three'"})
    references = [f"hf://acme/focal@{first}", f"hf://acme/focal@{second}", "hf://other/focal"]
    for reference in references:
        add(registry, reference)
    found = [registry.resolve(reference, "loss") for reference in references]
    assert [cls.word for cls in found] == ["one", "two", "three"]
    assert len({cls.__module__ for cls in found}) == 3
    with pytest.raises(ComponentConflict, match="locked at several revisions"):
        registry.resolve("hf://acme/focal", "loss")


def test_with_a_lock_neither_network_nor_hub_is_needed(
    hub: Any, registry: Registry, house: House, add: Any, site: Any
) -> None:
    hub.push("acme/focal", BARE)
    add(registry, "hf://acme/focal")
    hub.push("acme/focal", {**BARE, "inner/words.py": "WORD = 'moved'"})
    hub.asked.clear()
    assert registry.resolve("hf://acme/focal", "loss").word == "one", "a branch that moved changes nothing"
    assert hub.asked == []
    hub.offline = True
    with pytest.raises(PluginBroken, match="the hub hf:// failed: ConnectionError: there is no network"):
        registry.resolve("hf://acme/other", "loss")


def test_what_the_store_lacks_is_fetched_and_must_be_what_was_added(
    hub: Any, registry: Registry, add: Any, tmp_path: Path
) -> None:
    commit = hub.push("acme/focal", BARE)
    add(registry, "hf://acme/focal")
    (tmp_path / "cache" / "code").rename(tmp_path / "gone")
    files = hub.commits["acme/focal", commit]
    hub.commits["acme/focal", commit] = {**files, "focal.py": files["focal.py"] + b"#"}
    with pytest.raises(
        NotTrusted, match=r"the files of .* on the hub differ from those that were added \('focal.py' changed\)"
    ):
        registry.resolve("hf://acme/focal", "loss")
    assert not (tmp_path / "cache" / "code" / "trees").exists()
    hub.commits["acme/focal", commit] = files
    assert registry.resolve("hf://acme/focal", "loss").word == "one"


def test_a_class_pickles_to_another_process_which_checks_anew(
    hub: Any, registry: Registry, add: Any, tmp_path: Path, site: Any
) -> None:
    text = BARE["focal.py"].replace("house_contracts", "acme_contracts")
    site.write("acme_contracts.py", "class Loss: ...")
    hub.push("acme/focal", {**BARE, "focal.py": text})
    add(registry, "hf://acme/focal")
    found = registry.resolve("hf://acme/focal#Focal", "optimizer")
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).word)"

    def elsewhere(**changes: str) -> subprocess.CompletedProcess[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(site.folder), **changes}
        return subprocess.run(
            [sys.executable, "-c", code], input=pickle.dumps(found), env=environment, capture_output=True
        )

    assert elsewhere().stdout == b"one\n"
    empty = elsewhere(TWINKLE_CACHE_DIR=str(tmp_path / "empty"))
    assert b"ModuleNotFoundError: " in empty.stderr
    assert b"is not in the store of this machine" in empty.stderr
    assert b"hf://acme/focal, run: twinkle plugins verify --fetch" in empty.stderr
    unlocked = elsewhere(TWINKLE_LOCK=str(tmp_path / "no.lock"))
    assert b"NotTrusted: " in unlocked.stderr
    assert b"cannot run code from hf://acme/focal" in unlocked.stderr


def test_data_files_are_read_through_importlib_resources(hub: Any, registry: Registry, add: Any) -> None:
    words = {"__init__.py": "X = 1", "data/words.txt": "ä\r\nb", "data/more/deep.bin": b"\0\1", "pkg/__init__.py": ""}
    hub.push("acme/data", words)
    add(registry, "hf://acme/data")
    assert registry.resolve("hf://acme/data#X", "optimizer") == 1
    name = next(name for name in sys.modules if name.startswith("twinkle_registry.code.data_"))
    files = importlib.resources.files(name)
    assert (files / "data" / "words.txt").read_text("utf-8") == "ä\r\nb"
    assert files.joinpath("data/more/deep.bin").read_bytes() == b"\0\1"
    assert sorted(entry.name for entry in files.iterdir()) == ["__init__.py", "data", "pkg"]
    assert (files / "data").is_dir()
    assert not (files / "nothing").is_file()
    with (files / "data" / "words.txt").open("rb") as stream:
        assert stream.read() == "ä\r\nb".encode()
    with importlib.resources.as_file(files / "data" / "words.txt") as path:
        assert path.read_bytes() == "ä\r\nb".encode()
    with pytest.raises(ValueError, match="files from a hub are read-only"):
        (files / "data" / "words.txt").open("w")
    with pytest.raises(FileNotFoundError):
        (files / ".." / "files.sha256").read_bytes()
    assert pkgutil.get_data(name, "data/more/deep.bin") == b"\0\1"


def test_an_absolute_import_of_an_own_file_is_explained(hub: Any, registry: Registry, add: Any) -> None:
    hub.push("acme/abs", {"__init__.py": "import helper", "helper.py": ""})
    add(registry, "hf://acme/abs")
    with pytest.raises(PluginBroken, match=r"its author must write 'from \. import helper'"):
        registry.resolve("hf://acme/abs#X", "loss")


def test_files_named_like_other_modules_shadow_nothing(hub: Any, registry: Registry, add: Any) -> None:
    text = "import json\nfrom . import json as own\nX = (json.dumps(1), own.X)\n"
    files = {"__init__.py": "from .inner import X", "inner.py": text}
    hub.push("acme/json", {**files, "json.py": "X = 'own'", "twinkle_registry.py": "raise SystemExit"})
    add(registry, "hf://acme/json")
    assert registry.resolve("hf://acme/json#X", "optimizer") == ("1", "own")
    assert importlib.import_module("json").__name__ == "json"


@pytest.mark.parametrize(
    ("head", "more", "error", "message"),
    [
        ('core = ">=3"', "", PluginIncompatible, "needs twinkle-core >=3"),
        ('core = ">=0.1"', 'colour = "red"', ManifestError, "colour: unknown key"),
        (
            'core = ">=0.1"',
            '[[component]]\nkind = "loss"\nname = "A"\nref = "os:getcwd"',
            ManifestError,
            "'os:getcwd' is outside",
        ),
        (
            'core = ">=0.1"',
            '[[component]]\nkind = "lass"\nname = "A"\nref = ".a:B"',
            PluginBroken,
            "unknown kind 'lass'",
        ),
        ("core = ", "", ManifestError, "cannot be read as TOML"),
    ],
)
def test_a_wrong_manifest_is_not_even_added(
    hub: Any, registry: Registry, add: Any, head: str, more: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    text = f'schema = 1\n{head}\nname = "acme-focal"\n{more}\n'
    hub.push("acme/focal", {"twinkle-plugin.toml": text, "a.py": ""})
    with pytest.raises(error, match=message):
        add(registry, "hf://acme/focal")
    assert not Path("twinkle.lock").exists()
    assert not (tmp_path / "cache" / "code" / "trees").exists()


def test_requirements_are_checked_before_the_import_and_shown_when_added(
    hub: Any, registry: Registry, add: Any, table: Any
) -> None:
    needs = table("Focal", ".loss:Focal", requires='["surely-not-installed>=3"]')
    hub.push("acme/focal", with_manifest(needs, loss="raise SystemExit"))
    assert add(registry, "hf://acme/focal").missing == ("surely-not-installed>=3 (not installed)",)
    with pytest.raises(RequirementMissing, match="pip install 'surely-not-installed>=3'"):
        registry.resolve("hf://acme/focal", "loss")


def test_a_plugin_that_settings_disable_is_disabled_by_reference_too(
    hub: Any, house: House, add: Any, table: Any, loss_source: str
) -> None:
    hub.push("acme/focal", with_manifest(table("Focal", ".loss:PlainLoss"), loss=loss_source))
    add(house(), "hf://acme/focal")
    settings = Settings(disabled=frozenset({"acme-focal"}))
    with pytest.raises(ComponentNotFound, match="plugin acme-focal is disabled"):
        house(settings=settings).resolve("hf://acme/focal", "loss")


def test_a_module_that_raises_leaves_nothing_behind(hub: Any, registry: Registry, add: Any) -> None:
    hub.push("acme/bad", {"__init__.py": "from . import part\nraise ValueError('no')", "part.py": ""})
    add(registry, "hf://acme/bad")
    for _ in range(2):
        with pytest.raises(PluginBroken, match="ValueError: no"):
            registry.resolve("hf://acme/bad#X", "loss")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf://acme", "'acme' is not a repository"),
        ("hf://acme/../etc", "is not a repository"),
        ("hf://acme/a/b", "'acme/a/b' is not a repository"),
        ("hf:///acme", "'/acme' is not a repository"),
        ("hf://acme/focal@", "the revision '' is not a branch"),
        ("hf://acme/focal@../../x", "the revision '../../x' is not a branch"),
        ("hf://acme/focal#", "'' is not the name of a component"),
        ("hf://acme/focal#os.system('x')", "is not the name of a component"),
        ("hf://acme/focal\n", "is not a repository"),
        ("hf://acme/fo\x1b[2Jcal", r"'acme/fo\\x1b\[2Jcal' is not a repository"),
        ("hf://acme/f%2e%2e", "is not a repository"),
        ("file:///tmp/../etc", "is not a repository"),
    ],
)
def test_a_reference_that_is_none_is_refused_before_any_hub_is_asked(
    hub: Any, registry: Registry, text: str, message: str
) -> None:
    with pytest.raises(ComponentNotFound, match=message):
        registry.resolve(text, "loss")
    assert hub.asked == []


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[int, list[bytes]]]:
    """Return a function that gives how often a lock was parsed, and every content that was hashed, since it began."""
    parsed: list[bytes] = []
    hashed: list[bytes] = []

    def parse(content: bytes, path: Path) -> Any:
        parsed.append(content)
        return parse_lock(content, path)

    def hash_content(content: bytes) -> str:
        hashed.append(content)
        return hashlib.sha256(content).hexdigest()

    parse_lock = lock.parse_lock
    lock._parsed.cache_clear()
    monkeypatch.setattr(lock, "parse_lock", parse)
    monkeypatch.setattr(store, "sha256", hash_content)
    return lambda: (len(parsed), hashed)


LOADS: dict[str, Callable[[Registry], Any]] = {
    "a reference": lambda registry: registry.resolve("hf://acme/focal#Focal", "loss"),
    "a name": lambda registry: registry.resolve("Focal", "loss"),
    "an import": lambda registry: importlib.import_module(registry.records[-1].package).Focal,
}


@pytest.mark.parametrize("load", LOADS)
def test_a_load_parses_the_lock_once_and_hashes_every_file_once(
    hub: Any, house: House, add: Any, table: Any, counted: Any, load: str
) -> None:
    text = {"inner/words.py": "WORD = 'one'", "data/words.txt": "some", "unused.py": "X = 1"}
    files = with_manifest(table("Focal", ".focal:Focal"), focal=PATCH)
    hub.push("acme/focal", {**files, **text, "__init__.py": "from .focal import Focal" if load == "an import" else ""})
    add(house(), "hf://acme/focal")
    parses, hashed = counted()
    lock._parsed.cache_clear()
    registry = house()
    before, parses = len(hashed), parses
    assert LOADS[load](registry).word == "one"
    entry = Lock.load().hub[0]
    digests = [hashlib.sha256(content).hexdigest() for content in hashed[before:]]
    assert {path: digests.count(digest) for path, digest in entry.files.items()} == dict.fromkeys(entry.files, 1)
    assert counted()[0] - parses == 1, "neither the start nor the load nor this test parses it again"


def test_what_a_load_has_read_is_not_used_by_a_later_one(hub: Any, registry: Registry, add: Any) -> None:
    hub.push("acme/focal", {**BARE, "later.py": "X = 1"})
    add(registry, "hf://acme/focal")
    package = registry.resolve("hf://acme/focal", "loss").__module__.rpartition(".")[0]
    file = Path(sys.modules[package].__loader__.tree.folder) / "later.py"  # type: ignore[union-attr]
    file.write_text("X = 2")
    with pytest.raises(NotTrusted, match=r"later\.py was changed after it was added"):
        importlib.import_module(f"{package}.later")
    file.write_text("X = 1")
    assert importlib.import_module(f"{package}.later").X == 1


def test_a_task_that_was_started_by_a_load_and_outlives_it_reads_files_again(
    hub: Any, registry: Registry, add: Any
) -> None:
    starts = "import contextvars\nCONTEXT = contextvars.copy_context()\n"
    hub.push("acme/focal", {**BARE, "__init__.py": starts + BARE["__init__.py"], "later.py": "X = 1"})
    add(registry, "hf://acme/focal")
    package = registry.resolve("hf://acme/focal", "loss").__module__.rpartition(".")[0]
    module: Any = sys.modules[package]
    (Path(module.__loader__.tree.folder) / "later.py").write_text("X = 2")
    with pytest.raises(NotTrusted, match=r"later\.py was changed after it was added"):
        module.CONTEXT.run(importlib.import_module, f"{package}.later")
