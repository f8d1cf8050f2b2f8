"""Attacks on the store and on downloads: what is not byte for byte what was added is never run, and never kept."""

import importlib
import os
import py_compile
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle_registry import ComponentNotFound, NotTrusted, PluginBroken, Registry, SettingsError
from twinkle_registry.trust import store
from twinkle_registry.trust.lock import Lock
from twinkle_registry.trust.store import Store

House = Callable[..., Registry]
FOCAL = "from house_contracts import Loss\nclass Focal(Loss):\n    def __call__(self, inputs): ...\n"
FILES = {"__init__.py": "from .focal import Focal", "focal.py": FOCAL, "later.py": "X = 1", "data/words.txt": "some"}
REFERENCE = "hf://acme/focal"


@pytest.fixture
def registry(hub: Any, house: House) -> Registry:
    return house()


@pytest.fixture
def tree(hub: Any, registry: Registry, add: Any, tmp_path: Path) -> Path:
    """The folder of an added repository in the store."""
    hub.push("acme/focal", FILES)
    add(registry, REFERENCE)
    (folder,) = (tmp_path / "cache" / "code" / "trees").iterdir()
    return folder / "files"


def edit_one_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    stat = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("path", ["__init__.py", "focal.py", "later.py", "data/words.txt"])
def test_one_byte_edited_after_add_and_nothing_is_imported(tree: Path, registry: Registry, path: str) -> None:
    edit_one_byte(tree / path)
    with pytest.raises(NotTrusted, match=r"was changed after it was added: .* twinkle plugins verify --fetch"):
        registry.resolve(REFERENCE, "loss")
    assert not [name for name in sys.modules if name.startswith("twinkle_registry.code.focal_")]


def test_a_file_that_is_edited_after_the_package_was_imported_is_not_run(tree: Path, registry: Registry) -> None:
    found = registry.resolve(REFERENCE, "loss")
    edit_one_byte(tree / "later.py")
    with pytest.raises(NotTrusted, match=r"later\.py was changed after it was added"):
        importlib.import_module(found.__module__.replace(".focal", ".later"))
    edit_one_byte(tree / "data" / "words.txt")
    loader: Any = sys.modules[found.__module__].__loader__
    with pytest.raises(NotTrusted, match=r"words\.txt"):
        loader.get_data(str(tree / "data" / "words.txt"))


def test_a_file_that_was_removed_is_missed(tree: Path, registry: Registry) -> None:
    (tree / "later.py").unlink()
    with pytest.raises(NotTrusted, match=r"later\.py was added, but cannot be read now"):
        registry.resolve(REFERENCE, "loss")


def test_a_poisoned_pyc_is_never_read_nor_is_one_written(tree: Path, registry: Registry, tmp_path: Path) -> None:
    poison = tmp_path / "poison.py"
    poison.write_text("raise SystemExit('poisoned')")
    for name in ("focal", "__init__"):
        for place in (f"__pycache__/{name}.{sys.implementation.cache_tag}.pyc", f"{name}.pyc"):
            (tree / place).parent.mkdir(exist_ok=True)
            py_compile.compile(
                str(poison), cfile=str(tree / place), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
            )
    before = sorted(tree.rglob("*"))
    assert registry.resolve(REFERENCE, "loss").__name__ == "Focal"
    assert sorted(tree.rglob("*")) == before


def test_a_file_that_was_planted_in_the_store_does_not_exist(tree: Path, registry: Registry) -> None:
    package = registry.resolve(REFERENCE, "loss").__module__.rpartition(".")[0]
    (tree / "planted.py").write_text("raise SystemExit('planted')")
    (tree / "folder").mkdir()
    (tree / "folder" / "__init__.py").write_text("raise SystemExit('planted')")
    for name in ("planted", "folder", "folder.inner"):
        with pytest.raises(ModuleNotFoundError, match="has no module"):
            importlib.import_module(f"{package}.{name}")


def test_a_listing_that_was_changed_along_with_the_file_does_not_help(tree: Path, registry: Registry) -> None:
    (tree / "focal.py").write_text("raise SystemExit('tampered')")
    files = store.hash_folder(tree, context="test")
    (tree.parent / "files.sha256").write_text(store.listing_text(files))
    with pytest.raises(NotTrusted, match="was changed after it was stored"):
        registry.resolve(REFERENCE, "loss")


def test_a_whole_tree_that_was_planted_under_its_own_digest_is_nobodys(
    tree: Path, registry: Registry, tmp_path: Path
) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "__init__.py").write_text("raise SystemExit('planted')")
    files = store.hash_folder(evil, context="test")
    place = tree.parent.parent / store.digest_of(files)[: store.DIGEST_IN_NAMES]
    place.mkdir()
    evil.rename(place / "files")
    (place / "files.sha256").write_text(store.listing_text(files))
    with pytest.raises(NotTrusted, match="the origin of this code is unknown"):
        importlib.import_module(f"twinkle_registry.code.focal_{place.name}")


def test_a_link_in_the_place_of_a_file_is_read_as_what_it_points_to(tree: Path, registry: Registry) -> None:
    elsewhere = tree.parent / "elsewhere.py"
    elsewhere.write_text("raise SystemExit('linked')")
    (tree / "focal.py").unlink()
    (tree / "focal.py").symlink_to(elsewhere)
    with pytest.raises(NotTrusted, match="was changed after it was added"):
        registry.resolve(REFERENCE, "loss")


def test_adding_again_heals_a_damaged_store(tree: Path, registry: Registry, add: Any) -> None:
    edit_one_byte(tree / "focal.py")
    add(registry, REFERENCE)
    assert registry.resolve(REFERENCE, "loss").__name__ == "Focal"


def test_modules_of_no_digest_are_not_ours(registry: Registry) -> None:
    for name in ("nothing", "focal_123", f"focal_{'g' * 32}"):
        with pytest.raises(ModuleNotFoundError, match="No module named"):
            importlib.import_module(f"twinkle_registry.code.{name}")
    with pytest.raises(ModuleNotFoundError, match="is not in the store"):
        importlib.import_module(f"twinkle_registry.code.focal_{'0' * 32}")


def put(path: str, content: bytes = b"x") -> Callable[[Path], None]:
    def spoil(target: Path) -> None:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(content)

    return spoil


def many(target: Path) -> None:
    for number in range(store.MAX_FILES):
        (target / f"{number}.txt").touch()


def bomb(target: Path) -> None:
    with (target / "zeros.bin").open("wb") as file:
        file.truncate(store.MAX_BYTES + 1)


def vanish(target: Path) -> None:
    raise ConnectionResetError("the other end hung up")


def fifo(target: Path) -> None:
    os.mkfifo(target / "pipe.py")


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda t: (t / "link.py").symlink_to("/etc/passwd"), NotTrusted, r"'link\.py' is a link; code must consist"),
        (lambda t: (t / "folder").symlink_to("/etc"), NotTrusted, "'folder' is a link to a folder"),
        (fifo, NotTrusted, r"'pipe\.py' is a pipe; code must consist"),
        (many, NotTrusted, "more than 2000 files or 64 MiB"),
        (bomb, NotTrusted, "more than 2000 files or 64 MiB"),
        (put("huge.py", b"#" * (store.MAX_SOURCE_BYTES + 1)), NotTrusted, r"'huge\.py' has \d+ bytes"),
        (put("Focal.py"), NotTrusted, r"'Focal\.py' and 'focal\.py' shadow each other"),
        (put("focal/__init__.py"), NotTrusted, "shadow each other"),
        (put("\ufb01.txt"), NotTrusted, "shadow each other"),
        (put("a\nb.py"), NotTrusted, r"the path 'a\\nb\.py' is refused"),
        (put("a\x1b]0;b.py"), NotTrusted, r"'a\\x1b\]0;b\.py' is refused"),
        (put("a\u202eb.py"), NotTrusted, r"'a\\u202eb\.py' is refused"),
        (put("a\\..\\b.py"), NotTrusted, "is refused"),
        (put("c:b.py"), NotTrusted, "is refused"),
        (put("trailing. /b.py"), NotTrusted, "is refused"),
        (put("seven.py", b"# coding: utf-7\n# +AGk-mport os\n"), NotTrusted, r"'seven\.py' is written in 'utf-7'"),
        (put("rot.py", b"# -*- coding: rot13 -*-\n"), NotTrusted, r"'rot\.py' (is written in|cannot be read as text)"),
        (put("raw.py", b"x = '\xff\xfe'\n"), NotTrusted, r"'raw\.py' cannot be read as text"),
        (vanish, PluginBroken, "ConnectionResetError: the other end hung up"),
    ],
)
def test_what_no_plugin_may_hold_is_refused_and_nothing_of_it_stays(
    hub: Any, registry: Registry, add: Any, tmp_path: Path, spoil: Any, error: type[Exception], message: str
) -> None:
    hub.push("acme/focal", {**FILES, "fi.txt": ""})
    hub.spoil = spoil
    with pytest.raises(error, match=message):
        add(registry, REFERENCE)
    assert not Path("twinkle.lock").exists()
    folder = tmp_path / "cache" / "code"
    assert sorted(path.name for path in folder.rglob("*")) == ["incoming"]


def test_a_repository_that_vanishes_leaves_what_was_trusted_as_it_was(
    tree: Path, hub: Any, registry: Registry, add: Any
) -> None:
    hub.push("acme/focal", {**FILES, "later.py": "X = 2"})
    hub.spoil = vanish
    before = Path("twinkle.lock").read_bytes()
    with pytest.raises(PluginBroken, match="hung up"):
        add(registry, REFERENCE)
    assert Path("twinkle.lock").read_bytes() == before
    assert registry.resolve(REFERENCE, "loss").__name__ == "Focal"


def test_compiled_code_and_version_control_of_a_repository_are_left_out(hub: Any, registry: Registry, add: Any) -> None:
    hub.push("acme/focal", FILES)
    hub.spoil = lambda t: [put(p)(t) for p in ("focal.pyc", "__pycache__/focal.cpython-311.pyc", ".git/config")]
    add(registry, REFERENCE)
    assert set(Lock.load().hub[0].files) == set(FILES)


def test_a_repository_without_python_is_no_plugin(hub: Any, registry: Registry, add: Any) -> None:
    hub.push("acme/weights", {"model.safetensors": b"\0"})
    with pytest.raises(NotTrusted, match="contains no Python file"):
        add(registry, "hf://acme/weights")


def test_what_is_declined_was_never_here(hub: Any, registry: Registry, add: Any, tmp_path: Path) -> None:
    hub.push("acme/focal", FILES)
    assert add(registry, REFERENCE, lambda proposal: False) is None
    assert not Path("twinkle.lock").exists()
    assert not (tmp_path / "cache" / "code" / "trees").exists()
    assert not list((tmp_path / "cache" / "code" / "incoming").iterdir())


def test_a_hub_that_answers_with_another_commit_is_not_believed(hub: Any, registry: Registry, add: Any) -> None:
    commit = hub.push("acme/focal", FILES)
    hub.commit_of = lambda repo, revision=None: (repo, "f" * 40)
    with pytest.raises(NotTrusted, match=f"the hub answered with commit {'f' * 40}, expected {commit}"):
        add(registry, f"{REFERENCE}@{commit}")


@pytest.mark.parametrize("answer", [("acme/focal", "../../x"), ("acme/focal", ""), ("../x", "a" * 40), ("a", "b" * 40)])
def test_a_hub_that_answers_with_paths_is_not_believed(
    hub: Any, registry: Registry, add: Any, answer: tuple[str, str]
) -> None:
    hub.commit_of = lambda repo, revision=None: answer
    with pytest.raises(ComponentNotFound, match=r"an invalid commit|is not a repository"):
        add(registry, REFERENCE)


def test_a_commit_whose_note_was_planted_in_the_store_is_still_not_locked(
    tree: Path, hub: Any, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who writes into the store may say which tree a commit is; the lock is what then counts."""
    evil = hub.push("evil/focal", {**FILES, "focal.py": "raise SystemExit('evil')"})
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    with pytest.raises(PluginBroken, match="evil"):
        registry.resolve("hf://evil/focal", "loss")
    monkeypatch.delenv("TWINKLE_TRUST_REMOTE_CODE")
    for note in (tree.parents[2] / "commits").iterdir():
        digest = Store().tree_of(listing_origin(evil)).digest  # type: ignore[union-attr]
        note.write_text(f"{digest} {note.read_text().partition(' ')[2]}")
    assert registry.resolve(REFERENCE, "loss").__name__ == "Focal"
    with pytest.raises(NotTrusted, match="cannot run code"):
        registry.resolve("hf://evil/focal", "loss")


def listing_origin(commit: str) -> Any:
    from twinkle_registry.trust.reference import Origin

    return Origin("hf", "evil/focal", commit)


def test_a_store_that_cannot_be_written_is_one_clear_message(
    hub: Any, registry: Registry, add: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("acme/focal", FILES)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(
        SettingsError,
        match=r"code store .*: Not a directory; free some space, or set TWINKLE_CACHE_DIR to another cache",
    ):
        add(registry, REFERENCE)
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("twinkle_registry.trust.download.os.fsync", full)
    with pytest.raises(SettingsError, match=r"cannot write to the code store .*: No space left on device"):
        add(registry, REFERENCE)
    assert not Path("twinkle.lock").exists()


def test_what_killed_processes_left_is_cleared_after_a_day(
    hub: Any, registry: Registry, add: Any, tmp_path: Path
) -> None:
    for name, age in (("old", 100_000), ("new", 100)):
        left = tmp_path / "cache" / "code" / "incoming" / name
        left.mkdir(parents=True)
        (left / "half.py").touch()
        os.utime(left, (time.time() - age, time.time() - age))
    hub.push("acme/focal", FILES)
    add(registry, REFERENCE)
    assert [path.name for path in (tmp_path / "cache" / "code" / "incoming").iterdir()] == ["new"]


def test_several_add_at_once_and_nothing_is_lost(hub: Any, registry: Registry, add: Any) -> None:
    names = [f"acme/loss{number}" for number in range(8)]
    for name in names:
        hub.push(name, {**FILES, "later.py": f"X = {name!r}"})
    hub.push("acme/same", FILES)
    errors: list[BaseException] = []

    def work(reference: str) -> None:
        try:
            add(registry, reference)
        except BaseException as error:
            errors.append(error)

    references = [f"hf://{name}" for name in names] + ["hf://acme/same"] * 3
    threads = [threading.Thread(target=work, args=(reference,)) for reference in references]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert {entry.reference for entry in Lock.load().hub} == set(references)
    for reference in references:
        assert registry.resolve(reference, "loss").__name__ == "Focal"
    assert not list(Path().glob(".twinkle.lock*"))
